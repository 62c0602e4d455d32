"""The state of a run by the model's own names: what a rank holds of it, and how it is put back under another plan.

    model/NAME               a parameter, under its first name
    buffer/NAME              a buffer that a state_dict would hold
    optimizer/ENTRY/NAME     a tensor that the optimizer keeps for a parameter (exp_avg, momentum_buffer, ...)

Numbers go into facts, a JSON file: for every parameter its options (learning rate, decay, ...) and counters, and the
learning-rate schedule. Nothing here knows stages, so any plan can read what any other has written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.runtime.engine.engine import Engine
from meshwright.train.optimizer.optimizer_facts import entries, put_back

MODEL, BUFFER, OPTIMIZER = "model", "buffer", "optimizer"


def parameters(engine: Engine) -> dict[str, nn.Parameter]:
    """Every parameter that this rank holds, frozen ones too."""
    names = engine.layers.names
    return {names[p]: p for unit in engine.units for p in engine.layers.unit(unit)}


def buffers(engine: Engine) -> dict[str, Tensor]:
    """Every buffer of this rank's stages that belongs to a model's state."""
    return {name: b for stage in engine.stages for name, b in _of_stage(engine, stage).items()}


def _of_stage(engine: Engine, stage: int) -> dict[str, Tensor]:
    """A captured layer says what its model calls its buffers, and of those alone that are saved."""
    found: dict[str, Tensor] = {}
    for index, layer in enumerate(engine.layers.of_stage(stage), engine.layers.starts[stage]):
        names = getattr(layer, "original", None)
        if names is None:
            kept = layer.state_dict(keep_vars=True)
            names = {name: f"{index}.{name}" for name in kept}
        found |= {names[name]: b for name, b in layer.named_buffers(remove_duplicate=False) if name in names}
    return found


def shared_out(engine: Engine) -> set[str]:
    """What this rank is the one to write: holders of a unit share its parameters, the first of a stage has its buffers."""
    found, layers, rank = set(), engine.layers, engine.mesh.rank
    for unit in engine.units:
        ranks = engine.mesh.holders(engine.schedule, unit)
        mine = ranks.index(rank)
        found |= {layers.names[p] for i, p in enumerate(layers.unit(unit)) if i % len(ranks) == mine}
    seen: set[str] = set()
    for stage in range(layers.stages):
        names = set(_of_stage(engine, stage)) - seen
        seen |= names
        if engine.mesh.holders(engine.schedule, stage)[0] == rank:
            found |= names
    return found


def tensors(engine: Engine) -> dict[str, Tensor]:
    """All tensors of the state that this rank is to write, by key; they are the live ones."""
    mine = shared_out(engine)
    found = {f"{MODEL}/{name}": p.detach() for name, p in parameters(engine).items() if name in mine}
    found |= {f"{BUFFER}/{name}": b.detach() for name, b in buffers(engine).items() if name in mine}
    for name, entry, value in entries(engine):
        if name in mine and isinstance(value, Tensor) and value.dim():
            found[f"{OPTIMIZER}/{entry}/{name}"] = value.detach()
    return {key: t if t.dim() else t.view(1) for key, t in found.items()}


def snapshot(engine: Engine) -> dict[str, Tensor]:
    """The same as they are now, in the memory of the host: training may go on."""
    return {key: t.to("cpu", copy=True).contiguous() for key, t in tensors(engine).items()}


def put_whole(engine: Engine, found: Mapping[str, Tensor], known: Mapping[str, Any]) -> None:
    """Put a whole state, by key, into what this rank holds of it."""
    params = parameters(engine)
    mine: dict[str, Tensor] = {f"{MODEL}/{name}": p for name, p in params.items()}
    mine |= {f"{BUFFER}/{name}": b for name, b in buffers(engine).items()}
    if missing := sorted(set(mine) - set(found)):
        raise MeshwrightError(f"the state has no {', '.join(missing[:3])}", fix="the model that it was taken from")
    for key, tensor in mine.items():
        tensor.detach().copy_(found[key].view(tensor.shape))
    kept: dict[str, dict[str, Tensor]] = {}
    for key, tensor in found.items():
        if key.startswith(f"{OPTIMIZER}/"):
            _, entry, name = key.split("/", 2)
            if name in params:
                kept.setdefault(name, {})[entry] = tensor.to(params[name].device, copy=True)
    put_back(engine, known, kept)
