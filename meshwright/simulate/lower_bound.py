"""A lower bound on the makespan of any order on this placement, reported next to the makespan.

Every worker (and every link) is treated as one machine. Each operation has a head, the longest chain of inputs that must run
before it, and a tail, the longest chain that must run after it. The preemptive schedule that always runs the released operation
with the longest tail is optimal on that machine, so no order can be shorter. On a chain of stages this is the head, round-trip,
tail bound of pipeline planning.

A schedule chooses which actions it pairs in cells, so cells are first split into their actions. Overlap in a cell makes no chain
shorter, because the cell ends with its longer action. But it reduces the work of a worker, by at most half of `overlap`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from heapq import heappop, heappush

from meshwright.ir.action import Action, Cell, Entry, Transfer, actions
from meshwright.ir.analysis.order import JOINT, Flow
from meshwright.ir.analysis.price import Price
from meshwright.ir.cluster import Duplex
from meshwright.simulate.event_graph import EventGraph, Message

Job = tuple[float, float, float]
"""(head, length, tail)."""

COMPUTE = "compute"


def lower_bound(program: EventGraph, price: Price) -> float:
    """Returns the largest one-machine bound over all workers and links."""
    cells = any(isinstance(what, Cell) for _, what in program.classes)
    share = 1.0
    if cells:
        program, share = _opened(program), 1.0 - price.overlap / 2
    found = _chains(program, price)
    machines = [_machine(program, what) for _, what in program.classes]
    jobs: dict[Hashable, list[Job]] = defaultdict(list)
    for places, class_, job in zip(program.places, program.class_of, found, strict=True):
        # Nodes that take no time add no work to a machine; the longest chain already contains them.
        if job[1] and (where := machines[class_]) is not None:
            if where == COMPUTE:
                head, length, tail = job
                jobs[places[0][0]].append(job if share == 1.0 else (head, share * length, tail))
            else:
                jobs[where].append(job)
    return max([max(map(sum, found), default=0.0), *map(one_machine, jobs.values())])


def _opened(program: EventGraph) -> EventGraph:
    """Returns the same schedule with the actions of its cells one after the other."""
    schedule = program.schedule
    lists = tuple(
        tuple(e for entry in entries for e in ((entry,) if isinstance(entry, Transfer) else actions(entry)))
        for entries in schedule.lists
    )
    return EventGraph(Flow.of(schedule.with_lists(lists)), program.duplex)


def one_machine(jobs: list[Job]) -> float:
    """Jackson's preemptive rule: the makespan, tails included, that no order of these jobs can beat."""
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


def _chains(program: EventGraph, price: Price) -> list[Job]:
    """For each node, the longest chain of inputs before it, its length, and the longest chain after it.

    Only dependencies through values count, not the order of a list.
    """
    table = program.table(price)
    before = _needs(program)
    lengths = [table[class_][0] for class_ in program.class_of]
    latency = [table[class_][1] for class_ in program.class_of]
    heads: list[float] = []
    done: list[float] = []
    for node, needs in enumerate(before):
        head = max([done[n] for n in needs]) if needs else 0.0
        heads.append(head)
        done.append(head + lengths[node] + latency[node])
    tails = list(latency)
    for node in range(len(before) - 1, -1, -1):
        rest = lengths[node] + tails[node]
        for need in before[node]:
            if latency[need] + rest > tails[need]:
                tails[need] = latency[need] + rest
    return list(zip(heads, lengths, tails, strict=True))


def _needs(program: EventGraph) -> list[list[int]]:
    """For each node, the nodes that make what it reads; a message reads at its sender only."""
    flow = program.flow
    producer: list[dict[int, int]] = [{} for _ in flow.lists]
    found: list[list[int]] = []
    for node, places in enumerate(program.places):
        needs: list[int] = []
        for worker, index in places:
            made = producer[worker]
            needs += [made[value] for value in flow.reads[worker][index] if value in made]
        found.append(needs)
        for worker, index in places:
            for value in flow.writes[worker][index]:
                producer[worker][value] = node
    return found


def _machine(program: EventGraph, what: Entry | Message) -> Hashable:
    """Returns what a class of nodes occupies: a link, `COMPUTE` on its worker, or None if it needs no exclusive resource."""
    if isinstance(what, Message):
        ends = (what.source, what.target)
        return ends if program.duplex is Duplex.FULL else tuple(sorted(ends))
    return None if isinstance(what, Action) and what.op in JOINT else COMPUTE
