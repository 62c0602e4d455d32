"""The reduction law: every weight gradient enters exactly one reduction over all contributors, and all holders get the sum.

`reduced` follows the gradients through a run of one data-parallel copy: through collectives, along rings, into the updates.
`group_faults` checks the groups of ranks (`ir/analysis/reduction_groups.py`) that sum over all data-parallel copies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from meshwright.ir.action import Action, Kind, Op
from meshwright.ir.analysis.effects import rings
from meshwright.ir.analysis.order import Flow, Place
from meshwright.ir.analysis.reduction_groups import Groups, holders, siblings
from meshwright.ir.schedule import Schedule
from meshwright.passes.round_laws import contributions
from meshwright.passes.violation import Law, Violation, broken

_ENDS = (Op.S, Op.U)


def reduced(flow: Flow, events: Iterable[tuple[Place, ...]]) -> Iterator[Violation]:
    """Every update reads the sum of all weight gradients of its unit and round, each added once."""
    count, lists = flow.schedule.microbatches, flow.lists
    wanted: dict[tuple[int, int], set[int]] = defaultdict(set)
    for number, value in [(n, v) for n, v in enumerate(flow.values) if v[0] is Kind.WGRAD]:
        wanted[value.stage, value.mb // count].add(number)
    inside: dict[int, set[int]] = {}
    for event in events:
        worker, index = event[0]
        entry = lists[worker][index]
        if type(entry) is not Action or entry[0] not in _ENDS:
            continue
        if entry.op is Op.S:
            yield from _add(flow, event, entry, inside)
        else:
            sums = [inside.get(n, set()) for n in flow.reads[worker][index] if flow.values[n].kind is Kind.SUM]
            found = set().union(*sums)
            if odd := sorted(wanted[entry.stage, entry.version] ^ found):
                how = "without" if odd[0] in wanted[entry.stage, entry.version] else "with"
                reason = f"updates with a sum {how} {flow.values[odd[0]]}; {len(odd) - 1} more are wrong"
                yield Violation(Law.REDUCTION, worker, index, entry, reason)


def _add(flow: Flow, event: tuple[Place, ...], entry: Action, inside: dict[int, set[int]]) -> Iterator[Violation]:
    """Adds the gradients of all workers that issue a sync together, and the partial sum of a ring."""
    total: set[int] = set()
    for worker, index in event:
        for number in flow.reads[worker][index]:
            kind = flow.values[number].kind
            more = {number} if kind is Kind.WGRAD else inside.get(number, set()) if kind is Kind.PARTIAL else set()
            if twice := total & more:
                reason = f"adds {flow.values[min(twice)]} a second time"
                yield Violation(Law.REDUCTION, worker, index, entry, reason)
            total |= more
    for worker, index in event:
        for number in flow.writes[worker][index]:
            if flow.values[number].kind in (Kind.SUM, Kind.PARTIAL):
                inside[number] = total


def group_faults(schedule: Schedule, copies: int, groups: Groups) -> Iterator[str]:
    """Yields what is wrong with the groups: a contributor or a holder that is missing, or a rank that is counted twice."""
    if schedule.forward_only:
        return
    adds = contributions(schedule)
    closing = {(unit, ring[-1]) for (unit, _), ring in rings(schedule).items()} if schedule.ring else set()
    for unit in range(schedule.units):
        of_unit = groups[unit] if unit < len(groups) else ()
        for rank, times in Counter(rank for ranks in of_unit for rank in ranks).items():
            if times > 1:
                yield f"the gradient of unit {unit} on rank {rank} is added {times} times"
        if schedule.ring:
            needed = [siblings(schedule, copies, worker) for u, worker in sorted(closing) if u == unit]
        else:
            needed = [holders(schedule, copies, unit)]
        for ranks in needed:
            found = next((group for group in of_unit if set(group) & set(ranks)), ())
            yield from _unequal(schedule, unit, set(ranks), set(found), {w for w, u, _ in adds if u == unit})
        if more := sorted({rank for group in of_unit for rank in group} - {rank for ranks in needed for rank in ranks}):
            yield f"rank {more[0]} is in a group of unit {unit} but does not belong there"


def _unequal(schedule: Schedule, unit: int, wanted: set[int], found: set[int], adding: set[int]) -> Iterator[str]:
    for rank in sorted(wanted - found):
        role = "adds to" if rank % schedule.workers in adding else "holds"
        yield f"rank {rank} {role} unit {unit} but is missing in its group {tuple(sorted(found))}"


def refuse_groups(schedule: Schedule, copies: int, groups: Groups) -> None:
    """Raises on the first fault of the groups that a run is about to create."""
    for fault in group_faults(schedule, copies, groups):
        raise broken(schedule, Law.REDUCTION.value, None, None, fault)
