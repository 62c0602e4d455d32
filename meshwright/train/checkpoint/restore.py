"""Restores a checkpoint: finds it, checks that it is complete and fits the model, and loads it into an engine of any plan.

Every rank reads only what it holds. All errors are found before anything is changed, and are raised on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from meshwright.errors import MeshwrightError
from meshwright.runtime.engine.engine import Engine
from meshwright.train.checkpoint import folders as rotate
from meshwright.train.checkpoint.checkpoint_facts import read_facts
from meshwright.train.checkpoint.run_state import (
    BUFFER,
    MODEL,
    OPTIMIZER,
    PREVIOUS,
    buffers,
    late,
    parameters,
    part,
    put_previous,
    state_part,
)
from meshwright.train.checkpoint.tensor_files import described, read_tensors
from meshwright.train.optimizer.optimizer_facts import put_back, refuse_kind, refuse_mixture
from meshwright.train.setup.all_ranks import agree

WHOLE_BYTES = 256 << 20
"""How many bytes of whole tensors are read at a time by a rank that holds parts of them."""


@dataclass(frozen=True)
class Resumed:
    """The facts of a checkpoint, besides the state that was loaded into the engine. The next step is number `step`."""

    folder: Path
    step: int
    seed: int
    data: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] | None = None


def restore(engine: Engine, root: Path, named: Path | None, group: dist.ProcessGroup | None) -> Resumed | None:
    """Load a checkpoint into an engine: the named one, which must be complete, or the newest complete one."""
    folder = named if named is not None else _newest(root, group)
    if folder is None:
        return None
    if named is not None and (wrong := _damage(folder, group)):
        raise MeshwrightError("; ".join(wrong), fix="resume from the last good one: resume_from_checkpoint=True, or name another")
    known = agree(lambda: read_facts(folder), group=group)[dist.get_rank()]
    reader = HuggingFaceStorageReader(str(folder))
    sizes = {key: (about.size, about.properties.dtype) for key, about in described(reader).items()}
    held = agree(lambda: sorted(_fits(engine, sizes, known)), group=group)
    agree(lambda: _refuse_strangers(sizes, set().union(*held, known.get("unread", ()))), group=group)
    _fill(engine, sizes, known, reader, group)
    for stage in engine.stages.values():
        stage.seed = known["seed"]
    if engine.scaler is not None and known["scaler"] is not None:
        engine.scaler.load_state_dict(known["scaler"])
    fields = {key: known[key] for key in ("step", "seed", "data", "extra")}
    return Resumed(folder, **fields)


def _newest(root: Path, group: dist.ProcessGroup | None) -> Path | None:
    """Return the last good checkpoint, as all ranks see it."""
    folders = [Path(text) for text in agree(lambda: [str(path) for path in rotate.candidates(root)], group=group)[0]]
    return rotate.last_good(root, folders=folders, judge=lambda folder: _damage(folder, group))


def _damage(folder: Path, group: dist.ProcessGroup | None) -> list[str]:
    """Return what is wrong with the files of a checkpoint. Each rank reads a share of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = agree(lambda: rotate.damage(folder, share=rank, shares=ranks), group=group)
    return sorted({line for part in found for line in part})


def _fits(engine: Engine, sizes: Mapping[str, tuple[torch.Size, torch.dtype]], known: Mapping[str, Any]) -> set[str]:
    """Return the keys that this rank reads. Raises for missing tensors and different shapes."""
    mine = _weights(engine, known)
    if missing := sorted(set(mine) - set(sizes)):
        raise MeshwrightError(
            f"the checkpoint has no {_list(missing)}",
            fix="use the model that it was written with, with the same configuration",
        )
    for key, tensor in mine.items():
        saved, shape = tuple(sizes[key][0]), _shape(engine, key, tensor)
        if saved != shape:
            raise MeshwrightError(f"{key} is {saved} in the checkpoint and {shape} in the model")
    refuse_kind(engine, known)
    refuse_mixture(engine, known)
    return set(mine)


def _weights(engine: Engine, known: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the parameters and buffers of this rank by their keys in the files. They are filled in place."""
    params = {name: _held(engine, p) for name, p in parameters(engine).items()}
    mine = {name: t.detach() for name, t in params.items() if t is not None}
    if known["schema"] > 1:
        return {**mine, **{name: b.detach() for name, b in buffers(engine).items()}}
    found = {f"{MODEL}/{name}": t for name, t in mine.items()}
    found |= {f"{BUFFER}/{name}": b.detach() for name, b in buffers(engine).items()}
    return {key: t if t.dim() else t.view(1) for key, t in found.items()}


def _held(engine: Engine, parameter: nn.Parameter) -> Tensor | None:
    """Return what this rank keeps of a parameter: itself, or its piece if parameters are divided among ranks."""
    unit = engine.unit_of.get(parameter)
    return parameter if unit is None or unit.keeps_whole else unit.held(parameter)


def _shape(engine: Engine, key: str, tensor: Tensor) -> tuple[int, ...]:
    """Return the shape that a tensor of this rank has in a checkpoint: that of the whole parameter."""
    parameter = parameters(engine).get(key.removeprefix(f"{MODEL}/"))
    split = engine.layers.tensor
    if parameter is not None and _held(engine, parameter) is not parameter:
        return tuple(parameter.shape)
    return tuple(tensor.shape) if split is None or parameter is None or not parameter.dim() else split.cuts[parameter].shape


def _refuse_strangers(sizes: Mapping[str, object], held: set[str]) -> None:
    """Raise if the checkpoint has a parameter that no rank has: it belongs to another model."""
    if strange := sorted(key for key in set(sizes) - held if not key.startswith((f"{OPTIMIZER}/", f"{PREVIOUS}/"))):
        raise MeshwrightError(
            f"the model has no {_list(strange)}, which the checkpoint holds", fix="use the model that it was written with"
        )


def _list(keys: list[str]) -> str:
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return ", ".join(keys[:3]) + more


def _fill(
    engine: Engine,
    sizes: Mapping[str, tuple[torch.Size, torch.dtype]],
    known: Mapping[str, Any],
    reader: HuggingFaceStorageReader,
    group: dist.ProcessGroup | None,
) -> None:
    """Read this rank's tensors in place, and the tensors of its optimizers into new ones."""
    params, into = parameters(engine), _weights(engine, known)
    of = {key: p for key in into if (p := params.get(key.removeprefix(f"{MODEL}/"))) is not None}
    held = {engine.layers.names[p]: unit.held(p) for unit in engine.units.values() for p in unit.params}
    kept: dict[str, dict[str, Tensor]] = {}
    for key, (size, dtype) in sizes.items():
        if key.startswith(f"{OPTIMIZER}/"):
            _, entry, name = key.split("/", 2)
            if (mine := held.get(name)) is not None:
                of[key] = params[name]
                shape = mine.shape if _is_part(engine, key, params[name], size) else size
                into[key] = kept.setdefault(name, {})[entry] = torch.empty(shape, dtype=dtype, device=params[name].device)
    older = _previous(engine, sizes)
    into |= {f"{PREVIOUS}/{name}": t for name, t in older.items()}
    parts = {key: p for key, p in of.items() if _is_part(engine, key, p, sizes[key][0])}
    agree(lambda: _read(engine, reader, into, parts, sizes), group=group)
    put_back(engine, known, kept)
    put_previous(engine, {name: t.view(params[name].shape) for name, t in older.items()})


def _previous(engine: Engine, sizes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
    """Return empty tensors for the saved parameters of one step ago that this rank reads."""
    wanted = {engine.layers.names[p]: p for unit in late(engine).values() for p in unit.params}
    saved = {name: (p, *sizes[key]) for name, p in wanted.items() if (key := f"{PREVIOUS}/{name}") in sizes}
    return {name: torch.empty(size, dtype=dtype, device=p.device) for name, (p, size, dtype) in saved.items()}


def _is_part(engine: Engine, key: str, parameter: nn.Parameter, saved: Sequence[int]) -> bool:
    """Return whether this rank holds only a part of a saved tensor, or a piece of a saved state."""
    unit = engine.unit_of.get(parameter)
    is_cut = engine.layers.tensor is not None and engine.layers.tensor.is_cut(parameter, saved)
    if unit is None or parameter not in unit.pieces or is_cut:
        return is_cut
    return tuple(saved) == tuple(parameter.shape) if key.startswith(f"{OPTIMIZER}/") else not unit.keeps_whole


def _read(
    engine: Engine,
    reader: HuggingFaceStorageReader,
    into: Mapping[str, Tensor],
    parts: Mapping[str, nn.Parameter],
    sizes: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> None:
    """Fill tensors. Those of which this rank holds parts are read whole, a few at a time."""
    read_tensors(reader, {key: t for key, t in into.items() if key not in parts})
    for keys in _some_at_a_time(parts, sizes):
        whole = {key: torch.empty(sizes[key][0], dtype=sizes[key][1], device=into[key].device) for key in keys}
        read_tensors(reader, whole)
        for key in keys:
            cut = state_part if key.startswith(f"{OPTIMIZER}/") or _held(engine, parts[key]) is not parts[key] else part
            into[key].copy_(cut(engine, parts[key], whole[key]))


def _some_at_a_time(keys: Iterable[str], sizes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> Iterator[list[str]]:
    """Yield keys in groups whose tensors have at most `WHOLE_BYTES` together, or one larger tensor."""
    found: list[str] = []
    filled = 0
    for key in keys:
        size, dtype = sizes[key]
        count = size.numel() * dtype.itemsize
        if found and filled + count > WHOLE_BYTES:
            yield found
            found, filled = [], 0
        found.append(key)
        filled += count
    if found:
        yield found
