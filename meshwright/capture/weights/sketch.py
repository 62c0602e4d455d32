"""A model without its weights, and then some of them with the very values that building it whole would have given.

    skeleton = sketch(build, seed=0)          the model on the meta device: no memory, little time
    skeleton.fill(names)                      these parameters and buffers for real, in the same objects
    skeleton.fill(skeleton.names_in(layers))  those of some layers, once the model is cut
    pickle.dumps(skeleton)                    how to make the values, not the values: workers fill their own

All ranks draw every random number of the initialisation and keep what is their own: memory of that, time of the model. Where
building cannot be recorded the model is built for real, and what is not wanted is dropped; `skeleton.note` says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import getweakrefcount

import torch
from torch import Tensor, nn

from meshwright.capture.weights.generator_states import SetBack
from meshwright.capture.weights.recorder import META, Recorder, Unrecorded
from meshwright.capture.weights.safetensors_files import Weights, sources
from meshwright.capture.weights.swap_tensor import put
from meshwright.capture.weights.tape import Place, Tape, at
from meshwright.errors import MeshwrightError

log = logging.getLogger(__name__)


@dataclass
class Skeleton:
    """What `build()` gave, without values; `note` says why values had to be made at once, where that is so."""

    model: Any
    seed: int
    tape: Tape = field(default_factory=Tape)
    places: dict[str, Place] = field(default_factory=dict)
    note: str = ""
    weights: str | Path | None = None
    """Where values come from instead of the seed."""
    _values: dict[str, Tensor] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters and buffers, by every name they have."""
        return tuple(name for name, _ in tensors_of(self.model))

    def names_in(self, modules: Iterable[nn.Module]) -> tuple[str, ...]:
        """The names of what these modules hold of the model: layers that it was cut into, or parts of it."""
        mine = {id(t) for _, t in tensors_of(list(modules))}
        return tuple(name for name, t in tensors_of(self.model) if id(t) in mine)

    def _chosen(self, names: Collection[str] | None) -> tuple[str, ...]:
        chosen = self.names if names is None else tuple(names)
        if unknown := sorted(set(chosen) - set(self.names)):
            raise MeshwrightError(f"the model has no {unknown[0]!r}", fix="one of its parameters or buffers by name")
        return chosen

    def fill(self, names: Collection[str] | None = None) -> None:
        """Give these parameters and buffers their values; all of them if none are named. May be called once more for others."""
        chosen, held = self._chosen(names), dict(tensors_of(self.model))
        waiting = {name: held[name] for name in chosen if held[name].device == META}
        if self._values:
            for name, tensor in waiting.items():
                if tensor.device == META:
                    put(tensor, self._values[name])
            return
        storages = self.tape.play({self.places[name].storage for name in waiting}, self.seed)
        for name, tensor in waiting.items():
            if tensor.device == META:  # a tied one may have got them under its other name
                put(tensor, at(storages[self.places[name].storage], self.places[name]))

    def give(self, names: Collection[str], weights: str | Path | None = None) -> None:
        """The same from where the values are: in `weights`, in those of the sketch, or in the seed."""
        chosen = weights or self.weights
        if chosen is None:
            self.fill(names)
        else:
            self.load(chosen, names)

    def keep(self, names: Collection[str]) -> None:
        """All others have no values any more."""
        held = dict(tensors_of(self.model))
        kept = {id(held[name]) for name in names}
        for tensor in held.values():
            if id(tensor) not in kept and tensor.device != META and not getweakrefcount(tensor):
                put(tensor, tensor.detach().to(META))

    def load(self, path: str | Path, names: Collection[str] | None = None, *, ignore: Collection[str] = ()) -> None:
        """The same with values from safetensors files; what is never saved (non-persistent buffers) is computed."""
        chosen = self._chosen(names)
        held, saved = dict(tensors_of(self.model)), _saved(self.model)
        aliases: dict[int, list[str]] = {}
        for name in saved:
            aliases.setdefault(id(held[name]), []).append(name)
        weights = Weights.at(path)
        stored = sources(
            weights,
            {all_[0]: all_ for all_ in aliases.values()},
            {all_[0]: tuple(held[all_[0]].shape) for all_ in aliases.values()},
            ignore,
        )
        self.fill([name for name in chosen if name not in saved])
        for name in chosen:
            if name in saved and held[name].device == META:
                value = weights[stored[aliases[id(held[name])][0]]]
                put(held[name], value.to(held[name].dtype))
        weights.close()

    def forget(self) -> None:
        """Nothing more will be filled: let go of what that would take."""
        self.tape, self._values = Tape(), {}


def sketch(build: Callable[[], Any], *, seed: int = 0, weights: str | Path | None = None) -> Skeleton:
    """Build a model, or a list of modules, without memory for its weights.

    What the initialization would have drawn is recorded, so that each rank can fill the tensors of its own stages with the
    values that one process would have given them.

    Args:
        build: A function that builds the model.
        seed: The seed that the values are drawn from.
        weights: A safetensors file or folder that trainers and sessions read the values from instead.

    Returns:
        The model on `meta`, as `.model`, and what it takes to fill it.

    Raises:
        MeshwrightError: `build` returned something else than a module or a list of modules.

    Examples:
        >>> import torch
        >>> import meshwright as mw
        >>> skeleton = mw.sketch(lambda: torch.nn.Linear(4, 4), seed=1)
        >>> skeleton.model.weight.is_meta
        True
        >>> skeleton.fill()
        >>> torch.manual_seed(1).initial_seed(), torch.equal(torch.nn.Linear(4, 4).weight, skeleton.model.weight)
        (1, True)
    """
    recorder = Recorder()
    try:
        with recorder.clocks.running(), recorder:
            model = build()
    except (Unrecorded, SetBack, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return _built(build, seed, weights, f"{type(error).__name__}: {error}")
    _refuse(model)
    places = {name: recorder.place(tensor) for name, tensor in tensors_of(model)}
    _empty(model)
    return Skeleton(model, seed, recorder.tape, places, weights=weights)


def _refuse(model: Any) -> None:
    parts = [model] if isinstance(model, nn.Module) else model
    if not isinstance(parts, list | tuple) or not all(isinstance(part, nn.Module) for part in parts):
        raise MeshwrightError(f"building the model gave {type(model).__name__}", fix="a function that returns a module")


def tensors_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and other tensors of a model or of a list of modules, by all their names."""
    parts = {"": model} if isinstance(model, nn.Module) else {f"{index}.": part for index, part in enumerate(model)}
    for prefix, part in parts.items():
        yield from ((prefix + name, p) for name, p in part.named_parameters(remove_duplicate=False))
        yield from ((prefix + name, b) for name, b in part.named_buffers(remove_duplicate=False))
        for path, module in part.named_modules(remove_duplicate=False):
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    yield prefix + (f"{path}.{name}" if path else name), value


def _saved(model: Any) -> tuple[str, ...]:
    """The names of what a checkpoint of a model holds."""
    if isinstance(model, nn.Module):
        return tuple(model.state_dict(keep_vars=True))
    return tuple(f"{index}.{name}" for index, part in enumerate(model) for name in part.state_dict(keep_vars=True))


def _built(build: Callable[[], Any], seed: int, weights: str | Path | None, why: str) -> Skeleton:
    """The way for models that cannot be recorded: all values at once, and no more of them than are wanted afterwards."""
    note = f"building this model cannot be recorded, so all of it is built once ({why})"
    log.warning(note)
    kept = torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = build()
    finally:
        torch.set_rng_state(kept)
    _refuse(model)
    found = dict(tensors_of(model))
    values = {name: t.detach() for name, t in found.items()}
    _empty(model)
    return Skeleton(model, seed, note=note, weights=weights, _values=values)


def _empty(model: Any) -> None:
    """No tensor of a model has values any more; one that others point at weakly cannot be swapped, and is made anew."""
    fresh: dict[int, tuple[Tensor, Tensor]] = {}
    for name, tensor in list(tensors_of(model)):
        if getweakrefcount(tensor):
            blank = tensor.detach().to(META)
            new = nn.Parameter(blank, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank
            vars(new).update(vars(tensor))
            _, new = fresh.setdefault(id(tensor), (tensor, new))
            first, _, rest = ("", "", name) if isinstance(model, nn.Module) else name.partition(".")
            path, _, last = rest.rpartition(".")
            setattr((model[int(first)] if first else model).get_submodule(path), last, new)
        elif tensor.device != META:
            put(tensor, tensor.detach().to(META))
