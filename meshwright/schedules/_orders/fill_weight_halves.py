"""Weight halves in the gaps: orders of F and I in, the same orders with every W placed out.

A W goes where its worker would idle, or where memory has no room for the next forward, oldest first. That never gets stuck
if the same orders with whole backwards keep the cap: with no W owed, memory is that of whole backwards.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from meshwright.ir.action import Action, Op
from meshwright.ir.profile import StageCost, rows_for


def fill(
    orders: Sequence[Sequence[Action]], *, stages: int, cap: int, costs: Sequence[StageCost] | None = None, latency_s: float = 0.0
) -> list[list[Action]]:
    """Run the orders on a clock, `latency_s` between workers, and put in each W where there is nothing better to do."""
    costs = rows_for(costs, stages)
    left = [deque(order) for order in orders]
    lists: list[list[Action]] = [[] for _ in orders]
    owed: list[deque[Action]] = [deque() for _ in orders]
    live = [0] * len(orders)
    end: dict[Action, tuple[float, int]] = {}
    waiting: dict[Action, list[int]] = defaultdict(list)
    clock = [(0.0, worker) for worker in range(len(orders))]

    def ready_at(need: Action | None, worker: int) -> float | None:
        """When what an action needs is on this worker; None while nobody knows."""
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
    """The action that must have ended: the stage before, or behind; at the turn the stage's own forward."""
    if action.op is Op.F:
        return action._replace(stage=action.stage - 1) if action.stage else None
    return action._replace(stage=action.stage + 1) if action.stage < stages - 1 else action._replace(op=Op.F)


def _forward_s(cost: StageCost) -> float:
    return cost.forward_s


def _input_s(cost: StageCost) -> float:
    return cost.input_s


def _weight_s(cost: StageCost) -> float:
    return cost.weight_s
