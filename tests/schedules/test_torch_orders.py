"""Beside torch.distributed.pipelining (tests only): its orders, its CSV, its validator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import Schedule, check, from_csv, lower, schedules, to_csv
from meshwright.passes.laws import Law
from tests.support.cases import Case
from tests.support.mutations import TINY, built, drops, duplicates, handmade, moves, same_place, swaps

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="needs torch")


def torch_order(rows: str) -> dict[int, list[object]]:
    """torch's own actions from a CSV of ours."""
    action = torch_schedules._Action.from_str
    return {rank: [action(cell) for cell in row.split(",") if cell] for rank, row in enumerate(rows.splitlines())}


@pytest.mark.parametrize(
    ("name", "options"),
    [("gpipe", {}), ("onef1b", {}), ("interleaved", {"chunks": 2}), ("zero_bubble", {}), ("zbv", {}), ("dualpipev", {})],
)
def test_torch_reads_what_we_write(name: str, options: dict[str, object]) -> None:
    schedule = schedules.build(name, workers=4, microbatches=8, **options)
    for form in (to_csv(schedule), to_csv(lower(schedule))):
        parsed = torch_order(form)
        assert [",".join(str(a) for a in row) for row in parsed.values()] == form.splitlines()


@pytest.mark.parametrize("d", [2, 4])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_is_megatrons_order_as_torch_has_it(d: int, k: int, v: int) -> None:
    ours = torch_order(to_csv(schedules.build("interleaved", workers=d, microbatches=k * d, chunks=v)))
    for rank in range(d):
        warmup = min(2 * (d - 1 - rank) + (v - 1) * d, k * d * v)
        steps = k * d * v
        theirs = torch_schedules._get_1f1b_rank_ops(
            v,
            d,
            warmup,
            steps - warmup,
            warmup,
            rank,
            lambda step, rank=rank: (step // d) % v * d + rank,
            lambda step, rank=rank, warmup=warmup: (v - 1 - ((step - warmup) // d) % v) * d + rank,
        )
        assert [str(a) for a in theirs if a is not None] == [str(a) for a in ours[rank]]


def test_torch_lowering_and_ours_move_the_same_messages() -> None:
    schedule = schedules.build("interleaved", workers=4, microbatches=8)
    compute = torch_order(to_csv(schedule))
    stage_to_rank = lambda stage: stage % 4  # noqa: E731
    theirs = torch_schedules._add_send_recv(compute, stage_to_rank=stage_to_rank, num_stages=8)
    ours = torch_order(to_csv(lower(schedule)))
    for rank in range(4):
        assert sorted(map(str, theirs[rank])) == sorted(map(str, ours[rank]))


def test_a_lowered_csv_of_torch_is_checked_here() -> None:
    schedule = schedules.build("interleaved", workers=4, microbatches=8)
    theirs = torch_schedules._add_send_recv(torch_order(to_csv(schedule)), stage_to_rank=lambda stage: stage % 4, num_stages=8)
    text = "\n".join(",".join(map(str, row)) for row in theirs.values())
    assert check(from_csv(text)).ok


def test_what_torch_accepts_and_we_refuse() -> None:
    """A duplicated forward, and a stage whose backward halves come in the wrong order on another microbatch's turn."""
    good = to_csv(schedules.build("zero_bubble", workers=2, microbatches=2)).splitlines()
    twice = [good[0].replace("0F0,", "0F0,0F0,", 1), good[1]]
    accepted = []
    for rows in (twice,):
        try:
            torch_schedules._validate_schedule(torch_order("\n".join(rows)), 2, 2, 2)
            accepted.append(True)
        except AssertionError:
            accepted.append(False)
        result = check(from_csv("\n".join(rows)))
        assert not result.ok and result.worker == 0 and result.action == "0F0" and "twice" in result.reason
    assert any(accepted), "torch's validator has learnt something; look for another example"


def test_cells_about_sharding_are_passed_over() -> None:
    """torch puts them into every schedule that it lowers."""
    text = to_csv(lower(schedules.build("onef1b", workers=2, microbatches=2)))
    first, second = text.splitlines()
    with_cells = f"0UNSHARD,{first},0REDUCE_GRAD,0RESHARD\n1UNSHARD,{second},1RESHARD\n"
    assert from_csv(with_cells).lists == from_csv(text).lists


# Its validator sees less


def torch_accepts(schedule: Schedule) -> bool:
    """What torch.distributed.pipelining says of the compute form."""
    rows = [[torch_schedules._Action.from_str(cell) for cell in line.split(",")] for line in to_csv(schedule).splitlines()]
    try:
        torch_schedules._validate_schedule(dict(enumerate(rows)), schedule.workers, schedule.stages, schedule.microbatches)
    except AssertionError:
        return False
    return True


IN_CSV = [case for case in TINY if case.name in ("onef1b", "gpipe", "interleaved", "zbv", "hanayo", "zero_bubble", "dualpipev")]


@pytest.mark.parametrize("case", IN_CSV, ids=str)
def test_what_torch_refuses_is_refused_here(case: Case) -> None:
    schedule = replace(built(case, "plain"), channels=())
    assert torch_accepts(schedule) and check(schedule).ok
    mutations = [*drops(schedule), *duplicates(schedule, same_place), *moves(schedule, same_place), *swaps(schedule)]
    accepted_by_torch_alone = 0
    for mutation in mutations:
        ours = check(mutation.schedule).ok
        theirs = torch_accepts(mutation.schedule)
        assert theirs or not ours, mutation
        accepted_by_torch_alone += theirs and not ours
    assert accepted_by_torch_alone, "torch counts with sets: what comes twice is not seen"


def test_torch_accepts_what_comes_twice_and_what_gets_stuck() -> None:
    twice = handmade("0F0 0F0 0B0", "1F0 1B0")
    assert torch_accepts(twice)
    assert check(twice).law == Law.ONCE
    both_ways = handmade("0F0 0B0 0I0 0W0", "1F0 1B0", microbatches=1)
    assert not check(both_ways).ok
    stuck = handmade("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", microbatches=2)
    assert torch_accepts(stuck)
    result = check(stuck)
    assert result.law == Law.DEADLOCK and (result.worker, result.action) == (1, "1F1")
