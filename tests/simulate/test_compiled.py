"""The compiled path against the plain engine: one schedule, many costs, the same times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

np = pytest.importorskip("numpy")
pytest.importorskip("numba")

from meshwright import Cluster, Duplex, Link, MeshwrightError, Schedule, StageCost, lower, schedules, simulate  # noqa: E402
from meshwright.simulate import compile  # noqa: E402
from tests.support.random_schedules import built, label, named, random_case, random_cluster, random_costs, random_schedule  # noqa: E402
from tests.support.thin import thinned  # noqa: E402

CLOSE = 1e-9
PLANS = 5


def array(plans: Sequence[Sequence[StageCost]]) -> np.ndarray:
    """Many plans as the compiled path takes them: [plan, stage, field]."""
    return np.array([[astuple(cost) for cost in plan] for plan in plans])


def agree(schedule: Schedule, plans: Sequence[Sequence[StageCost]], cluster: Cluster | None, sync: str) -> None:
    """Every plan one by one, and all at once; every span of the last one.

    Compiling lowers without costs, which choose among safe orders: so both get the same lowered lists.
    """
    lowered = lower(schedule, sync=sync)
    program = compile(schedule, cluster, sync=sync)
    plain = [simulate(lowered, plan, cluster) for plan in plans]
    together = program.makespans(array(plans))
    assert together.shape == (len(plans),)
    for timeline, plan, makespan in zip(plain, plans, together, strict=True):
        assert abs(makespan - timeline.makespan_s) <= CLOSE
        assert abs(program.makespan(plan) - timeline.makespan_s) <= CLOSE
    same_times(program, plans[-1], plain[-1])


def same_times(program: object, plan: Sequence[StageCost], timeline: object) -> None:
    """Start and end of every node, at all its places, are those of the spans."""
    starts, ready = program.times(plan)
    nodes = program.program
    spans = {(span.worker, span.entry): (span.start_s, span.end_s) for span in timeline.spans}
    seen = 0
    for places, start, end in zip(nodes.places, starts, ready, strict=True):
        for worker, index in places:
            wanted = spans[worker, nodes.flow.lists[worker][index]]
            assert abs(start - wanted[0]) <= CLOSE and abs(end - wanted[1]) <= CLOSE
            seen += 1
    assert seen == len(spans)


def seeded(block: int, size: int) -> list[Random]:
    """The random sources of one block of seeds."""
    return [Random(f"fast:{block}:{number}") for number in range(size)]


@pytest.mark.parametrize("block", thinned(range(10), 4))
def test_random_schedules_take_the_same_time(block: int) -> None:
    """100 schedules in a block, 5 plans each."""
    for rng in seeded(block, 100):
        case = random_case(rng)
        plans = [case.costs, *(random_costs(rng, case.schedule.stages) for _ in range(PLANS - 1))]
        agree(case.schedule, plans, case.cluster, case.sync)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(100, 150))
def test_larger_random_schedules_take_the_same_time(block: int) -> None:
    for rng in seeded(block, 30):
        case = random_case(rng, workers=7, stages=8, microbatches=9, replicas=4)
        plans = [random_costs(rng, case.schedule.stages) for _ in range(PLANS)]
        agree(case.schedule, plans, case.cluster, case.sync)


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_drawn_schedules_take_the_same_time(rng: Random) -> None:
    case = random_case(rng)
    agree(case.schedule, [case.costs], case.cluster, case.sync)


@pytest.mark.parametrize(("name", "options"), named(), ids=label)
def test_named_schedules_take_the_same_time(name: str, options: dict[str, object]) -> None:
    for schedule in built(name, options, (2, 4)):
        for number, sync in enumerate(("eager", "lazy")):
            rng = Random(f"{name}:{schedule.workers}:{number}")
            plans = [random_costs(rng, schedule.stages) for _ in range(PLANS)]
            agree(schedule, plans, random_cluster(rng, schedule.workers), sync)


@pytest.mark.parametrize("duplex", list(Duplex))
def test_steps_and_slow_links_take_the_same_time(duplex: Duplex) -> None:
    cluster = Cluster(Link(0.3, 2.0), {(0, 1): Link(1.5, 0.1)}, duplex)
    for name in ("onef1b", "chimera", "zbv"):
        schedule = schedules.build(name, workers=4, microbatches=8, steps=3)
        rng = Random(name)
        agree(schedule, [random_costs(rng, schedule.stages, recompute=False) for _ in range(3)], cluster, "eager")


def test_a_lowered_schedule_compiles_as_it_is() -> None:
    """Lowered with costs or recompute first: the compiled path takes the lists that are there."""
    for rng in seeded(30, 60):
        case = random_case(rng)
        lowered = lower(case.schedule, sync=case.sync, costs=case.costs, cluster=case.cluster)
        timeline = simulate(case.schedule, case.costs, case.cluster, sync=case.sync)
        program = compile(lowered, case.cluster)
        assert abs(program.makespan(case.costs) - timeline.makespan_s) <= CLOSE
        same_times(program, case.costs, timeline)


def test_recompute_enters_where_the_schedule_says_so() -> None:
    schedule = schedules.build("onef1b", workers=3, microbatches=4)
    costs = [StageCost(1.0, 1.0, 1.0, recompute_s=1.0)] * 3
    free = [replace(cost, recompute_s=0.0) for cost in costs]
    assert compile(schedule).makespan(costs) == compile(schedule).makespan(free)
    decided = lower(schedule, recompute="inline")
    assert compile(decided).makespan(costs) == pytest.approx(simulate(schedule, costs).makespan_s)


def test_long_runs_stay_close() -> None:
    """Large times and latencies: what is taken off a link's end again may not drift."""
    schedule = schedules.build("onef1b", workers=8, microbatches=64)
    rng = Random(0)
    costs = [StageCost(*(rng.uniform(1, 100) for _ in fields(StageCost))) for _ in range(8)]
    costs = [replace(cost, recompute_s=0.0) for cost in costs]
    cluster = Cluster(Link(1 / 3, 0.7))
    timeline = simulate(lower(schedule), costs, cluster)
    assert compile(schedule, cluster).makespan(costs) == pytest.approx(timeline.makespan_s, rel=1e-12)


def test_many_plans_are_the_plans_one_by_one() -> None:
    schedule = schedules.build("interleaved", workers=4, microbatches=8)
    rng = Random(1)
    plans = [random_costs(rng, schedule.stages, recompute=False) for _ in range(300)]
    program = compile(schedule)
    many = program.makespans(array(plans))
    assert list(many) == [program.makespan(plan) for plan in plans]
    assert list(program.makespans(array(plans)[::-1])) == list(many[::-1])
    assert list(program.makespans(array(plans).astype(np.float32).astype(np.float64)))
    assert program.makespans(array(plans)[:0]).shape == (0,)


@pytest.mark.parametrize("shape", [(4,), (4, 13), (1, 3, 13), (1, 4, 12), (1, 1, 4, 13)])
def test_arrays_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    program = compile(schedules.build("onef1b", workers=4, microbatches=4))
    with pytest.raises(MeshwrightError, match="4 stages, 13 fields") as caught:
        program.makespans(np.zeros(shape))
    assert str(shape) in caught.value.what and "forward_s, input_s" in (caught.value.fix or "")


@pytest.mark.parametrize("count", [0, 3, 5])
def test_rows_of_another_number_are_refused(count: int) -> None:
    program = compile(schedules.build("onef1b", workers=4, microbatches=4))
    for ask in (program.makespan, program.times):
        with pytest.raises(MeshwrightError, match=f"4 stages, the costs have {count}"):
            ask([StageCost(1.0)] * count)


def test_the_bound_of_a_random_schedule_holds_for_the_compiled_time() -> None:
    for rng in seeded(31, 60):
        schedule = random_schedule(rng, cells=False)
        costs, cluster = random_costs(rng, schedule.stages), random_cluster(rng, schedule.workers)
        lowered = lower(schedule)
        assert compile(lowered, cluster).makespan(costs) >= simulate(lowered, costs, cluster).lower_bound_s - CLOSE
