"""Gradients equal torch.distributed.pipelining's bit for bit, on the same stages and microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from meshwright.ir.plan.plan import Parallel
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.stage.layers import Layers
from meshwright.train.models import small_models as models
from meshwright.train.setup.build_schedule import lists_for, stages_of
from tests.conftest import Pool

THEIRS: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "onef1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
Gradients = dict[str, Tensor]


def kept(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that changes nothing."""
    return torch.optim.SGD(params, lr=0.0)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def built(stages: int) -> Layers:
    torch.manual_seed(0)
    blocks = [models.Block(16, 2) for _ in range(stages - 2)]
    return Layers.of([models.mlp(layers=2)[0], *blocks, nn.Linear(16, 16)], stages)


def data(microbatches: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    shape = 4 * microbatches, 8, 16
    return torch.randn(shape, generator=random), torch.randn(shape, generator=random)


def ours(parallel: Parallel) -> Gradients:
    schedule = lists_for(parallel)
    layers = built(schedule.stages)
    engine = Engine(schedule, layers, Settings(optimizer=kept, microbatches=parallel.microbatches, loss=mean_square))
    found: Gradients = {}
    for unit in engine.units.values():
        unit.watch = lambda _, params, views: found.update(
            {layers.names[p]: v.clone() for p, v in zip(params, views, strict=True)}
        )
    engine.run(lambda _: data(parallel.microbatches))
    engine.close()
    return found


def theirs(name: str, stages: int, microbatches: int) -> Gradients:
    rank, world = dist.get_rank(), dist.get_world_size()
    layers = built(stages)
    mine = [rank] if stages == world else [rank, 2 * world - 1 - rank] if name in ("zbv", "dualpipev") else [rank, rank + world]
    modules = [nn.Sequential(*layers.of_stage(s)) for s in mine]
    parts = [PipelineStage(m, s, stages, torch.device("cpu")) for m, s in zip(modules, mine, strict=True)]
    schedule = THEIRS[name](parts[0] if len(parts) == 1 else parts, microbatches, loss_fn=mean_square)
    x, y = data(microbatches)
    inputs = (x,) if 0 in mine else ()
    if stages - 1 in mine:
        schedule.step(*inputs, target=y, losses=[])
    else:
        schedule.step(*inputs)
    return {layers.names[p]: p.grad.clone() for m in modules for p in m.parameters() if p.grad is not None}


def both(parallel: Parallel, name: str, stages: int) -> tuple[Gradients, Gradients]:
    return ours(parallel), theirs(name, stages, parallel.microbatches)


@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize("name", THEIRS)
def test_gradients_equal_torchs_to_the_bit(pool: Pool, name: str, microbatches: int) -> None:
    options = {"chunks": 2} if name == "interleaved" else {}
    parallel = Parallel(pp=2, microbatches=microbatches, schedule=name, options=options)
    stages = stages_of(parallel)
    seen: set[str] = set()
    for mine, reference in pool.run(both, parallel, name, stages, ranks=2):
        assert mine.keys() == reference.keys()
        seen |= mine.keys()
        for key, gradient in reference.items():
            assert torch.equal(mine[key], gradient), f"{name}: {key} differs by {(mine[key] - gradient).abs().max()}"
    assert seen == set(built(stages).names.values())
