"""A rank that raises, dies, stops or hangs takes the others down within seconds, and the first error is what comes out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest

pytest.importorskip("torch", reason="needs torch")

from meshwright.errors import MeshwrightError
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.watchdog.failure import Doing, Failure, FailureKind, RankFailed, as_error
from tests.support import trouble
from tests.support.thin import slow

QUICK_S = 15.0  # measured: 0.1 s; this machine may be busy
TIMEOUT_S = 6.0  # a rank that loads libraries from a cold disk is silent for seconds


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(3, timeout_s=TIMEOUT_S) as pool:
        pool.run(trouble.pid)
        yield pool


def failed(workers: Workers, *args: object, **kwargs: object) -> RankFailed:
    """The error of a run that must fail, in time; the pool is of use afterwards."""
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        workers.run(partial(trouble.train, *args, **kwargs))  # type: ignore[arg-type]
    assert time.monotonic() - start < TIMEOUT_S + QUICK_S
    return caught.value


TRANSPORTS = ["shared", "torch"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("place", "rank", "action"), [("forward", 1, "1F2"), ("backward", 1, "1B2"), ("loss", 2, "2F0"), ("optimizer", 0, "0U")]
)
def test_a_rank_that_raises(workers: Workers, place: str, rank: int, action: str, transport: str) -> None:
    error = failed(workers, trouble.raises, place, rank=rank, transport=transport)
    assert (error.rank, error.stage, error.action) == (rank, rank, action)
    assert str(error).startswith(f"rank {rank} failed in {action} (stage {rank}): ValueError: bad weights")
    assert "in raises" in str(error), "the user's own line is in the traceback"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("how", "place", "rank", "action", "cause"),
    [
        (trouble.killed, "forward", 1, "1F2", "killed by SIGKILL"),
        (trouble.exits, "backward", 0, "0B2", "exit code 5"),
        (trouble.segfaults, "forward", 2, "2F2", "killed by SIGSEGV"),
    ],
    ids=["killed", "exits", "segfaults"],
)
def test_a_rank_that_dies(
    workers: Workers, how: trouble.Trouble, place: str, rank: int, action: str, cause: str, transport: str
) -> None:
    error = failed(workers, how, place, rank=rank, transport=transport)
    assert (error.rank, error.stage, error.action, error.failure.how) == (rank, rank, action, FailureKind.DIED)
    assert cause in str(error)
    waited_for = {doing.peer for doing in error.others if doing.rank != rank}
    assert rank in waited_for or 1 in waited_for, str(error)


@pytest.mark.parametrize(
    ("how", "place", "action", "transport"),
    [
        (trouble.sleeps, "forward", "1F2", "torch"),
        slow((trouble.spins, "backward", "1B2", "shared"), several=True),
        slow((trouble.sleeps, "optimizer", "1U", "torch"), several=True),
    ],
    ids=["sleeps", "spins", "optimizer"],
)
def test_a_rank_that_hangs(workers: Workers, how: trouble.Trouble, place: str, action: str, transport: str) -> None:
    error = failed(workers, how, place, rank=1, transport=transport)
    assert (error.rank, error.stage, error.action, error.failure.how) == (1, 1, action, FailureKind.HUNG)
    assert f"in {how.__name__}" in error.failure.what, "the user's line"
    assert any(doing.peer == 1 and doing.still_s >= TIMEOUT_S for doing in error.others), str(error)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_is_stopped(workers: Workers, transport: str) -> None:
    error = failed(workers, trouble.stopped, "forward", rank=1, transport=transport)
    assert (error.rank, error.action, error.failure.how) == (1, "1F2", FailureKind.STOPPED)
    assert any(doing.peer == 1 for doing in error.others), str(error)


def test_a_rank_that_does_not_come_to_a_collective(workers: Workers) -> None:
    with pytest.raises(RankFailed, match="rank 1 hangs: no progress") as caught:
        workers.run(trouble.absent_from_a_collective)
    assert "in absent_from_a_collective" in str(caught.value)
    assert "rank 0: outside a schedule, waits for other ranks (barrier)" in str(caught.value)


@pytest.mark.slow
def test_long_waits_are_legal_while_somebody_moves(workers: Workers) -> None:
    start = time.monotonic()
    losses = workers.run(partial(trouble.train, trouble.pauses, "forward", rank=-1, call=1, steps=1))
    assert time.monotonic() - start > 2 * TIMEOUT_S - 1, "rank 0 waited longer than the limit"
    assert len(losses[2]) == 1


def test_a_mistake_that_all_ranks_find_comes_out_once_as_it_is(workers: Workers) -> None:
    with pytest.raises(MeshwrightError) as caught:
        workers.run(trouble.refuses)
    assert type(caught.value) is MeshwrightError
    assert str(caught.value) == "7 microbatches are one too many\n  try: 6"


def test_a_dead_edge_is_named(workers: Workers) -> None:
    with pytest.raises(MeshwrightError, match=r"rank 0 waited 1 s to receive from rank 1 on channel grad 1->0"):
        workers.run(trouble.dead_edge, ranks=2)


def test_a_failed_pool_starts_afresh(workers: Workers) -> None:
    before = workers.run(trouble.pid)
    failed(workers, trouble.raises, rank=0)
    after = workers.run(trouble.pid)
    assert not set(before) & set(after)
    assert len(workers.run(trouble.train)[2]) == 2


def test_the_watch_costs_little(workers: Workers) -> None:
    assert min(workers.run(trouble.own_cost_s, 4.0)) < 0.01 * 4.0


def test_failures_cross_processes_as_text() -> None:
    failure = Failure(1, FailureKind.DIED, "killed by SIGKILL", "2B5", 2, noticed_by=0)
    assert Failure.from_json(failure.to_json()) == failure
    doing = Doing(0, 3, "0B5", 0, peer=1, waits="grad 1->0", still_s=1.25)
    assert Doing.from_json(doing.to_json()) == doing
    error = as_error(failure, [doing])
    assert str(error).splitlines() == [
        "rank 1 died in 2B5 (stage 2): killed by SIGKILL",
        "  rank 0: 0B5, waits for rank 1 (grad 1->0), 1.2 s",
    ]
