"""The exact optimum on a schedule's placement, by CP-SAT: any order of the same actions, with latency and a memory cap."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from math import ceil

from ortools.sat.python import cp_model

from meshwright import Schedule, Timeline
from meshwright.ir.action import Action, Op


@dataclass(frozen=True)
class Proof:
    """What the solver knows after its time: the best makespan it has, and what no order can beat."""

    proved: bool
    makespan: int | None
    bound: float


def optimum(
    schedule: Schedule,
    times: dict[Op, int],
    *,
    latency: int = 0,
    cap: int | None = None,
    hint: Timeline | None = None,
    low: float = 0.0,
    seconds: float = 60,
) -> Proof:
    """Integer times per op on every stage; microbatches stay in order per stage and op, which loses nothing as they are alike."""
    home = {a: w for w, entries in enumerate(schedule.lists) for a in entries if isinstance(a, Action)}
    arcs = [*_arcs(schedule, home, latency), *_reuse(schedule, home, cap)]
    length = {a: times[a.op] for a in home}
    head, tail = _ways(home, arcs, length, forwards=True), _ways(home, arcs, length, forwards=False)
    horizon = round(hint.makespan_s) if hint else sum(length.values())
    model = cp_model.CpModel()
    start = {a: model.new_int_var(head[a], max(head[a], horizon - length[a] - tail[a]), str(a)) for a in home}
    for a, b, lag in arcs:
        model.add(start[b] >= start[a] + length[a] + lag)
    lanes = defaultdict(list)
    for a, w in home.items():
        lanes[w].append(model.new_fixed_size_interval_var(start[a], length[a], ""))
    for intervals in lanes.values():
        model.add_no_overlap(intervals)
    if cap is not None:
        _capped(model, schedule, home, start, length, cap, horizon)
    end = model.new_int_var(ceil(low - 1e-6), horizon, "end")
    for a in home:
        model.add(end >= start[a] + length[a] + tail[a])
    model.minimize(end)
    for span in (s for spans in hint.compute for s in spans) if hint else ():
        model.add_hint(start[span.entry], round(span.start_s))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Proof(status == cp_model.OPTIMAL, round(solver.objective_value) if found else None, solver.best_objective_bound)


def _arcs(schedule: Schedule, home: dict[Action, int], latency: int):
    """(a, b, lag): b starts `lag` after the end of a, by data or by first in, first out."""
    last = schedule.stages - 1
    order = defaultdict(list)
    for a in home:
        order[a.op, a.stage, a.replica].append(a)
        needs = []
        if a.op is Op.F and a.stage:
            needs.append(a._replace(stage=a.stage - 1))
        elif a.op in (Op.B, Op.I):
            needs.append(a._replace(stage=a.stage + 1) if a.stage < last else a._replace(op=Op.F))
        elif a.op is Op.W:
            needs.append(a._replace(op=Op.I))
        for need in needs:
            yield need, a, latency if home[need] != home[a] else 0
    for same in order.values():
        same.sort(key=lambda a: a.mb)
        yield from ((a, b, 0) for a, b in itertools.pairwise(same))


def _ways(home, arcs, length, *, forwards: bool) -> dict[Action, int]:
    """The longest way to the start of each action, or from its end."""
    behind, missing = defaultdict(list), dict.fromkeys(home, 0)
    for a, b, lag in arcs:
        first, second = (a, b) if forwards else (b, a)
        behind[first].append((second, lag))
        missing[second] += 1
    way = dict.fromkeys(home, 0)
    stack = [a for a, n in missing.items() if not n]
    while stack:
        a = stack.pop()
        for b, lag in behind[a]:
            way[b] = max(way[b], way[a] + length[a] + lag)
            missing[b] -= 1
            if not missing[b]:
                stack.append(b)
    return way


def _reuse(schedule: Schedule, home: dict[Action, int], cap: int | None):
    """Where a worker has one stage, the cap is an order: a forward waits for the end of the one `cap` before."""
    for w, held in enumerate(schedule.placement.held):
        if cap is not None and len(held) == 1:
            forwards = sorted((a for a in home if home[a] == w and a.op is Op.F), key=lambda a: a.mb)
            yield from ((_end_of(home, early), late, 0) for early, late in zip(forwards, forwards[cap:], strict=False))


def _end_of(home: dict[Action, int], forward: Action) -> Action:
    return next(e for op in (Op.B, Op.W) if (e := forward._replace(op=op)) in home)


def _capped(model, schedule, home, start, length, cap, horizon) -> None:
    """At most `cap` activations alive on workers with several stages, from the start of F to the end of B or W."""
    for w, held in enumerate(schedule.placement.held):
        if len(held) == 1:
            continue
        alive = []
        for a in (a for a in home if home[a] == w and a.op is Op.F):
            size, end = model.new_int_var(1, horizon, ""), model.new_int_var(0, horizon, "")
            last = _end_of(home, a)
            model.add(end == start[last] + length[last])
            alive.append(model.new_interval_var(start[a], size, end, ""))
        model.add_cumulative(alive, [1] * len(alive), cap)
