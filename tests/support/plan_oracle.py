"""The best plan of a small problem: every cut, every group of devices, every order. Orders by CP-SAT, with its own prices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise, product

from ortools.sat.python import cp_model

Rates = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SmallModel:
    """Whole numbers: forward and backward times, bytes of outputs and parameters of layers, microbatches, bandwidths."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    output: tuple[int, ...]
    parameters: tuple[int, ...]
    microbatches: int
    rates: Rates


@dataclass(frozen=True)
class Line:
    """The stages of a plan as whole numbers: times, transfers there and back, and sums at the end."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    there: tuple[int, ...]
    sync: tuple[int, ...]


def every_line(model: SmallModel) -> Iterator[Line]:
    layers, devices = len(model.forward), len(model.rates)
    for stages in range(1, min(layers, devices) + 1):
        for places in product(range(-1, stages), repeat=devices):
            groups = [[d for d, place in enumerate(places) if place == s] for s in range(stages)]
            if not all(groups):
                continue
            for inner in combinations(range(1, layers), stages - 1):
                yield line_of(model, list(pairwise((0, *inner, layers))), groups)


def line_of(model: SmallModel, cuts: list[tuple[int, int]], groups: list[list[int]]) -> Line:
    wide = [len(group) for group in groups]
    forward = [sum(model.forward[a:b]) // r for (a, b), r in zip(cuts, wide, strict=True)]
    backward = [sum(model.backward[a:b]) // r for (a, b), r in zip(cuts, wide, strict=True)]
    sync = []
    for (a, b), group in zip(cuts, groups, strict=True):
        pairs = [model.rates[x][y] for x, y in combinations(group, 2)]
        r = len(group)
        sync.append(2 * (r - 1) * sum(model.parameters[a:b]) // (r * min(pairs)) if pairs else 0)
    there = []
    for (one, other), (_, end) in zip(pairwise(groups), cuts, strict=False):
        slowest = min(model.rates[x][y] for x in one for y in other)
        there.append(model.output[end - 1] // (max(len(one), len(other)) * slowest))
    return Line(tuple(forward), tuple(backward), tuple(there), tuple(sync))


def lower(line: Line, count: int) -> int:
    """Head, work and tail of each stage, and of each channel."""
    head = back = best = 0
    for s in range(len(line.forward)):
        best = max(best, head + count * (line.forward[s] + line.backward[s]) + max(back, line.sync[s]))
        if s < len(line.there):
            head += line.forward[s] + line.there[s]
            back += line.backward[s] + line.there[s]
            best = max(best, head - line.there[s] + count * line.there[s])
    return best


def best_step(model: SmallModel, *, start: int) -> int:
    """The shortest step of any plan in any order; `start` is a step that some plan reaches."""
    best = start
    for line in sorted(every_line(model), key=lambda line: lower(line, model.microbatches)):
        if lower(line, model.microbatches) >= best:
            break
        best = min(best, shortest(line, model.microbatches, best))
    return best


def shortest(line: Line, count: int, limit: int, *, half: bool = False) -> int:
    """The shortest order of one plan, or `limit` if none is shorter. Unless `half`, a link works both ways at the same time."""
    model = cp_model.CpModel()
    last = len(line.forward) - 1
    lanes: dict[tuple[str, int], list[cp_model.IntervalVar]] = {}

    def job(lane: tuple[str, int], length: int) -> cp_model.IntVar:
        start = model.new_int_var(0, limit, "")
        lanes.setdefault(lane, []).append(model.new_fixed_size_interval_var(start, length, ""))
        return start

    end = model.new_int_var(0, limit, "")
    before: dict[tuple[str, int], cp_model.IntVar] = {}
    for _ in range(count):
        at: cp_model.LinearExprT = 0
        tour = []
        for s in range(last + 1):
            tour.append((("stage", s), "F", line.forward[s]))
            if s < last:
                tour.append((("there", s), "F", line.there[s]))
        for s in range(last, -1, -1):
            tour.append((("stage", s), "B", line.backward[s]))
            if s:
                tour.append((("there" if half else "back", s - 1), "B", line.there[s - 1]))
        for lane, way, length in tour:
            start = job(lane, length)
            model.add(start >= at)
            if (found := before.get((f"{lane}{way}", 0))) is not None:
                model.add(start >= found + length)  # first in, first out
            before[f"{lane}{way}", 0] = start
            at = start + length
            if lane[0] == "stage" and way == "B":
                model.add(end >= start + length + line.sync[lane[1]])
    for intervals in lanes.values():
        model.add_no_overlap(intervals)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = 30
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.INFEASIBLE), "not proved"
    return round(solver.objective_value) if status == cp_model.OPTIMAL else limit
