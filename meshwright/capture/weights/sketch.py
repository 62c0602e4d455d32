"""Builds a model without its weights, and fills chosen weights with exactly the values that a complete build would give.

    skeleton = sketch(build, seed=0)          the model on the meta device: no memory, little time
    skeleton.fill(names)                      gives these parameters and buffers real values, in the same objects
    skeleton.fill(skeleton.names_in(layers))  those of some layers, after the model is cut
    pickle.dumps(skeleton)                    contains how to make the values, not the values: workers fill their own

Every rank draws all random numbers of the initialization and keeps only its own part. It uses the memory of its part and the time
of the whole model. If building cannot be recorded, the model is built completely and unwanted values are dropped; `skeleton.note`
says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import getweakrefcount

import torch
from torch import Tensor, UntypedStorage, nn

from meshwright.capture.weights.generator_states import SetBack
from meshwright.capture.weights.recorder import META, Recorder, Unrecorded
from meshwright.capture.weights.safetensors_files import Weights, sources
from meshwright.capture.weights.swap_tensor import put
from meshwright.capture.weights.tape import Place, Tape, at
from meshwright.errors import MeshwrightError

log = logging.getLogger(__name__)

Part = Callable[[Tensor, Tensor], Tensor]
"""Returns what to keep of the value of a tensor: all of it, or the part of a rank, as a copy."""


def _whole(tensor: Tensor, value: Tensor) -> Tensor:
    return value


@dataclass
class Skeleton:
    """The result of `build()` without values. If values had to be made at once, `note` says why."""

    model: Any
    seed: int
    tape: Tape = field(default_factory=Tape)
    places: dict[str, Place] = field(default_factory=dict)
    note: str = ""
    weights: str | Path | None = None
    """The file or folder to read values from, instead of using the seed."""
    _values: dict[str, Tensor] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters and buffers, under all their names."""
        return tuple(name for name, _ in tensors_of(self.model))

    def names_in(self, modules: Iterable[nn.Module]) -> tuple[str, ...]:
        """Return the model's names for the tensors in these modules, for example the layers of a stage."""
        mine = {id(t) for _, t in tensors_of(list(modules))}
        return tuple(name for name, t in tensors_of(self.model) if id(t) in mine)

    def _chosen(self, names: Collection[str] | None) -> tuple[str, ...]:
        chosen = self.names if names is None else tuple(names)
        if unknown := sorted(set(chosen) - set(self.names)):
            raise MeshwrightError(f"the model has no {unknown[0]!r}", fix="name one of its parameters or buffers")
        return chosen

    def fill(self, names: Collection[str] | None = None, *, part: Part | None = None) -> None:
        """Give these parameters and buffers their values; all of them if `names` is None. May be called again for others.

        With `part`, tensors get what it returns for their values. Each value is freed when its part has been taken.
        """
        chosen, held = self._chosen(names), dict(tensors_of(self.model))
        waiting = {name: held[name] for name in chosen if held[name].device == META}
        part = part or _whole
        if self._values:
            for name, tensor in waiting.items():
                if tensor.device == META:
                    put(tensor, part(tensor, self._values[name]))
            return
        by_storage: dict[int, list[str]] = {}
        for name in waiting:
            by_storage.setdefault(self.places[name].storage, []).append(name)

        def take(number: int, storage: UntypedStorage) -> None:
            for name in by_storage[number]:
                if waiting[name].device == META:  # a tied tensor may already be filled under its other name
                    put(waiting[name], part(waiting[name], at(storage, self.places[name])))

        self.tape.play(by_storage, self.seed, take)

    def give(self, names: Collection[str], weights: str | Path | None = None, *, part: Part | None = None) -> None:
        """Give these tensors their values from `weights`, from the weights of the sketch, or from the seed, in this order."""
        chosen = weights or self.weights
        if chosen is None:
            self.fill(names, part=part)
        else:
            self.load(chosen, names, part=part)

    def keep(self, names: Collection[str]) -> None:
        """Drop the values of all other tensors."""
        held = dict(tensors_of(self.model))
        kept = {id(held[name]) for name in names}
        for tensor in held.values():
            if id(tensor) not in kept and tensor.device != META and not getweakrefcount(tensor):
                put(tensor, tensor.detach().to(META))

    def load(
        self,
        path: str | Path,
        names: Collection[str] | None = None,
        *,
        ignore: Collection[str] = (),
        part: Part | None = None,
    ) -> None:
        """Fill from safetensors files. Tensors that are never saved (non-persistent buffers) are computed."""
        chosen, take = self._chosen(names), part or _whole
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
        self.fill([name for name in chosen if name not in saved], part=part)
        for name in chosen:
            if name in saved and held[name].device == META:
                value = weights[stored[aliases[id(held[name])][0]]]
                put(held[name], take(held[name], value.to(held[name].dtype)))
        weights.close()

    def forget(self) -> None:
        """Free what `fill` needs. Nothing can be filled after this."""
        self.tape, self._values = Tape(), {}


def sketch(build: Callable[[], Any], *, seed: int = 0, weights: str | Path | None = None) -> Skeleton:
    """Build a model, or a list of modules, without memory for its weights.

    The operations of the initialization are recorded, so that each rank can fill the tensors of its own stages with the
    values that they would have in one process.

    Args:
        build: A function that builds the model.
        seed: The seed that the values are drawn from.
        weights: A safetensors file or folder that trainers and sessions read the values from instead.

    Returns:
        A skeleton: `.model` is the model on the meta device, and `fill` gives it its values.

    Raises:
        MeshwrightError: `build` returned something other than a module or a list of modules.

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
        raise MeshwrightError(f"building the model returned {type(model).__name__}", fix="pass a function that returns a module")


def tensors_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, buffers and other tensors of a model or of a list of modules, under all their names."""
    parts = {"": model} if isinstance(model, nn.Module) else {f"{index}.": part for index, part in enumerate(model)}
    for prefix, part in parts.items():
        yield from ((prefix + name, p) for name, p in part.named_parameters(remove_duplicate=False))
        yield from ((prefix + name, b) for name, b in part.named_buffers(remove_duplicate=False))
        for path, module in part.named_modules(remove_duplicate=False):
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    yield prefix + (f"{path}.{name}" if path else name), value


def _saved(model: Any) -> tuple[str, ...]:
    """Return the names of the tensors in the state_dict of a model."""
    if isinstance(model, nn.Module):
        return tuple(model.state_dict(keep_vars=True))
    return tuple(f"{index}.{name}" for index, part in enumerate(model) for name in part.state_dict(keep_vars=True))


def _built(build: Callable[[], Any], seed: int, weights: str | Path | None, why: str) -> Skeleton:
    """Build a model that cannot be recorded: all values at once. Unwanted values are dropped later."""
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
    """Remove the values of all tensors of a model. A tensor with weak references cannot be swapped, so a new one replaces it."""
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
