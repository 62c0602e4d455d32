"""A second opinion: runs the lists of a schedule step by step with sets and dictionaries, and says whether they are legal.

It shares no code with the checker: the rule of what needs what is written again, in other words, from the design
(`oracle_rules.py`).
Two ways to run, both on lists as they stand (`cases.flat`):

    blocking(schedule)   a lowered schedule; every send, receive and collective waits for its partners in list order
    free(schedule)       a schedule without transfers; an entry runs as soon as what it needs exists anywhere

A verdict is legal or has a reason. `peaks` counts in list order how many activations a worker holds at most, and
`makespan` puts a blocking run on a clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright import Action, Cell, Cluster, Op, Schedule, StageCost, Transfer
from tests.support.oracle_rules import (
    COMPUTE,
    LASTING,
    WHOLE,
    Fact,
    Needs,
    Place,
    actions_of,
    evaluates,
    fact_of,
    holders,
    miscounted,
    team_of,
    units_of,
)


@dataclass(frozen=True)
class Verdict:
    """Legal, with the events of the run in order; or not, and why."""

    legal: bool
    why: str = ""
    events: tuple[tuple[Place, ...], ...] = ()


def blocking(schedule: Schedule) -> Verdict:
    """Run a lowered schedule with every send, receive and collective blocking."""
    if problem := miscounted(schedule):
        return Verdict(False, problem)
    events, problem = _rendezvous(schedule)
    return Verdict(False, problem) if problem else _follow(schedule, events)


def free(schedule: Schedule) -> Verdict:
    """Run lists of actions alone: messages take no place in them, syncs that are not in them come when gradients are there."""
    if problem := miscounted(schedule):
        return Verdict(False, problem)
    lists = _with_syncs(schedule)
    needs = Needs(schedule)
    there: set[Fact] = {fact for worker in range(schedule.workers) for fact in needs.at_start(worker)}
    rows: list[list[tuple[list[Fact], list[Fact]]]] = []
    for worker, entries in enumerate(lists):
        parts = [[needs.of(worker, action) for action in actions_of(entry)] for entry in entries]
        rows.append([([f for t, k, _ in part for f in t + k], [f for *_, g in part for f in g]) for part in parts])
    _route(schedule, needs, rows)
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for row, steps in enumerate(rows):
            while at[row] < len(steps) and all(fact in there for fact in steps[at[row]][0]):
                there.update(steps[at[row]][1])
                at[row] += 1
                moved = True
    stuck = [row for row, steps in enumerate(rows) if at[row] < len(steps)]
    return Verdict(False, f"lists {stuck} stop at {[at[row] for row in stuck]}") if stuck else Verdict(True)


def peaks(schedule: Schedule) -> tuple[int, ...]:
    """The most activations (parts count one each) that each worker holds: F brings one, B or W takes it away at its end."""
    found = []
    if evaluates(schedule):
        return (0,) * schedule.workers
    for entries in schedule.lists:
        now = most = 0
        for entry in entries:
            done = actions_of(entry)
            now += sum(schedule.parts if a.part == WHOLE else 1 for a in done if a.op is Op.F)
            most = max(most, now)
            now -= sum(1 for a in done if a.op is Op.B or a.op is Op.W)
        found.append(most)
    return tuple(found)


def makespan(
    schedule: Schedule, events: Sequence[tuple[Place, ...]], costs: Sequence[StageCost], cluster: Cluster | None = None
) -> float:
    """When the last thing ends: workers compute one thing at a time, links carry one message at a time."""
    needs, link = Needs(schedule), (cluster or Cluster()).link
    clock, joint = [0.0] * schedule.workers, [0.0] * schedule.workers
    wire: dict[Place, float] = defaultdict(float)
    came: dict[tuple[int, Fact], float] = {}
    last = 0.0
    for event in events:
        entry = schedule.lists[event[0][0]][event[0][1]]
        if isinstance(entry, Transfer):
            (source, _), (target, _) = event
            fact = fact_of(entry.value)
            cost = costs[entry.value.stage] if fact[0] in ("act", "grad") else StageCost()
            size = (cost.output_bytes if fact[0] == "act" else cost.gradient_bytes) / (
                1 if entry.value.part == WHOLE else schedule.parts
            )
            begin = max(clock[source], wire[source, target], came.get((source, fact), 0.0))
            wire[source, target] = begin + size / link.bytes_per_s
            end = came[target, fact] = wire[source, target] + link.latency_s
        elif isinstance(entry, Action) and entry.op in (Op.S, Op.N) and not (schedule.ring and entry.op is Op.S):
            begin = 0.0
            for worker, _ in event:
                takes, looks, _ = needs.of(worker, entry)
                begin = max([begin, clock[worker], joint[worker], *(came.get((worker, f), 0.0) for f in takes + looks)])
            end = begin + (costs[entry.stage].sync_s if entry.op is Op.S and entry.stage < len(costs) else 0.0)
            for worker, _ in event:
                joint[worker] = end
                for fact in needs.of(worker, entry)[2]:
                    came[worker, fact] = end
        else:
            worker = event[0][0]
            done = actions_of(entry)
            read = [fact for action in done for group in needs.of(worker, action)[:2] for fact in group]
            begin = max([clock[worker], *(came.get((worker, fact), 0.0) for fact in read)])
            end = clock[worker] = begin + sum(_seconds(schedule, costs, action) for action in done)
        last = max(last, end)
    return last


def _rendezvous(schedule: Schedule) -> tuple[list[tuple[Place, ...]], str]:
    """Go down all lists at once; whoever needs a partner stands still until the partner stands at the same thing."""
    lists, at, held = schedule.lists, [0] * schedule.workers, holders(schedule)
    events: list[tuple[Place, ...]] = []

    def ahead(worker: int) -> object:
        return lists[worker][at[worker]] if at[worker] < len(lists[worker]) else None

    moved = True
    while moved:
        moved = False
        for worker in range(schedule.workers):
            while (entry := ahead(worker)) is not None:
                group = [worker]
                if isinstance(entry, Transfer):
                    if ahead(entry.peer) != Transfer(not entry.sends, entry.value, worker):
                        break
                    group = [worker, entry.peer] if entry.sends else [entry.peer, worker]
                elif isinstance(entry, Action) and entry.op in (Op.S, Op.N) and not (schedule.ring and entry.op is Op.S):
                    group = held[entry.stage] if entry.op is Op.S else list(range(schedule.workers))
                    if any(ahead(member) != entry for member in group):
                        break
                events.append(tuple((member, at[member]) for member in group))
                for member in group:
                    at[member] += 1
                moved = True
    stuck = {worker: str(ahead(worker)) for worker in range(schedule.workers) if ahead(worker) is not None}
    return events, f"stuck: {stuck}" if stuck else ""


def _follow(schedule: Schedule, events: list[tuple[Place, ...]]) -> Verdict:
    """Keep book of what every worker has: all that is needed must be there, nothing may be there twice or be left over."""
    needs = Needs(schedule)
    have = [set(needs.at_start(worker)) for worker in range(schedule.workers)]
    for event in events:
        for worker, index in event:
            entry = schedule.lists[worker][index]
            takes: list[Fact] = []
            looks: list[Fact] = []
            gives: list[Fact] = []
            if isinstance(entry, Transfer):
                fact = fact_of(entry.value)
                (gives if not entry.sends else looks if fact[0] in LASTING else takes).append(fact)
            for action in actions_of(entry):
                for group, more in zip((takes, looks, gives), needs.of(worker, action), strict=True):
                    group += more
            if absent := [fact for fact in takes + looks if fact not in have[worker]]:
                return Verdict(False, f"{entry} on worker {worker} lacks {absent[0]}")
            if again := [fact for fact in gives if fact in have[worker]]:
                return Verdict(False, f"{entry} on worker {worker} makes a second {again[0]}")
            have[worker] |= set(gives)
            have[worker] -= set(takes)
    left = [(worker, fact) for worker, facts in enumerate(have) for fact in facts if fact[0] not in LASTING]
    return Verdict(False, f"left over: {left[0]}") if left else Verdict(True, events=tuple(events))


def _with_syncs(schedule: Schedule) -> list[list[Action | Cell | Transfer]]:
    """Where lists update but do not sync: the sync of a sole holder, or of a ring, behind its worker's last gradient."""
    lists: list[list[Action | Cell | Transfer]] = [list(entries) for entries in schedule.lists]
    ops = {action.op for entries in lists for entry in entries for action in actions_of(entry)}
    if Op.S in ops or Op.U not in ops:
        return lists
    for entries in lists:
        last: dict[Place, int] = {}
        for index, entry in enumerate(entries):
            for action in actions_of(entry):
                if action.op is Op.B or action.op is Op.W:
                    for unit in units_of(schedule, action.stage):
                        last[unit, action.mb // schedule.microbatches] = index
        for (unit, round_), index in sorted(last.items(), key=lambda item: -item[1]):
            entries.insert(index + 1, Action(Op.S, unit, version=round_))
    return lists


def _route(schedule: Schedule, needs: Needs, rows: list[list[tuple[list[Fact], list[Fact]]]]) -> None:
    """A channel with an order of its own is one more list: it takes an output in its turn, and the reader waits for that."""
    for channel in schedule.channels:
        row: list[tuple[list[Fact], list[Fact]]] = []
        for action in channel.producers:
            worker = team_of(schedule, action)[0]
            for fact in needs.crossing("act" if action.op is Op.F else "grad", action, worker, "out"):
                carried = ("carried", *fact)
                row.append(([fact], [carried]))
                other = channel.workers[0] if worker == channel.workers[1] else channel.workers[1]
                rows[other] = [([carried if f == fact else f for f in reads], gives) for reads, gives in rows[other]]
        rows.append(row)


def _seconds(schedule: Schedule, costs: Sequence[StageCost], action: Action) -> float:
    if action.op not in COMPUTE:
        return 0.0
    cost = costs[action.stage]
    how = schedule.recompute[action.stage] if schedule.recompute else None
    inside = how.share * cost.recompute_s if how and not how.early else 0.0
    lengths: dict[Op, Callable[[], float]] = {
        Op.F: lambda: cost.forward_s,
        Op.R: lambda: (how.share if how else 1.0) * cost.recompute_s,
        Op.B: lambda: cost.input_s + cost.weight_s + inside,
        Op.I: lambda: cost.input_s + inside,
        Op.W: lambda: cost.weight_s,
    }
    return lengths[action.op]() / (1 if action.part == WHOLE else schedule.parts)
