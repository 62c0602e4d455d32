"""The compiled path: one schedule, many costs. It sweeps the same program as the plain engine and must give the same times.

    from meshwright.simulate import compile
    program = compile(schedule)
    program.makespan(costs)           one plan
    program.makespans(array)          many plans: array[plan, stage, field], fields in the order of StageCost

Import this file only on demand: numba's first compile takes seconds (then it is cached on disk), so the command line always
uses the plain path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Cell
from meshwright.ir.analysis.price import Price
from meshwright.ir.cluster import Cluster
from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost, rows_for
from meshwright.passes.check import refuse_unproved
from meshwright.passes.lower import lowered_flow
from meshwright.passes.sync import Sync
from meshwright.simulate.event_graph import EventGraph, Message

FIELDS = [field.name for field in fields(StageCost)]
_VALUES = attrgetter(*FIELDS)
Array = NDArray[np.float64]


class Compiled:
    """A lowered schedule as arrays. Costs enter linearly, so a plan takes one small product and one sweep."""

    def __init__(self, schedule: Schedule, cluster: Cluster | None = None, *, sync: Sync | str = Sync.EAGER) -> None:
        cluster = cluster or Cluster()
        refuse_unproved(schedule)
        flow = lowered_flow(schedule, sync=sync)
        self.program = program = EventGraph(flow, cluster.duplex)
        self.stages = schedule.stages
        counts = np.fromiter((len(waits) for waits in program.waits), np.int64, len(program.waits))
        self._first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self._waits = np.fromiter((n for waits in program.waits for n in waits), np.int32, int(counts.sum()))
        self._link = np.array(program.link_before, np.int32)
        self._class = np.array(program.class_of, np.int32)
        self._linear(cluster)

    def _linear(self, cluster: Cluster) -> None:
        """Finds the coefficients of each (class, stage) by pricing each cost field alone."""
        program, schedule = self.program, self.program.schedule
        rows = [(number, stage, what) for number, (_, w) in enumerate(program.classes) for stage, what in _terms(w)]
        self._row_class = np.array([number for number, _, _ in rows], np.int32)
        self._row_stage = np.array([stage for _, stage, _ in rows], np.int32)
        self._coefficient = np.zeros((len(rows), len(FIELDS)))
        for field, name in enumerate(FIELDS):
            price = Price(schedule, [StageCost(**{name: 1.0})] * schedule.stages, cluster)
            for row, (number, _, what) in enumerate(rows):
                worker = program.classes[number][0]
                busy = price.message_s(*what)[0] if isinstance(what, Message) else price.entry_s(worker, what)
                self._coefficient[row, field] = busy
        free = Price(schedule, [StageCost()] * schedule.stages, cluster)
        self._latency = np.array([latency for _, latency in program.table(free)])

    def makespan(self, costs: Sequence[StageCost]) -> float:
        """Returns the makespan of one plan."""
        return float(self.makespans(self._array(costs)[None])[0])

    def times(self, costs: Sequence[StageCost]) -> tuple[Array, Array]:
        """Returns the start of every node, and the time when its output is available."""
        busy = _busy(self._row_class, self._row_stage, self._coefficient, self._array(costs), len(self._latency))
        count = len(self._class)
        starts, ready = np.empty(count), np.empty(count)
        _sweep(self._first, self._waits, self._link, self._class, busy, self._latency, starts, ready)
        return starts, ready

    def makespans(self, costs: Array) -> Array:
        """Returns the makespans of many plans: `costs[plan, stage, field]`."""
        costs = np.ascontiguousarray(costs, np.float64)
        if costs.ndim != 3 or costs.shape[1:] != (self.stages, len(FIELDS)):
            raise MeshwrightError(
                f"costs have the shape {costs.shape}, not (plans, {self.stages} stages, {len(FIELDS)} fields)",
                fix=f"fields in this order: {', '.join(FIELDS)}",
            )
        result: Array = _many(
            self._first,
            self._waits,
            self._link,
            self._class,
            self._row_class,
            self._row_stage,
            self._coefficient,
            self._latency,
            costs,
        )
        return result

    def _array(self, costs: Sequence[StageCost]) -> Array:
        return np.array([_VALUES(cost) for cost in rows_for(costs, self.stages)])


def _terms(what: Any) -> list[tuple[int, Any]]:
    """Returns the parts of a class whose costs are added, each with its stage."""
    if isinstance(what, Message):
        return [(what.value.stage, what)]
    if isinstance(what, Cell):
        return [(action.stage, action) for action in what]
    return [(what.stage, what)] if what.stage >= 0 else []


@njit(cache=True)
def _busy(row_class: Any, row_stage: Any, coefficient: Any, costs: Any, classes: int) -> Any:
    busy = np.zeros(classes)
    for row in range(len(row_class)):
        if row_stage[row] < costs.shape[0]:
            total = 0.0
            for field in range(coefficient.shape[1]):
                total += coefficient[row, field] * costs[row_stage[row], field]
            busy[row_class[row]] += total
    return busy


@njit(cache=True)
def _sweep(first: Any, waits: Any, link: Any, class_of: Any, busy: Any, latency: Any, starts: Any, ready: Any) -> float:
    last = 0.0
    for node in range(len(class_of)):
        start = 0.0
        before = link[node]
        if before >= 0:
            start = ready[before] - latency[class_of[before]]
        for k in range(first[node], first[node + 1]):
            start = max(start, ready[waits[k]])
        class_ = class_of[node]
        starts[node] = start
        ready[node] = start + busy[class_] + latency[class_]
        last = max(last, ready[node])
    return last


@njit(cache=True)
def _many(
    first: Any, waits: Any, link: Any, class_of: Any, row_class: Any, row_stage: Any, coefficient: Any, latency: Any, costs: Any
) -> Any:
    starts, ready = np.empty(len(class_of)), np.empty(len(class_of))
    makespans = np.empty(len(costs))
    for plan in range(len(costs)):
        busy = _busy(row_class, row_stage, coefficient, costs[plan], len(latency))
        makespans[plan] = _sweep(first, waits, link, class_of, busy, latency, starts, ready)
    return makespans
