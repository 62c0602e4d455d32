"""Plans whose stages have devices of their own, of any number each: SPP's, those of the threshold tables, and their neighbours.

On few devices all plans are enumerated. On more, plans for the order of devices and its reverse are improved step by step: a cut
moves by a layer, a device moves to another stage, two devices swap places, a stage splits or joins its neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from math import comb

import numpy as np

from meshwright.costs.stages import stage_links
from meshwright.ir.cluster import Duplex
from meshwright.ir.placement import Placement
from meshwright.ir.plan.chosen_plan import PlanStage
from meshwright.planners._limits import MOST_MICROBATCHES
from meshwright.planners._search.candidate_plans import WidePlan
from meshwright.planners._search.cuts.even_cuts import even_cuts
from meshwright.planners._search.cuts.threshold_partition import ThresholdTable
from meshwright.planners._search.effort import FEW
from meshwright.planners._search.families import Family, families
from meshwright.planners._search.interchangeable import arrangements, count_of_arrangements
from meshwright.planners._search.problem import Problem

INF = float("inf")
Stages = tuple[PlanStage, ...]
FACTORS = (1.0, 1.03, 1.08, 1.2, 1.5, 2.2, 3.5)
EVERY = 10_000
"""If a problem has at most this number of plans, all of them are tried."""


def line_families(problem: Problem) -> list[Family]:
    """The schedules under which stages may have several devices."""
    return [family for family in families(problem.limits.schedule) if family.has_line]


def steps_of(problem: Problem) -> list[tuple[int, int | None]]:
    """(microbatches, rows) of a step: as given, or ways to cut the batch: on few devices all of them.

    On more devices they are those with the most rows that leave enough microbatches for long and short pipelines.
    """
    if problem.batch is None:
        assert problem.microbatches is not None
        return [(problem.microbatches, problem.limits.rows)]
    ways: list[tuple[int, int | None]] = [(problem.batch // rows, rows) for rows in problem.row_choices]
    ways = [way for way in ways if way[0] <= MOST_MICROBATCHES]
    if problem.devices <= FEW:
        return ways
    found = [[way for way in ways if way[0] >= least][-1:] for least in (4 * problem.devices, 16, 4)]
    return list(dict.fromkeys(way for each in found for way in each)) or ways[:1]


def least_s(problem: Problem, microbatches: int, rows: int | None) -> float:
    """No plan is faster, whatever its stages and its order: all devices work all the time, at the best width of each layer."""
    most = min(problem.devices, rows) if problem.profile.rows and rows else 1  # without rows all widths take equal work
    widths = [width for width in range(1, most + 1) if problem.limits.allows(width, rows)]
    work = np.min([width * np.diff(problem.arrays(rows, width).work_sums) for width in widths], axis=0)
    return microbatches * float(work.sum()) / float((1.0 / problem.slowness).sum())


def bound_s(problem: Problem, stages: Stages, microbatches: int, rows: int | None) -> float:
    """No order is faster, under any of the schedules that are tried."""
    whole, split = bounds_s(problem, stages, microbatches, rows)
    return min((split if family.split else whole for family in line_families(problem)), default=whole)


def bounds_s(
    problem: Problem, stages: Stages, microbatches: int, rows: int | None, *, early: bool = False
) -> tuple[float, float]:
    """No order with whole backwards is faster than the first, none with split ones than the second.

    Each stage waits for the first forward, does all its work, and adds up its gradients. Its last backward then goes down to
    the first stage. Of a split one only the first half does; the second may run meanwhile, and so may `early` recompute.
    """
    costs = problem.stage_costs(stages, rows)
    links = stage_links(stages, problem.cluster, groups=problem.links)
    head = down = split_down = best = whole = split = 0.0
    half = links.duplex is Duplex.HALF
    for n, cost in enumerate(costs):
        again = 0.0 if early else cost.recompute_s
        first = cost.forward_s + again + cost.input_s
        work = cost.forward_s + cost.recompute_s + cost.backward_s
        best = max(best, head + microbatches * work + cost.sync_s)
        whole = max(whole, head + microbatches * work + down)
        split = max(split, head + microbatches * first + split_down)
        if n + 1 < len(costs):
            there, back = links.between(n, n + 1), links.between(n + 1, n)
            sends, returns = there.busy_s(cost.output_bytes), back.busy_s(cost.gradient_bytes)
            best = max(best, head + microbatches * (sends + returns if half else max(sends, returns)))
            head += cost.forward_s + sends + there.latency_s
            down += again + cost.backward_s + returns + back.latency_s
            split_down += again + cost.input_s + returns + back.latency_s
    return max(best, whole), max(best, split)


def orders(problem: Problem) -> list[list[int]]:
    """Orders of devices to cut into stages: by links, both ways; unequal devices also by speed, and without slow ones."""
    along = problem.links.rates()[np.ix_(problem.order, problem.order)]
    if problem.uniform and np.array_equal(along, along[::-1, ::-1]):
        return [problem.order]  # both ways are alike
    found = [problem.order, problem.order[::-1]]
    if not problem.uniform:
        slow = problem.slowness
        by_speed = sorted(problem.order, key=lambda device: float(slow[device]))
        found += [by_speed, by_speed[::-1]]
        for limit in sorted(set(slow.tolist()))[:-1]:
            found += [[device for device in order if slow[device] <= limit] for order in found[:2]]
    return found


def with_recompute(stages: Stages, shares: Sequence[float]) -> Stages:
    """Returns the same stages that recompute these shares of their layers."""
    return tuple(replace(stage, recompute=share) for stage, share in zip(stages, shares, strict=True))


def recut(problem: Problem, stages: Stages, rows: int | None) -> Stages:
    """Returns the same devices with layers cut by their speeds."""
    if len(stages) == 1:
        return stages
    slow = [float(problem.slowness[list(stage.devices)].max()) / stage.width for stage in stages]
    ends = even_cuts(problem.arrays(rows).work_sums, slow)
    return tuple(
        PlanStage(first, end - 1, stage.devices) for first, end, stage in zip((0, *ends[:-1]), ends, stages, strict=True)
    )


def table_plans(problem: Problem, order: list[int], microbatches: int, rows: int | None) -> list[Stages]:
    """Returns plans of the threshold tables for one order of devices."""
    count = len(order)
    if count <= 12:
        widths = list(range(1, count + 1))
    else:
        widths = sorted({*(2**k for k in range(count.bit_length())), *((3, 6, 12) if count <= 64 else ()), count})
    allowed = [width for width in widths if width <= count and problem.limits.allows(width, rows)]
    works = {}
    for width in allowed:
        arrays = problem.arrays(rows, width)
        works[width] = float(problem.slowness.min()) * (arrays.forward + arrays.input + arrays.weight)
    index = np.array(order)
    rates = problem.links.rates()[np.ix_(index, index)]
    table = ThresholdTable(works, problem.parameters, problem.arrays(rows).output, rates, microbatches)
    found = table.plans(FACTORS if problem.layers * count <= 100_000 else FACTORS[1::3])
    cut = [
        tuple(
            PlanStage(first, end - 1, tuple(order[start:stop]))
            for first, end, start, stop in zip((0, *ends[:-1]), ends, (0, *used[:-1]), used, strict=True)
        )
        for ends, used in found
    ]
    return cut if problem.uniform else [*cut, *(recut(problem, stages, rows) for stages in cut)]


def unequal_starts(problem: Problem, rows: int | None) -> Iterator[Stages]:
    """Yields simple plans of few unequal devices: runs of each order, cut by speed."""
    if problem.uniform or problem.devices > FEW:
        return
    for order in orders(problem):
        for count in range(1, min(len(order), problem.layers) + 1):
            for inner in combinations(range(1, len(order)), count - 1):
                marks = (0, *inner, len(order))
                groups = [tuple(order[a:b]) for a, b in pairwise(marks)]
                yield recut(problem, tuple(PlanStage(0, problem.layers - 1, group) for group in groups), rows)


def polished(stages: Stages, microbatches: int, rows: int | None) -> Iterator[WidePlan]:
    """Yields stages under orders that are made for their costs."""
    made = (("listed", {"strict": False}), ("listed", {"memory": microbatches}), ("onef1b", {"memory": microbatches}))
    recompute = any(stage.recompute for stage in stages)
    stages = with_recompute(stages, [float(recompute)] * len(stages))  # these orders recompute inside the backward of every stage
    for schedule, options in made:
        yield WidePlan(stages, Family(schedule, Placement.line, options), microbatches, rows, source="polished")


def count_of_all(layers: int, kinds: Sequence[int]) -> int:
    """Returns an upper bound on the number of plans: orders of devices, times the ways to cut them and the layers into stages."""
    return sum(
        orders * comb(used - 1, stages - 1) * comb(layers - 1, stages - 1)
        for used, orders in enumerate(count_of_arrangements(kinds))
        for stages in range(1, min(layers, used) + 1)
    )


def every_plan(layers: int, kinds: Sequence[int]) -> Iterator[Stages]:
    """Yields all plans: some devices in every order, cut into stages, except plans that are alike because their devices are.

    The order of the devices of a stage matters, because the first rows of a stage go to the first rows of the next one.
    """
    for devices in arrangements(kinds):
        for count in range(1, min(layers, len(devices)) + 1):
            if count == 1 and list(devices) != sorted(devices):
                continue  # one stage sends nothing to others
            for places in combinations(range(1, len(devices)), count - 1):
                groups = [devices[a:b] for a, b in pairwise((0, *places, len(devices)))]
                for inner in combinations(range(1, layers), count - 1):
                    marks = pairwise((0, *inner, layers))
                    yield tuple(PlanStage(a, b - 1, group) for (a, b), group in zip(marks, groups, strict=True))


def neighbours(stages: Stages, kinds: Sequence[int], layers: int) -> Iterator[Stages]:
    """Yields plans that differ in one step. Devices of one kind do not take the place of each other."""
    count = len(stages)
    for n in range(count - 1):
        one, other = stages[n], stages[n + 1]
        if one.first < one.last:
            yield _with(stages, {n: replace(one, last=one.last - 1), n + 1: replace(other, first=other.first - 1)})
        if other.first < other.last:
            yield _with(stages, {n: replace(one, last=one.last + 1), n + 1: replace(other, first=other.first + 1)})
        yield (*stages[:n], PlanStage(one.first, other.last, (*one.devices, *other.devices)), *stages[n + 2 :])
    used = {device for stage in stages for device in stage.devices}
    free_of = {kinds[device]: device for device in reversed(range(len(kinds))) if device not in used}  # the first of each kind
    idle = sorted(free_of.values())
    for n, stage in enumerate(stages):
        left: set[tuple[int, ...]] = set()  # what stays of a stage without one device, by kinds
        for device in reversed(stage.devices):
            rest = tuple(d for d in stage.devices if d != device)
            if (alike := tuple(kinds[d] for d in rest)) in left:
                rest = ()
            left.add(alike)
            for later in stage.devices[stage.devices.index(device) + 1 :] if count > 1 else ():
                if kinds[later] != kinds[device]:
                    yield _with(stages, {n: replace(stage, devices=_swapped(stage.devices, device, later))})
            for m, other in enumerate(stages):
                if m != n and rest:
                    yield _with(stages, {n: replace(stage, devices=rest), m: replace(other, devices=(*other.devices, device))})
                for swap in other.devices if m > n else ():
                    if kinds[swap] != kinds[device]:
                        ours, theirs = (_swapped(each.devices, device, swap) for each in (stage, other))
                        yield _with(stages, {n: replace(stage, devices=ours), m: replace(other, devices=theirs)})
            for free in idle:
                if kinds[free] != kinds[device]:
                    yield _with(stages, {n: replace(stage, devices=_swapped(stage.devices, device, free))})
            if rest:
                yield _with(stages, {n: replace(stage, devices=rest)})
        for free in idle:
            yield _with(stages, {n: replace(stage, devices=(*stage.devices, free))})
        if stage.width > 1 and stage.first < stage.last:
            middle, half = (stage.first + stage.last) // 2, stage.width // 2
            yield (
                *stages[:n],
                PlanStage(stage.first, middle, stage.devices[:half]),
                PlanStage(middle + 1, stage.last, stage.devices[half:]),
                *stages[n + 1 :],
            )


def descended(problem: Problem, stages: Stages, microbatches: int, rows: int | None) -> Stages:
    """Returns the stages to which steps to the neighbour with the lowest bound lead; none of its neighbours has a lower one."""
    bound = bound_s(problem, stages, microbatches, rows)
    while True:
        ways = [each for each in neighbours(stages, problem.kinds, problem.layers) if allowed(problem, each, rows)]
        lowest, best = min(((bound_s(problem, each, microbatches, rows), n) for n, each in enumerate(ways)), default=(bound, -1))
        if lowest >= bound * (1 - 1e-9):
            return stages
        stages, bound = ways[best], lowest


def allowed(problem: Problem, stages: Stages, rows: int | None) -> bool:
    """Whether the devices of each stage can share its rows, and there are as many stages as asked for."""
    limits = problem.limits
    return limits.pp in (None, len(stages)) and all(limits.allows(stage.width, rows) for stage in stages)


def _swapped(devices: tuple[int, ...], one: int, other: int) -> tuple[int, ...]:
    """Each of two devices in the place of the other one."""
    return tuple({one: other, other: one}.get(device, device) for device in devices)


def _with(stages: Stages, changed: dict[int, PlanStage]) -> Stages:
    return tuple(changed.get(n, stage) for n, stage in enumerate(stages))


def as_plans(
    problem: Problem,
    stages: Stages,
    microbatches: int,
    rows: int | None,
    source: str,
    below_s: float = INF,
    *,
    recompute: bool = False,
) -> Iterator[WidePlan]:
    """Yields stages with recompute or without under each schedule that runs them so and may be faster than `below_s`."""
    if not allowed(problem, stages, rows):
        return
    for early in (False, True) if recompute else (False,):
        same = [family for family in line_families(problem) if family.early is early]
        if not same or not same[0].fits(len(stages), microbatches):
            continue
        cut = with_recompute(stages, same[0].recompute_shares(len(stages), recompute))
        whole, split = bounds_s(problem, cut, microbatches, rows, early=early)
        for family in same:
            if (split if family.split else whole) < below_s * (1 - 1e-9):
                yield WidePlan(cut, family, microbatches, rows, source=source)
