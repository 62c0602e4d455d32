"""The bound that no order beats: its formulas on chains, exact optima, and every order of small schedules."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product
from random import Random
from typing import NamedTuple

import pytest

from meshwright import (
    Action,
    Cluster,
    Duplex,
    Link,
    MeshwrightError,
    Op,
    Schedule,
    StageCost,
    check,
    even_costs,
    schedules,
    simulate,
)
from meshwright.ir.action import Cell, Entry, actions
from tests.support.random_schedules import Case, build, label, named, random_case
from tests.support.reference import CLOSE, seeded


def chain_bound(forward: Sequence[float], backward: Sequence[float], sync: Sequence[float], count: int) -> float:
    """Head, round trip, tail on resources in a row (stage, channel, stage ..): the planning specification's formula."""
    best = 0.0
    for k in range(len(forward)):
        head, trip = sum(forward[:k]), sum(forward[k + 1 :]) + sum(backward[k + 1 :])
        body = max(count * forward[k], forward[k] + trip) + count * backward[k]
        best = max(best, head + body + tail(backward, sync, k))
    return best


def tail(backward: Sequence[float], sync: Sequence[float], k: int) -> float:
    """What follows a backward on resource k: the way to a stage at or before it, and that stage's sync."""
    return max(sum(backward[2 * n : k]) + sync[n] for n in range(k // 2 + 1))


def forward_bound(forward: Sequence[float], backward: Sequence[float], sync: Sequence[float], count: int) -> float:
    """All forwards of a resource, and then what the last of them still has before it: its way to any stage's sync."""
    best = 0.0
    for k in range(len(forward)):
        turn = sum(forward[: k + 1]) + (count - 1) * forward[k] + sum(forward[k + 1 :])
        ends = [turn + sum(backward[2 * n :]) + sync[n] for n in range(len(sync))]
        best = max(best, *ends)
    return best


def random_chain(rng: Random, stages: int, count: int) -> tuple[Case, list[float], list[float], list[float]]:
    """A plain chain with half-duplex channels and syncs, and its resources in a row."""
    low = rng.choice((0.0, 0.5))
    costs = [
        StageCost(
            forward_s=rng.uniform(low, 2),
            input_s=rng.uniform(low, 2),
            weight_s=rng.choice((0.0, rng.uniform(low, 2))),
            sync_s=rng.choice((0.0, rng.uniform(0, 4))),
            output_bytes=rng.uniform(low, 2),
            gradient_bytes=rng.uniform(low, 2),
        )
        for _ in range(stages)
    ]
    links = {(s, s + 1): Link(0.0, rng.choice((0.5, 1.0, 4.0))) for s in range(stages - 1)}
    cluster = Cluster(Link(), links, Duplex.HALF)
    forward, backward = [], []
    for stage, cost in enumerate(costs):
        forward.append(cost.forward_s)
        backward.append(cost.backward_s)
        if stage < stages - 1:
            speed = links[stage, stage + 1].bytes_per_s
            forward.append(cost.output_bytes / speed)
            backward.append(cost.gradient_bytes / speed)
    schedule = schedules.build(rng.choice(("gpipe", "onef1b")), workers=stages, microbatches=count)
    case = Case(schedule, tuple(costs), cluster, "eager", 0.0)
    return case, forward, backward, [cost.sync_s for cost in costs]


def test_the_bound_of_a_chain_is_head_round_trip_tail() -> None:
    """It equals the formula wherever no backward is shorter than its forward.

    Elsewhere one more term can lead, which the formula leaves out: all forwards of a resource, then the way of the last.
    """
    longer = 0
    for number, rng in enumerate(seeded(9, 200)):
        case, forward, backward, sync = random_chain(rng, stages=rng.randint(1, 4), count=rng.randint(1, 6))
        bound = simulate(case.schedule, case.costs, case.cluster).lower_bound_s
        known = chain_bound(forward, backward, sync, case.schedule.microbatches)
        more = forward_bound(forward, backward, sync, case.schedule.microbatches)
        assert bound == pytest.approx(max(known, more), abs=1e-9), number
        longer += more > known + CLOSE
        if all(b >= f for f, b in zip(forward, backward, strict=True)) and not any(sync):
            assert bound == pytest.approx(known, abs=1e-9), number
    assert longer, "the extra term never led: it is not tried"


def test_the_bound_of_a_chain_with_long_backwards_is_the_formula() -> None:
    for rng in seeded(10, 100):
        stages, count = rng.randint(1, 5), rng.randint(1, 8)
        forward = [rng.uniform(0, 2) for _ in range(2 * stages - 1)]
        backward = [f * rng.choice((1.0, 2.0, 3.0)) for f in forward]
        sync = sorted((rng.uniform(0, 3) for _ in range(stages)), reverse=True)
        costs = [
            StageCost(forward[2 * s], backward[2 * s], sync_s=sync[s], output_bytes=o, gradient_bytes=g)
            for s, (o, g) in enumerate(zip([*forward[1::2], 0.0], [*backward[1::2], 0.0], strict=True))
        ]
        schedule = schedules.build("onef1b", workers=stages, microbatches=count)
        bound = simulate(schedule, costs, Cluster(Link(0.0, 1.0), duplex=Duplex.HALF)).lower_bound_s
        assert bound == pytest.approx(chain_bound(forward, backward, sync, count), abs=1e-9)


class Operation(NamedTuple):
    """One step of a microbatch's tour: where, how long, and the lag before the next step."""

    machine: Hashable
    length: float
    lag: float = 0.0


def optimum(tour: Sequence[Operation], ends: dict[int, float], count: int) -> float:
    """The best makespan of `count` equal tours over machines that do one thing at a time: all active schedules, tried out.

    `ends[j]` is what follows step j outside of all machines. Equal tours keep their order at every step, which loses nothing.
    """
    behind = [0.0] * len(tour)
    for step in reversed(range(len(tour))):
        here = tour[step].length
        after = tour[step].lag + behind[step + 1] if step + 1 < len(tour) else 0.0
        behind[step] = here + max(after, ends.get(step, 0.0))
    best = float("inf")

    def extend(done: tuple[int, ...], ready: tuple[tuple[float, ...], ...], free: dict[Hashable, float], reached: float) -> None:
        nonlocal best
        open_ = [step for step in range(len(tour)) if done[step] < count and done[step] < (done[step - 1] if step else count)]
        if not open_:
            best = min(best, reached)
            return
        starts = {step: max(ready[step][done[step]], free.get(tour[step].machine, 0.0)) for step in open_}
        if max([reached, *(starts[step] + behind[step] for step in open_)]) >= best - CLOSE:
            return
        first = min(open_, key=lambda step: starts[step] + tour[step].length)
        soonest = starts[first] + tour[first].length
        rivals = [step for step in open_ if tour[step].machine == tour[first].machine and starts[step] <= soonest]
        for step in sorted(rivals, key=lambda step: -step):
            end = starts[step] + tour[step].length
            later = list(ready)
            if step + 1 < len(tour):
                later[step + 1] = (*ready[step + 1], end + tour[step].lag)
            total = max(reached, end + ends.get(step, 0.0))
            count_up = tuple(n + (s == step) for s, n in enumerate(done))
            extend(count_up, tuple(later), {**free, tour[step].machine: end}, total)

    extend((0,) * len(tour), ((0.0,) * count, *((),) * (len(tour) - 1)), {}, 0.0)
    return best


def chain_tour(case: Case) -> tuple[list[Operation], dict[int, float]]:
    """A chain's tour, from its costs and links alone: stage, channel, .. there and back."""
    stages, cluster = case.schedule.stages, case.cluster or Cluster()
    half = cluster.duplex is Duplex.HALF
    tour: list[Operation] = []
    ends: dict[int, float] = {}
    for stage, cost in enumerate(case.costs):
        tour.append(Operation(stage, cost.forward_s))
        if stage < stages - 1:
            link = cluster.between(stage, stage + 1)
            tour.append(Operation(("link", stage), cost.output_bytes / link.bytes_per_s, link.latency_s))
    for stage, cost in reversed(list(enumerate(case.costs))):
        ends[len(tour)] = cost.sync_s
        tour.append(Operation(stage, cost.backward_s))
        if stage:
            link = cluster.between(stage, stage - 1)
            way = ("link", stage - 1) if half else ("back", stage - 1)
            tour.append(Operation(way, case.costs[stage - 1].gradient_bytes / link.bytes_per_s, link.latency_s))
    return tour, ends


def test_no_schedule_of_a_chain_beats_the_bound() -> None:
    """Against the proven optimum of small chains, with half and full duplex, latency and syncs; it is often reached."""
    reached = 0
    for rng in seeded(11, 120):
        case, *_ = random_chain(rng, stages=rng.randint(1, 3), count=rng.randint(1, 3))
        if rng.random() < 0.5:
            links = {pair: replace(link, latency_s=rng.uniform(0, 1)) for pair, link in case.cluster.links.items()}
            case = case._replace(cluster=replace(case.cluster, links=links, duplex=rng.choice(list(Duplex))))
        best = optimum(*chain_tour(case), count=case.schedule.microbatches)
        for name in ("gpipe", "onef1b"):
            schedule = schedules.build(name, workers=case.schedule.stages, microbatches=case.schedule.microbatches)
            timeline = simulate(schedule, case.costs, case.cluster)
            assert timeline.lower_bound_s <= best + CLOSE
            assert timeline.makespan_s >= best - CLOSE
        reached += timeline.lower_bound_s >= best - CLOSE
    assert reached > 60


def all_orders(schedule: Schedule, most: int) -> Iterator[Schedule]:
    """The same actions in every order of every list; nothing if there are more than `most`."""
    orders = []
    total = 1
    for entries in schedule.lists:
        if len(entries) > 6:
            return
        found = [order for order in permutations(entries) if in_order(order)]
        orders.append(found)
        total *= len(found)
    if total <= most:
        for lists in product(*orders):
            yield replace(schedule, period=lists)


def in_order(entries: Sequence[Entry]) -> bool:
    """Does every microbatch of a list go F, R, B or I, W?"""
    place = {entry: index for index, entry in enumerate(entries)}
    for action in place:
        assert isinstance(action, Action)
        for op in {Op.B: (Op.F, Op.R), Op.I: (Op.F, Op.R), Op.R: (Op.F,), Op.W: (Op.I,)}.get(action.op, ()):
            for part in {action.part, -1}:
                if place.get(action._replace(op=op, part=part), -1) > place[action]:
                    return False
    return True


def test_no_order_of_the_lists_beats_the_bound() -> None:
    """Tiny random placements (replicas, teams, several stages on a worker): the bound against every order of every list."""
    tried = runs = 0
    for rng in seeded(12, 260):
        case = random_case(rng, workers=3, stages=2, microbatches=2, replicas=2, cells=False)
        makespans, bounds = [], []
        for schedule in all_orders(case.schedule, most=60):
            try:
                timeline = simulate(schedule, case.costs, case.cluster, sync=case.sync)
            except MeshwrightError:
                continue
            makespans.append(timeline.makespan_s)
            bounds.append(timeline.lower_bound_s)
        if len(makespans) > 1:
            assert max(bounds) <= min(makespans) + CLOSE
            assert max(bounds) - min(bounds) <= CLOSE, "the bound is of the placement, not of an order"
            tried += 1
            runs += len(makespans)
    assert tried > 50 and runs > 400, (tried, runs)


@pytest.mark.parametrize(("name", "options"), named(), ids=label)
def test_named_schedules_keep_their_bound(name: str, options: dict[str, object]) -> None:
    schedule = build(name, options)
    for send in (0.0, 0.3):
        costs = even_costs(stages=schedule.stages, workers=schedule.workers, sync_s=0.5)
        timeline = simulate(schedule, costs, Cluster(Link(send)))
        busiest = max(timeline.busy_s(worker) for worker in range(timeline.workers))
        assert busiest - CLOSE <= timeline.lower_bound_s <= timeline.makespan_s + CLOSE


def opened(schedule: Schedule) -> Schedule:
    """The same lists with every cell's actions one after the other."""
    return replace(schedule, period=tuple(tuple(a for entry in entries for a in actions(entry)) for entries in schedule.lists))


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev"])
@pytest.mark.parametrize(("workers", "microbatches"), [(2, 4), (2, 6), (4, 8), (4, 12), (6, 12), (8, 16), (8, 20)])
def test_the_bound_does_not_take_cells_for_dependencies(name: str, workers: int, microbatches: int) -> None:
    """Which actions share a cell is the schedule's choice: opened, the same lists may end sooner, but never below the bound."""
    schedule = schedules.build(name, workers=workers, microbatches=microbatches)
    assert any(isinstance(entry, Cell) for entries in schedule.lists for entry in entries)
    apart = opened(schedule)
    assert check(apart).ok
    for forward, backward, send in ((1.0, 2.0, 0.0), (1.0, 1.0, 0.0), (2.0, 1.0, 0.0), (1.0, 3.0, 0.25)):
        costs = even_costs(stages=schedule.stages, workers=workers, forward_s=forward, backward_s=backward)
        for overlap in (0.0, 0.5, 1.0):
            paired, alone = (simulate(s, costs, Cluster(Link(send)), overlap=overlap) for s in (schedule, apart))
            assert paired.lower_bound_s <= min(paired.makespan_s, alone.makespan_s) + CLOSE
            assert paired.lower_bound_s >= (1 - overlap / 2) * max(alone.busy_s(w) for w in range(workers)) - CLOSE
            if not overlap:
                assert paired.lower_bound_s == pytest.approx(alone.lower_bound_s)


def test_the_bound_holds_for_any_pairing() -> None:
    """With full overlap two forwards in one cell take the time of one: no pairing of these lists ends below the bound."""
    costs = even_costs(stages=1, workers=1, forward_s=1.0, backward_s=1.0)
    plain = schedules.build("gpipe", workers=1, microbatches=2)
    f0, f1, b0, b1 = plain.lists[0]
    assert all(isinstance(action, Action) for action in (f0, f1, b0, b1))
    crossed = replace(plain, period=((f0, Cell(f1, b0), b1),))  # type: ignore[arg-type]
    alike = replace(plain, period=((Cell(f0, f1), Cell(b0, b1)),))  # type: ignore[arg-type]
    assert check(crossed).ok and check(alike).ok
    best = simulate(alike, costs, overlap=1.0).makespan_s
    assert best == 2.0 < simulate(crossed, costs, overlap=1.0).makespan_s
    assert simulate(crossed, costs, overlap=1.0).lower_bound_s == best
