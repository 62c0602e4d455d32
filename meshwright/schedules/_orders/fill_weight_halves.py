"""Fills weight halves into gaps: takes orders of F and I, and returns the same orders with every W placed.

A W is placed where its worker would idle, or where memory has no room for the next forward; oldest first. This never
deadlocks if the same orders with whole backwards keep the cap: when no W is pending, memory is that of whole backwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from meshwright.ir.action import Action, Op
from meshwright.ir.stage_cost import StageCost, rows_for

FREE = -1
"""An action that needs no other action."""


def fill(
    orders: Sequence[Sequence[Action]], *, stages: int, cap: int, costs: Sequence[StageCost] | None = None, latency_s: float = 0.0
) -> list[list[Action]]:
    """Runs the orders on a clock, with `latency_s` between workers, and places each W where nothing else can run.

    F and I have numbers, so that a large schedule needs no look-ups of actions.
    """
    costs = rows_for(costs, stages)
    numbers, needs, count = _numbered(orders, stages)
    forward_s, input_s, weight_s = ([getattr(cost, name) for cost in costs] for name in ("forward_s", "input_s", "weight_s"))
    lists: list[list[Action]] = [[] for _ in orders]
    owed: list[deque[Action]] = [deque() for _ in orders]
    at, live = [0] * len(orders), [0] * len(orders)
    end, home = [-1.0] * count, [0] * count
    waiting: dict[int, list[int]] = {}
    clock = [(0.0, worker) for worker in range(len(orders))]
    while clock:
        time, worker = heappop(clock)
        order, place = orders[worker], at[worker]
        need, ready = FREE, 0.0  # when the input of the next action is on this worker; negative if that is not known yet
        if place < len(order):
            action = order[place]
            is_forward = action.op is Op.F
            if (need := needs[worker][place]) != FREE:
                ready = end[need]
                if ready >= 0.0 and home[need] != worker:
                    ready += latency_s
            if 0.0 <= ready <= time and not (is_forward and live[worker] == cap):
                at[worker] = place + 1
                if is_forward:
                    live[worker] += 1
                else:
                    owed[worker].append(action)
                lists[worker].append(action)
                number = numbers[worker][place]
                stop = time + (forward_s if is_forward else input_s)[action.stage]
                end[number], home[number] = stop, worker
                heappush(clock, (stop, worker))
                for late in waiting.pop(number, ()):
                    heappush(clock, (stop if late == worker else stop + latency_s, late))
                continue
        if owed[worker]:
            live[worker] -= 1
            done = owed[worker].popleft()
            lists[worker].append(Action(Op.W, *done[1:]))
            heappush(clock, (time + weight_s[done.stage], worker))
        elif ready > time:
            heappush(clock, (ready, worker))
        elif ready < 0.0:
            waiting.setdefault(need, []).append(worker)
    assert all(place == len(order) for place, order in zip(at, orders, strict=True)), "the cap is below that of the order itself"
    return lists


def _numbered(orders: Sequence[Sequence[Action]], stages: int) -> tuple[list[list[int]], list[list[int]], int]:
    """Returns for each list the numbers of its actions and of what they need, and how many numbers there are.

    An F needs that of the stage before, an I that of the stage after; on the last stage its own F.
    """
    each = 2 * (1 + max((action.mb for order in orders for action in order), default=0))  # numbers of a stage
    numbers: list[list[int]] = []
    needs: list[list[int]] = []
    replicas = 1
    for order in orders:
        own, before = [], []
        for op, stage, mb, replica, _, _ in order:
            number = (replica * stages + stage) * each + 2 * mb
            if op is Op.F:
                before.append(number - each if stage else FREE)
            else:
                number += 1
                before.append(number + each if stage < stages - 1 else number - 1)
            own.append(number)
            replicas = max(replicas, replica + 1)
        numbers.append(own)
        needs.append(before)
    return numbers, needs, replicas * stages * each
