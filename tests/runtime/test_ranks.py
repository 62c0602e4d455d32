"""`ranks`: a plan whose workers run on other ranks, with idle ones between them, trains like one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch.distributed as dist

from meshwright import MeshwrightError, Parallel
from meshwright.ir.action import Kind
from meshwright.runtime.launch.workers import RankFailed, Workers
from meshwright.runtime.started_ranks import members, own_number, started
from meshwright.runtime.transport.base import Channel
from meshwright.runtime.transport.faults import PeerLost
from meshwright.train.models.small_models import mlp, mlp_batch
from tests.support import captured_models as small
from tests.support import trouble
from tests.support.thin import slow

if TYPE_CHECKING:
    from tests.conftest import Pool

PLANS: dict[str, dict[str, Any]] = {
    "shuffled pipelines in both directions": {"pp": 4, "schedule": "chimera", "microbatches": 4, "ranks": (3, 1, 0, 2)},
    "rank 0 is idle": {"pp": 2, "dp": 2, "microbatches": 4, "ranks": (7, 4, 1, 2)},
    "teams": {"pp": 3, "width": (2, 1, 1), "microbatches": 4, "ranks": (5, 1, 0, 3)},
    "shares of sums": {"dp": 3, "dp_mode": "zero-2", "microbatches": 2, "ranks": (4, 6, 1)},
    "shares of parameters": {"dp": 3, "dp_mode": "zero-3", "microbatches": 2, "ranks": (2, 0, 1)},
    "cyclic": {"dp": 3, "dp_mode": "cyclic", "ranks": (3, 1, 0)},
    "one worker that is not the first": {"pp": 1, "microbatches": 2, "ranks": (2,)},
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_shuffled_and_idle_ranks_train_like_one_process(pool: Pool, plan: dict[str, Any]) -> None:
    found = pool.verify(partial(mlp, layers=6), mlp_batch, steps=2, **plan)
    assert found.passed, found.problems or found.worst
    assert found.compared and found.parallel["ranks"] == plan["ranks"]


GPT2 = partial(small.gpt2, n_embd=32, n_head=8, n_layer=2)
BATCH = partial(small.text, rows=8, length=12)
BOXES = {
    "line": {"tp": 2, "pp": 2, "sequence": True, "microbatches": 2, "ranks": (5, 2, 0, 3)},
    "box": {"box": (2, 2, 1), "microbatches": 2, "ranks": (3, 0, 5, 1)},
    "copies": {"tp": 2, "dp": 2, "dp_mode": "zero-1", "microbatches": 2, "ranks": (1, 0, 2, 3)},
}


@pytest.mark.parametrize("plan", [BOXES["line"], slow(BOXES["box"]), slow(BOXES["copies"])], ids=BOXES)
def test_coordinates_of_a_box_may_be_anywhere(pool: Pool, plan: dict[str, Any]) -> None:
    """Pieces are gathered by coordinate, whatever the order of the ranks; the counted words are those of each coordinate."""
    found = pool.verify(GPT2, BATCH, steps=2, **plan)
    assert found.passed, found.problems or found.worst


def test_results_are_in_the_order_of_the_workers_that_take_part(pool: Pool) -> None:
    assert pool.run(who, ranks=(6, 2, 5)) == [(0, 3, 2, (2, 5, 6)), (1, 3, 5, (2, 5, 6)), (2, 3, 6, (2, 5, 6))]
    assert pool.run(who, ranks=2) == [(0, 2, 0, (0, 1)), (1, 2, 1, (0, 1))], "the next job has its own numbers"
    with pytest.raises(MeshwrightError, match="there are 8 local workers, but 12 are needed"):
        pool.run(who, ranks=(0, 11))


def who() -> tuple[int, int, int, tuple[int, ...]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    assert own_number(started(rank)) == rank
    return rank, world, started(rank), tuple(started(each) for each in range(world))


def test_channels_are_named_as_processes_were_started() -> None:
    with members((1, 4, 6)):
        lost = PeerLost(Channel(2, 0, Kind.GRAD), 0)
    assert str(lost).startswith("rank 1 lost rank 6 on channel grad 6->1") and lost.peer == 2
    assert str(PeerLost(Channel(2, 0, Kind.GRAD), 0)).startswith("rank 0 lost rank 2 on channel grad 2->0")


# -- failures


@pytest.fixture(scope="module")
def five() -> Iterator[Workers]:
    with Workers(5, timeout_s=6.0) as found:
        found.run(trouble.pid)
        yield found


RANKS = (4, 0, 2)
"""Worker 0 is rank 4, which the process group counts as its rank 2; ranks 1 and 3 are idle."""


@pytest.mark.parametrize(
    ("how", "member", "text"),
    [
        (trouble.raises, 2, r"rank 4 \(worker 0\) failed in 0F2 \(stage 0\): ValueError: bad weights"),
        (trouble.killed, 1, r"rank 2 \(worker 2\) died in 2F2 \(stage 2\): killed by SIGKILL"),
        (trouble.sleeps, 0, r"rank 0 \(worker 1\) hangs in 1F2 \(stage 1\): no progress for"),
    ],
)
def test_a_failure_names_the_rank_and_its_worker(five: Workers, how: Any, member: int, text: str) -> None:
    with pytest.raises(RankFailed, match=rf"^{text}") as caught:
        five.run(partial(trouble.train, how, rank=member, ranks=RANKS), ranks=RANKS)
    others = {doing.rank: doing for doing in caught.value.others}
    assert set(others) | {caught.value.rank} <= set(RANKS), "idle ranks have nothing to do with it"
    assert all(doing.worker == RANKS.index(rank) for rank, doing in others.items() if doing.action)
    waiting = [doing.peer for doing in others.values() if doing.peer is not None]
    assert all(peer in RANKS for peer in waiting)


# -- plans


def test_ranks_are_checked() -> None:
    assert Parallel(pp=2, ranks=[3, 1]).ranks == (3, 1)
    plan = Parallel(pp=2, dp=2, ranks=(3, 1, 7, 0))
    assert (plan.members, plan.started, plan.processes) == ((0, 1, 3, 7), 8, 4)
    assert (Parallel(pp=3).members, Parallel(pp=3).started) == ((0, 1, 2), 3)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((0, 1, 2), "ranks names 3 ranks, but the plan needs pp 2 x dp 2 = 4"),
        ((0, 1, 1, 2), "ranks names rank 1 2 times"),
        ((0, 1, 2, -1), "at least 0 and below .*, got -1"),
        ((0, 1, 2, 10**30), "at least 0 and below .*, got 1"),
        ((0, 1, 2, True), "ranks must list the rank of each place as whole numbers"),
        ("0123", "ranks must list the rank of each place as whole numbers"),
        ((0, 1, 2, 3.0), "ranks must list the rank of each place as whole numbers"),
    ],
)
def test_ranks_that_no_plan_can_have_are_refused(given: Any, text: str) -> None:
    with pytest.raises(MeshwrightError, match=text):
        Parallel(pp=2, dp=2, ranks=given)


def test_a_host_is_not_filled_with_idle_processes() -> None:
    from meshwright import verify

    with pytest.raises(MeshwrightError, match="1001 workers exceed the limit of 256 on one host"):
        verify(mlp, mlp_batch, Parallel(pp=2, ranks=(0, 1000)))
