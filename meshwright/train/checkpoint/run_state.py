"""The state of a run under the model's own names: what each rank holds of it, and how it is restored under another plan.

    model/NAME               a parameter, under its first name
    buffer/NAME              a buffer that is in the state_dict
    optimizer/ENTRY/NAME     a tensor of the optimizer state of a parameter (exp_avg, momentum_buffer, ...)
    previous/NAME            a parameter one step ago, if the next step still reads it (cyclic data parallelism)

Numbers are saved as facts in a JSON file: the options of every parameter (learning rate, decay, ...), its counters, and the
learning-rate schedule. Nothing here depends on stages, so any plan can read what another plan wrote.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.ir.analysis.held_values import late_units
from meshwright.ir.schedule import Sharding
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.json_exchange import all_gather_json, dtype_name, dtype_named
from meshwright.runtime.parameters.unit import Unit
from meshwright.train.optimizer.optimizer_facts import entries, put_back, refuse_kind

log = logging.getLogger(__name__)

MODEL, BUFFER, OPTIMIZER, PREVIOUS = "model", "buffer", "optimizer", "previous"


def parameters(engine: Engine) -> dict[str, nn.Parameter]:
    """Return every parameter that this rank holds, including frozen ones, also of units that other ranks own."""
    names = engine.layers.names
    frozen = [p for unit in engine.borrowed for p in engine.layers.unit(unit) if not p.requires_grad]
    return {names[p]: p for p in (*(p for unit in engine.units for p in engine.layers.unit(unit)), *frozen)}


def buffers(engine: Engine) -> dict[str, Tensor]:
    """Return every saved buffer of this rank's stages."""
    return {name: b for stage in engine.stages for name, b in _of_stage(engine, stage).items()}


def _of_stage(engine: Engine, stage: int) -> dict[str, Tensor]:
    """Return the saved buffers of a stage. A captured layer knows the model's names for them."""
    found: dict[str, Tensor] = {}
    for index, layer in enumerate(engine.layers.of_stage(stage), engine.layers.starts[stage]):
        names = getattr(layer, "original", None)
        if names is None:
            kept = layer.state_dict(keep_vars=True)
            names = {name: f"{index}.{name}" for name in kept}
        found |= {names[name]: b for name, b in layer.named_buffers(remove_duplicate=False) if name in names}
    return found


def writers(engine: Engine) -> dict[nn.Parameter, int]:
    """Return the rank that writes each parameter of this rank: all ranks that hold a unit share its parameters."""
    found: dict[nn.Parameter, int] = {}
    for unit in engine.units:
        ranks = engine.mesh.writers(engine.schedule, unit)
        found |= {p: ranks[i % len(ranks)] for i, p in enumerate(engine.layers.unit(unit))}
    return found


def whole(engine: Engine, parameter: nn.Parameter, tensor: Tensor, writer: int) -> Tensor | None:
    """Return a tensor of a parameter on the rank that writes it, and None on other ranks.

    The ranks of a tensor-parallel box send their parts to the writer, so they call this together.
    """
    split = engine.layers.tensor
    if split is None or tensor.shape != parameter.shape:
        return tensor.detach() if writer == engine.mesh.rank else None
    if not engine.mesh.shares_seat(writer):
        return None
    return split.whole(parameter, tensor, to=engine.mesh.coordinate_of(writer))


def part(engine: Engine, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
    """Return the part of a saved tensor that this rank holds."""
    split = engine.layers.tensor
    return tensor if split is None or not split.is_cut(parameter, tensor.shape) else split.part(parameter, tensor)


def weights(engine: Engine) -> dict[str, Tensor]:
    """Return the parameters and saved buffers that this rank writes, by name; parameters are whole."""
    names, found, owners = engine.layers.names, dict[str, Tensor](), writers(engine)
    for number, unit in engine.units.items():
        with unit.whole():
            for parameter in engine.layers.unit(number):
                if (made := whole(engine, parameter, parameter, owners[parameter])) is not None:
                    found[names[parameter]] = made if unit.keeps_whole else made.clone()
    seen: set[str] = set()
    for stage in range(engine.layers.stages):
        of_stage = {name: b for name, b in _of_stage(engine, stage).items() if name not in seen}
        seen |= set(of_stage)
        if engine.mesh.writers(engine.schedule, stage)[0] == engine.mesh.rank:
            found |= {name: b.detach() for name, b in of_stage.items()}
    return found


def optimizer_tensors(engine: Engine) -> dict[tuple[str, str], Tensor]:
    """Return the tensors of optimizer states that this rank writes, by parameter name and entry; they are whole."""
    params, owners, found = parameters(engine), writers(engine), dict[tuple[str, str], Tensor]()
    for name, entry, value in entries(engine) if engine.schedule.sharding is Sharding.NONE else joined_states(engine):
        if isinstance(value, Tensor) and value.dim():
            made = whole(engine, params[name], value, owners[params[name]])
            if made is not None:
                found[name, entry] = made
    return found


def joined_states(engine: Engine) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the tensors of optimizer states of which holders have pieces, put together: parameter name, entry, value.

    All ranks call this together. It puts one entry of one unit together at a time, by dtype: that of a state follows its
    parameter. A state that has another shape than its piece, such as a counter in a list, is the same for all pieces.
    """
    names = engine.layers.names
    shapes = {names[p]: piece.parameter.shape for unit in engine.units.values() for p, piece in unit.pieces.items()}
    mine = {(name, entry): value for name, entry, value in entries(engine) if isinstance(value, Tensor) and value.dim()}
    told = [
        [name, entry, dtype_name(value.dtype), None if value.shape == shapes[name] else value.tolist()]
        for (name, entry), value in mine.items()
    ]
    found = [tuple(one) for part in all_gather_json(told) for one in part]
    single = {
        (name, entry): torch.tensor(same, dtype=dtype_named(dtype)) for name, entry, dtype, same in found if same is not None
    }
    known = {(name, entry): dtype for name, entry, dtype, _ in found if (name, entry) not in single}
    held = {names[p] for unit in engine.units.values() for p in unit.params}
    yield from ((name, entry, value) for (name, entry), value in single.items() if name in held)
    for unit in engine.units.values():
        of_unit = {names[p]: p for p in unit.params}
        for entry, dtype in sorted({(entry, dtype) for (name, entry), dtype in known.items() if name in of_unit}):
            assert unit.shares is not None
            slices = [empty.to(dtype_named(dtype)).zero_() for empty in unit.shares.slices()]
            for p, piece in unit.pieces.items():
                if known.get((names[p], entry)) == dtype and (value := mine.get((names[p], entry))) is not None:
                    slices[piece.span.flat].narrow(0, piece.span.at, value.numel()).copy_(value)
            wholes = zip(of_unit, unit.shares.joined(slices), strict=True)
            yield from ((name, entry, t.clone()) for name, t in wholes if known.get((name, entry)) == dtype)


def state_part(engine: Engine, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
    """Return the part of a saved optimizer state that this rank's optimizer has: of its part, its piece."""
    mine = part(engine, parameter, tensor)
    unit = engine.unit_of.get(parameter)
    piece = None if unit is None else unit.pieces.get(parameter)
    if piece is None or mine.shape != parameter.shape:
        return mine
    return mine.reshape(-1)[piece.span.start : piece.span.stop].view(piece.parameter.shape)


def previous_tensors(engine: Engine) -> dict[str, Tensor]:
    """Return the parameters of one step ago that this rank writes: the first rank that reads a unit late writes it."""
    found: dict[str, Tensor] = {}
    for number, unit in late(engine).items():
        readers = [w for w in range(engine.schedule.workers) if number in late_units(engine.schedule, w)]
        if engine.mesh.rank == engine.mesh.rank_of(readers[0]):
            assert unit.versions is not None
            found |= {engine.layers.names[p]: t for p, t in zip(unit.params, unit.versions.previous, strict=True)}
    return found


def late(engine: Engine) -> dict[int, Unit]:
    """Return the units of this rank whose parameters of one step ago the next step reads."""
    return {number: unit for number, unit in engine.units.items() if unit.versions is not None and unit.versions.late}


def put_previous(engine: Engine, found: Mapping[str, Tensor]) -> None:
    """Set the parameters of one step ago, by name. Those that were not saved are set to the current ones, and logged once.

    All ranks call this together: the first one, which logs, may read nothing late itself.
    """
    missing: list[str] = []
    for unit in late(engine).values():
        assert unit.versions is not None
        names = [engine.layers.names[p] for p in unit.params]
        missing += [name for name in names if name not in found]
        older = [
            torch.empty_like(p.data).copy_(found[name]) if name in found else p
            for name, p in zip(names, unit.params, strict=True)
        ]
        unit.versions.restart(older)
    if not engine.schedule.first:
        return
    everywhere = {name for part in all_gather_json(missing) for name in part}
    if everywhere and engine.mesh.rank == 0:
        log.warning(
            "the state was not saved by a run that reads parameters of one step ago: %d of them start with the current values",
            len(everywhere),
        )


def tensors(engine: Engine) -> dict[str, Tensor]:
    """Return all tensors that this rank writes, by key. They are the live tensors, or put together from parts."""
    params = parameters(engine)
    found = {f"{MODEL if name in params else BUFFER}/{name}": t for name, t in weights(engine).items()}
    found |= {f"{OPTIMIZER}/{entry}/{name}": t for (name, entry), t in optimizer_tensors(engine).items()}
    found |= {f"{PREVIOUS}/{name}": t for name, t in previous_tensors(engine).items()}
    return {key: t if t.dim() else t.view(1) for key, t in found.items()}


def snapshot(engine: Engine) -> dict[str, Tensor]:
    """Copy these tensors to host memory, so that training can continue."""
    return {key: t.to("cpu", copy=True).contiguous() for key, t in tensors(engine).items()}


def put_whole(engine: Engine, found: Mapping[str, Tensor], known: Mapping[str, Any]) -> None:
    """Load a complete state, by key, into what this rank holds of it."""
    params = parameters(engine)
    mine: dict[str, Tensor] = {f"{MODEL}/{name}": p for name, p in params.items()}
    mine |= {f"{BUFFER}/{name}": b for name, b in buffers(engine).items()}
    held = {id(p): p for p in params.values()}
    if missing := sorted(set(mine) - set(found)):
        raise MeshwrightError(f"the state has no {', '.join(missing[:3])}", fix="use the model that it was taken from")
    refuse_kind(engine, known)
    with engine.whole_parameters(writes=True):
        for key, tensor in mine.items():
            saved = part(engine, held[id(tensor)], found[key]) if id(tensor) in held else found[key]
            tensor.detach().copy_(saved.view(tensor.shape))
    kept: dict[str, dict[str, Tensor]] = {}
    for key, tensor in found.items():
        if key.startswith(f"{OPTIMIZER}/"):
            _, entry, name = key.split("/", 2)
            if name in params:
                kept.setdefault(name, {})[entry] = state_part(engine, params[name], tensor).to(params[name].device, copy=True)
    put_back(engine, known, kept)
    put_previous(engine, {name: found[key].view(p.shape) for name, p in params.items() if (key := f"{PREVIOUS}/{name}") in found})
