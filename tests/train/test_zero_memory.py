"""What ranks hold under ZeRO: storages counted on real runs equal the declared bytes, and resident memory grows by them."""

from __future__ import annotations

import ctypes
import gc
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from meshwright import Parallel, StageCost
from meshwright.ir.action import Op
from meshwright.ir.analysis.lifetime import lives
from meshwright.ir.analysis.price import Price
from meshwright.passes.lower import lowered_flow
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.launch.workers import Workers
from meshwright.train.prepared import PreparedRun
from meshwright.train.verify.verify_case import Case, prepare_case
from tests.conftest import Pool
from tests.support.thin import slow

LAYERS = 16
MODES = ("replicated", "zero-1", "zero-2", "zero-3")


def squares(side: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(side, side, bias=False), nn.Tanh()) for _ in range(LAYERS)]


def rows(side: int, step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, side, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, dims=1)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, foreach=False)


def case_of(mode: str, side: int) -> tuple[Case, PreparedRun]:
    """Four stages on each of two ranks."""
    plan = {"schedule": "interleaved"} if mode != "zero-3" else {}
    parallel = Parallel(dp=2, dp_mode=mode, microbatches=1, options={"chunks": 4}, **plan)
    made = Case(partial(squares, side), partial(rows, side), parallel, 1, "float32", 0, nn.functional.mse_loss, adamw)
    case, _, run = prepare_case(made)
    return case, run


def declared(run: PreparedRun, side: int) -> float:
    """What the memory curve has before the updates: parameters, gradients and optimizer state, each as a rank keeps it."""
    size = 4.0 * side * side * LAYERS / run.schedule.stages
    costs = [StageCost(1.0, 1.0, 1.0, parameter_bytes=size, optimizer_bytes=2 * size)] * run.schedule.stages
    flow = lowered_flow(run.schedule)
    found = lives(flow, Price(flow.schedule, costs, copies=2), 0)
    moment = 2 * next(i for i, e in enumerate(flow.lists[0]) if getattr(e, "op", None) is Op.N)
    return sum(life.bytes for life in found if life.made <= moment and (life.ended is None or life.ended > moment))


class Kept(NamedTuple):
    """Bytes of the storages that a rank keeps between steps, and growth of its resident memory."""

    storages: int
    resident: int


def resident() -> int:
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Private"))


def held(case: Case, run: PreparedRun, warm: tuple[Case, PreparedRun]) -> Kept:
    """On a rank: what a run keeps after two steps. A small run before it loads libraries and starts threads."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: freed tensors go back to the system at once
    grown = 0
    for one, prepared in (warm, (case, run)):
        before = resident()
        engine = Engine(prepared.schedule, prepared.open(one.model()), prepared.settings(optimizer=adamw))
        for step in range(2):
            engine.run(one.data, step)
        gc.collect()
        grown = resident() - before
        units = engine.units.values()
        kept = [p for unit in units for p in (*unit.params, *unit.updated)]
        kept += [t for u in units if u.optimizer for entry in u.optimizer.state.values() for t in entry.values() if t.dim()]
        kept += [t for u in units for buffer in u.spare for t in (*buffer.flats, *getattr(buffer, "slices", ()))]
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in kept)}
        engine.close()
    return Kept(sum(storages.values()), grown)


ENDS = 4 * (LAYERS + 2 * 4)
"""Bytes at the ends of gradient buffers: a number for each parameter, and two for each unit."""


def ranks(pool: Pool, mode: str, side: int) -> tuple[float, list[Kept]]:
    case, run = case_of(mode, side)
    return declared(run, side), pool.run(held, case, run, case_of(mode, 16), ranks=2)


@pytest.mark.parametrize("mode", [slow("replicated"), "zero-1", slow("zero-2"), slow("zero-3")])
def test_storages_are_the_declared_bytes(pool: Pool, mode: str) -> None:
    side = 32
    params = 4 * side * side * LAYERS
    wanted, found = ranks(pool, mode, side)
    assert wanted == params * {"replicated": 4, "zero-1": 3.5, "zero-2": 2.5, "zero-3": 2}[mode]
    placeholders = 4 * LAYERS if mode == "zero-3" else 0  # a number in the place of each whole parameter
    assert [kept.storages for kept in found] == [wanted + ENDS + placeholders] * 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES[1:])
def test_resident_memory_grows_by_the_declared_bytes(mode: str) -> None:
    """Parameters, gradients and state of whole copies are 256 MB. Processes are new: others have grown and shrunk before."""
    side = 1024
    case, run = case_of(mode, side)
    with Workers(2) as pool:
        found = pool.run(held, case, run, case_of(mode, 16))
    wanted = declared(run, side)
    assert 4 * 4 * side * side * LAYERS == 256 << 20
    for kept in found:
        assert kept.storages == pytest.approx(wanted, rel=1e-3)
        assert kept.resident == pytest.approx(wanted, rel=0.05), f"{kept.resident >> 20} MB, declared {int(wanted) >> 20} MB"
