"""A lower bound on the makespan of any order on this placement, reported beside it.

Every worker (and every half-duplex link) is taken as one machine with heads and tails: an operation cannot start before
the longest chain of inputs in front of it, and the longest chain behind it follows. The preemptive schedule that always
runs the released operation with the longest tail is the best any order can do on that machine. On a chain of stages this
is the head, round-trip, tail bound of pipeline planning.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush

from meshwright.ir.action import Action, Cell, Op, Transfer
from meshwright.ir.cluster import Duplex
from meshwright.ir.price import Price
from meshwright.simulate.program import Message, Program

Job = tuple[float, float, float]
"""(head, length, tail)."""


def lower_bound(program: Program, price: Price) -> float:
    """The largest one-machine bound over all workers and links."""
    machine, heads, lengths, tails = _chains(program, price)
    jobs: dict[object, list[Job]] = defaultdict(list)
    for node, where in enumerate(machine):
        if where is not None:
            jobs[where].append((heads[node], lengths[node], tails[node]))
    chain = max((h + n + t for h, n, t in zip(heads, lengths, tails, strict=True)), default=0.0)
    return max([chain, *(one_machine(each) for each in jobs.values())])


def one_machine(jobs: list[Job]) -> float:
    """Jackson's preemptive rule: the makespan, tails included, that no order of these jobs beats."""
    released = sorted(jobs)
    queue: list[list[float]] = []
    time = best = 0.0
    position = 0
    while position < len(released) or queue:
        if not queue:
            time = max(time, released[position][0])
        while position < len(released) and released[position][0] <= time + 1e-12:
            _, length, tail = released[position]
            heappush(queue, [-tail, length])
            position += 1
        tail, length = -queue[0][0], queue[0][1]
        until = released[position][0] if position < len(released) else float("inf")
        run = min(length, max(until - time, 0.0))
        if run >= length:
            heappop(queue)
            time += length
            best = max(best, time + tail)
        else:
            queue[0][1] -= run
            time += run
    return best


def _chains(program: Program, price: Price) -> tuple[list[object], list[float], list[float], list[float]]:
    """For each node its machine, the longest chain of inputs before it, its length, and the longest chain after it.

    Only real dependencies count: what a value needs, never the order of a list.
    """
    flow, table = program.flow, program.table(price)
    producer: dict[tuple[int, int], int] = {}
    before: list[list[int]] = []
    machine: list[object] = []
    for places, class_ in zip(program.places, program.class_of, strict=True):
        what = program.classes[class_][1]
        node = len(before)
        needs: list[int] = []
        for worker, index in places[:1] if isinstance(what, Message) else places:
            needs += [producer[worker, v] for v in flow.reads[worker][index] if (worker, v) in producer]
        before.append(needs)
        for worker, index in places:
            for value in flow.writes[worker][index]:
                producer[worker, value] = node
        machine.append(_machine(program, what, places[0][0]))
    lengths = [table[class_][0] for class_ in program.class_of]
    latency = [table[class_][1] for class_ in program.class_of]
    heads = [0.0] * len(before)
    tails = list(latency)
    for node, needs in enumerate(before):
        heads[node] = max((heads[n] + lengths[n] + latency[n] for n in needs), default=0.0)
    for node in range(len(before) - 1, -1, -1):
        behind = lengths[node] + tails[node]
        for need in before[node]:
            tails[need] = max(tails[need], latency[need] + behind)
    return machine, heads, lengths, tails


def _machine(program: Program, what: object, worker: int) -> object | None:
    if isinstance(what, Message):
        half = program.duplex is Duplex.HALF
        return (min(what.source, what.target), max(what.source, what.target), half) if half else (what.source, what.target)
    if isinstance(what, Action) and what.op in (Op.S, Op.N):
        return None
    return worker if isinstance(what, Action | Cell) and not isinstance(what, Transfer) else None
