"""Checks that an object is a schedule at all: counts are numbers, lists contain entries, teams contain workers.

The laws rely on this. Files are read strictly, so only schedules built in Python can fail here.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from meshwright.ir.action import Action, Cell, Kind, Op, Transfer, Value
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import ChannelOrder, Recompute, Schedule, Sharding

ACTION = (Op, int, int, int, int, int)
VALUE = (Kind, int, int, int, int, int, int)


def faults(schedule: Schedule) -> Iterator[str]:
    """Yields what is malformed. Callers stop at the first fault."""
    yield from _counts(schedule)
    yield from _teams(schedule.placement)
    yield from _lists(schedule)
    yield from _recompute(schedule)
    yield from _edges(schedule)


def _counts(schedule: Schedule) -> Iterator[str]:
    for name, least in (("microbatches", 1), ("repeats", 0), ("parts", 1), ("first", 0)):
        found = getattr(schedule, name)
        if type(found) is not int or found < least:
            yield f"{name} must be a whole number of at least {least}, got {found!r}"
    yield from _owners(schedule)
    for name in ("flush", "ring", "norm", "lowered"):
        if type(found := getattr(schedule, name)) is not bool:
            yield f"{name} must be True or False, got {found!r:.80}"


def _owners(schedule: Schedule) -> Iterator[str]:
    """Owners are one worker for each stage, in a form of schedule that hands parameters from reader to reader."""
    found = schedule.owners
    if type(found) is not tuple or not all(type(worker) is int for worker in found):
        yield f"owners must be a tuple of workers, got {found!r:.80}"
    elif found and isinstance(schedule.placement, Placement) and _tuples(schedule.placement.teams, 3):
        stages, workers = schedule.stages, schedule.workers
        if len(found) != stages or not all(0 <= worker < workers for worker in found):
            yield f"owners must name one of {workers} workers for each of {stages} stages, got {found!r:.80}"
        if schedule.parts != 1 or schedule.sharding is not Sharding.NONE or any(map(len, schedule.channels)):
            yield "a schedule with owners has no parts, no sharding and no channel orders"


def _teams(placement: object) -> Iterator[str]:
    if not isinstance(placement, Placement):
        yield f"the placement is not a Placement but {type(placement).__name__}"
        return
    replicas = placement.teams
    if type(placement.rows) is not int or placement.rows < 0:
        yield f"a microbatch has a whole number of rows, got {placement.rows!r}"
    if not _tuples(replicas, 3):
        yield "the teams of a placement are tuples of workers, by replica and stage"
        return
    if not replicas or not replicas[0] or any(len(stages) != len(replicas[0]) for stages in replicas):
        yield f"every replica needs the same stages, at least one, got {[len(stages) for stages in replicas]}"
    for replica, stages in enumerate(replicas):
        for stage, teams in enumerate(stages):
            where = f"stage {stage} of replica {replica}"
            if not teams or not all(teams):
                yield f"{where} has {'a team without workers' if teams else 'no team'}: no worker runs it"
            for team in teams:
                if not all(type(worker) is int and worker >= 0 for worker in team):
                    yield f"{where}: workers must be numbers of at least 0, got {team}"
                elif len(set(team)) != len(team):
                    yield f"{where}: the workers of a team must differ, got {team}"


def _lists(schedule: Schedule) -> Iterator[str]:
    """Each segment is a tuple with one tuple of entries per worker, or empty."""
    for name in ("prologue", "period", "drain"):
        lists = getattr(schedule, name)
        if not _tuples(lists, 1):
            yield f"the {name} must have one tuple of entries per worker, got {lists!r:.80}"
        elif len(lists) not in (0, schedule.workers):
            yield f"the placement has {schedule.workers} workers, but there are {len(lists)} lists"
        else:
            for worker, entries in enumerate(lists):
                if not _entries(entries):
                    odd = next(entry for entry in entries if not _entries((entry,)))
                    yield f"{odd!r:.80} in the {name} of worker {worker} is not an entry"


def _entries(entries: tuple[object, ...]) -> bool:
    """True if all are entries with correct field types. Checks by column, because there may be millions."""
    by_kind: dict[type, list[tuple[object, ...]]] = {Action: [], Cell: [], Transfer: []}
    if not set(map(type, entries)) <= set(by_kind):
        return False
    for entry in entries:
        by_kind[type(entry)].append(entry)  # type: ignore[arg-type]
    inside = [action for cell in by_kind[Cell] for action in cell]
    sends, values, peers = zip(*by_kind[Transfer], strict=True) if by_kind[Transfer] else ((), (), ())
    return (
        _columns([*by_kind[Action], *inside], Action, ACTION)
        and _columns(values, Value, VALUE)
        and set(map(type, sends)) <= {bool}
        and set(map(type, peers)) <= {int}
    )


def _columns(records: object, kind: type, types: tuple[type, ...]) -> bool:
    found: list[tuple[object, ...]] = list(records)  # type: ignore[call-overload]
    if not set(map(type, found)) <= {kind}:
        return False
    return all(set(map(type, column)) <= {wanted} for column, wanted in zip(zip(*found, strict=True), types, strict=False))


def _recompute(schedule: Schedule) -> Iterator[str]:
    if schedule.recompute is not None:
        yield from recompute_faults(schedule.recompute)


def recompute_faults(choice: object) -> Iterator[str]:
    """Yields what is wrong with the recompute of stages; each share must be between 0 and 1."""
    if not isinstance(choice, tuple) or not all(isinstance(how, Recompute) for how in choice):
        yield f"recompute must be a tuple of one Recompute(share, early) per stage, got {choice!r:.80}"
        return
    for stage, how in enumerate(choice):
        share = how.share
        if isinstance(share, bool) or not isinstance(share, int | float) or not isfinite(share) or not 0 <= share <= 1:
            yield f"stage {stage} recomputes a share of {share!r}, which is not between 0 and 1"


def _edges(schedule: Schedule) -> Iterator[str]:
    """Ties, turns and channels contain what their types say."""
    if not _tuples(schedule.ties, 1) or not all(type(stage) is int for group in schedule.ties for stage in group):
        yield f"ties are tuples of stages, got {schedule.ties!r:.80}"
    if not _tuples(schedule.turns, 1) or not all(len(turn) == 2 and _columns(turn, Action, ACTION) for turn in schedule.turns):
        yield f"turns are pairs of actions, got {schedule.turns!r:.80}"
    if not isinstance(schedule.channels, tuple):
        yield f"channels are ChannelOrders, got {schedule.channels!r:.80}"
        return
    for channel in schedule.channels:
        if not isinstance(channel, ChannelOrder) or not _ends(channel.workers):
            yield f"a channel joins two workers, got {channel!r:.80}"
        elif not isinstance(channel.producers, tuple) or not _columns(channel.producers, Action, ACTION):
            yield f"a channel carries the outputs of actions, got {channel.producers!r:.80}"


def _ends(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and all(type(end) is int for end in pair)


def _tuples(found: object, depth: int) -> bool:
    """True if this is a tuple of tuples, `depth` levels deep. Lists do not count, because they could change after the proof."""
    if type(found) is not tuple:
        return False
    return depth == 0 or all(_tuples(each, depth - 1) for each in found)
