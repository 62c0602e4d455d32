"""The state of a run under the model's own names: what each rank holds of it, and how it is restored under another plan.

    model/NAME               a parameter, under its first name
    buffer/NAME              a buffer that is in the state_dict
    optimizer/ENTRY/NAME     a tensor of the optimizer state of a parameter (exp_avg, momentum_buffer, ...)

Numbers are saved as facts in a JSON file: the options of every parameter (learning rate, decay, ...), its counters, and the
learning-rate schedule. Nothing here depends on stages, so any plan can read what another plan wrote.
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
    """Return every parameter that this rank holds, including frozen ones."""
    names = engine.layers.names
    return {names[p]: p for unit in engine.units for p in engine.layers.unit(unit)}


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


def shared_out(engine: Engine) -> set[str]:
    """Return what this rank writes: holders of a unit share its parameters, the first holder of a stage writes its buffers."""
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
    """Return all tensors that this rank writes, by key. They are the live tensors, not copies."""
    mine = shared_out(engine)
    found = {f"{MODEL}/{name}": p.detach() for name, p in parameters(engine).items() if name in mine}
    found |= {f"{BUFFER}/{name}": b.detach() for name, b in buffers(engine).items() if name in mine}
    for name, entry, value in entries(engine):
        if name in mine and isinstance(value, Tensor) and value.dim():
            found[f"{OPTIMIZER}/{entry}/{name}"] = value.detach()
    return {key: t if t.dim() else t.view(1) for key, t in found.items()}


def snapshot(engine: Engine) -> dict[str, Tensor]:
    """Copy these tensors to host memory, so that training can continue."""
    return {key: t.to("cpu", copy=True).contiguous() for key, t in tensors(engine).items()}


def put_whole(engine: Engine, found: Mapping[str, Tensor], known: Mapping[str, Any]) -> None:
    """Load a complete state, by key, into what this rank holds of it."""
    params = parameters(engine)
    mine: dict[str, Tensor] = {f"{MODEL}/{name}": p for name, p in params.items()}
    mine |= {f"{BUFFER}/{name}": b for name, b in buffers(engine).items()}
    if missing := sorted(set(mine) - set(found)):
        raise MeshwrightError(f"the state has no {', '.join(missing[:3])}", fix="use the model that it was taken from")
    for key, tensor in mine.items():
        tensor.detach().copy_(found[key].view(tensor.shape))
    kept: dict[str, dict[str, Tensor]] = {}
    for key, tensor in found.items():
        if key.startswith(f"{OPTIMIZER}/"):
            _, entry, name = key.split("/", 2)
            if name in params:
                kept.setdefault(name, {})[entry] = tensor.to(params[name].device, copy=True)
    put_back(engine, known, kept)
