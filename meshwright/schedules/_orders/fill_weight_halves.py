"""Fills weight halves into gaps: takes orders of F and I, and returns the same orders with every W placed.

A W is placed where its worker would idle, or where memory has no room for the next forward; oldest first. This never
deadlocks if the same orders with whole backwards keep the cap: when no W is pending, memory is that of whole backwards.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from meshwright.ir.action import Action, Op
from meshwright.ir.stage_cost import StageCost, rows_for


def fill(
    orders: Sequence[Sequence[Action]], *, stages: int, cap: int, costs: Sequence[StageCost] | None = None, latency_s: float = 0.0
) -> list[list[Action]]:
    """Runs the orders on a clock, with `latency_s` between workers, and places each W where nothing else can run."""
    costs = rows_for(costs, stages)
    left = [deque(order) for order in orders]
    lists: list[list[Action]] = [[] for _ in orders]
    owed: list[deque[Action]] = [deque() for _ in orders]
    live = [0] * len(orders)
    end: dict[Action, tuple[float, int]] = {}
    waiting: dict[Action, list[int]] = defaultdict(list)
    clock = [(0.0, worker) for worker in range(len(orders))]

    def ready_at(need: Action | None, worker: int) -> float | None:
        """Returns when the input of an action is on this worker; None if that is not known yet."""
        if need is None:
            return 0.0
        if need not in end:
            return None
        time, home = end[need]
        return time if home == worker else time + latency_s

    def run(worker: int, action: Action, time: float, length: Callable[[StageCost], float]) -> None:
        lists[worker].append(action)
        stop = time + length(costs[action.stage])
        end[action] = (stop, worker)
        for late in [worker, *waiting.pop(action, [])]:
            heappush(clock, (stop if late == worker else stop + latency_s, late))

    while clock:
        time, worker = heappop(clock)
        need: Action | None = None
        ready: float | None = None
        if left[worker]:
            action = left[worker][0]
            need = _need(action, stages)
            ready = ready_at(need, worker)
            if ready is not None and ready <= time and not (action.op is Op.F and live[worker] == cap):
                left[worker].popleft()
                live[worker] += action.op is Op.F
                if action.op is Op.I:
                    owed[worker].append(action)
                run(worker, action, time, _forward_s if action.op is Op.F else _input_s)
                continue
        if owed[worker]:
            live[worker] -= 1
            run(worker, owed[worker].popleft()._replace(op=Op.W), time, _weight_s)
        elif ready is not None and ready > time:
            heappush(clock, (ready, worker))
        elif need is not None and ready is None:
            waiting[need].append(worker)
    assert not any(left), "the memory cap is below that of the order itself"
    return lists


def _need(action: Action, stages: int) -> Action | None:
    """Returns the action that must have ended: on the previous or next stage, or the stage's own forward on the last stage."""
    if action.op is Op.F:
        return action._replace(stage=action.stage - 1) if action.stage else None
    return action._replace(stage=action.stage + 1) if action.stage < stages - 1 else action._replace(op=Op.F)


def _forward_s(cost: StageCost) -> float:
    return cost.forward_s


def _input_s(cost: StageCost) -> float:
    return cost.input_s


def _weight_s(cost: StageCost) -> float:
    return cost.weight_s
