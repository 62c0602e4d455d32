"""Every reader of a file with a good file for it, and what damages files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from meshwright import (
    Action,
    Cluster,
    Duplex,
    Link,
    Measurement,
    MeshwrightError,
    Op,
    Parallel,
    Schedule,
    Timeline,
    check,
    cluster_from_json,
    cluster_to_json,
    costs_from_json,
    costs_to_json,
    even_costs,
    from_csv,
    lower,
    measurement_from_json,
    measurement_to_json,
    plan_from_json,
    plan_to_json,
    schedule_from_json,
    schedule_to_json,
    schedules,
    simulate,
    to_csv,
)
from meshwright.ir.action import Entry
from meshwright.report.measured_text import measured_text
from tests.support.cases import usual_steps

FUZZ = settings(deadline=None, derandomize=True)
SOAK = settings(deadline=None, max_examples=3000)
LONG = int("9" * 4000)
NAN, INFINITY = float("nan"), float("inf")

anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.just(LONG), st.text(max_size=8), st.just("0F0 0B0")),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)
"""Any JSON value."""


def plain(name: str = "onef1b", workers: int = 2, microbatches: int = 2, **options: object) -> Schedule:
    return schedules.build(name, workers=workers, microbatches=microbatches, **{"steps": usual_steps(name), **options})


def short(value: object) -> str:
    """A test id."""
    return repr(value)[:60]


def timeline_of(schedule: Schedule, **more: Any) -> Timeline:
    costs = even_costs(stages=schedule.stages, workers=schedule.workers, sync_s=0.25)
    return simulate(schedule, costs, Cluster(Link(latency_s=0.125)), **more)


def expressible(schedule: Schedule) -> bool:
    """One replica, one worker per stage, whole microbatches, one step with a flush, no recompute."""
    alone = all(len(teams) == len(teams[0]) == 1 for copy in schedule.placement.teams for teams in copy)
    again = any(how.share for how in schedule.recompute or ())
    return schedule.placement.replicas == 1 and alone and schedule.parts == 1 and schedule.flush and not again


def without_ends(schedule: Schedule) -> tuple[tuple[Entry, ...], ...]:
    """The lists without syncs, reduction and updates."""
    ends = (Op.S, Op.N, Op.U)
    return tuple(tuple(e for e in entries if not (isinstance(e, Action) and e.op in ends)) for entries in schedule.lists)


Read = Callable[[str], Any]


def _schedule(text: str) -> None:
    schedule = schedule_from_json(text)
    assert schedule_to_json(schedule_from_json(schedule_to_json(schedule))) == schedule_to_json(schedule)


def _costs(text: str) -> None:
    costs = costs_from_json(text)
    assert costs_from_json(costs_to_json(costs)) == costs


def _timeline(text: str) -> None:
    timeline = Timeline.from_json(text)
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert 0 < timeline.workers < 1_000_000
    found = [timeline.makespan_s, timeline.bubble_ratio, timeline.span_bubble_ratio, timeline.lower_bound_s]
    found += [use(worker) for worker in range(len(timeline.memory)) for use in (timeline.peak, timeline.peak_bytes)]
    assert all(isinstance(number, int | float) for number in found)


def _measurement(text: str) -> None:
    found = measurement_from_json(text)
    assert measurement_from_json(measurement_to_json(found)) == found
    assert "bottleneck: " in measured_text(found)


def _cluster(text: str) -> None:
    cluster = cluster_from_json(text)
    assert cluster_from_json(cluster_to_json(cluster)) == cluster
    assert cluster.between(0, 1).busy_s(1.0) >= 0


def _plan(text: str) -> None:
    plan = plan_from_json(text)
    assert plan_from_json(plan_to_json(plan)) == plan
    assert plan.processes >= 1 and (plan.order is None or plan.order.workers * plan.dp <= plan.processes)


def csv_reads(text: str) -> None:
    schedule = from_csv(text)
    assert without_ends(schedule) == without_ends(from_csv(text))
    assert isinstance(check(schedule).ok, bool)


def readers() -> dict[str, tuple[Read, str]]:
    """Each reader, used on what it gives back, and a good file for it."""
    cyclic, line = plain("cyclic"), plain("dualpipev", 2, 4)
    ran, costs = lower(plain()), even_costs(stages=2, workers=2)
    return {
        "schedule": (_schedule, schedule_to_json(cyclic)),
        "lowered": (_schedule, schedule_to_json(lower(line, recompute="early"))),
        "costs": (_costs, costs_to_json(even_costs(stages=3, workers=3))),
        "timeline": (_timeline, timeline_of(plain()).to_json()),
        "measurement": (_measurement, measurement_to_json(Measurement(ran, costs, timeline_of(ran), (3, 6)))),
        "cluster": (_cluster, cluster_to_json(Cluster(Link(0.5), {(0, 1): Link(0.25, 8.0)}, Duplex.HALF))),
        "order": (_plan, plan_to_json(Parallel(order=cyclic, costs=even_costs(stages=2, workers=2)))),
        "csv": (csv_reads, to_csv(lower(line))),
    }


READERS = readers()


def refused_or_read(read: Read, text: str) -> None:
    try:
        read(text)
    except MeshwrightError as error:
        assert str(error)
