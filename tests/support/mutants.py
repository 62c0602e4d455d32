"""Mutants by number: a schedule of any kind with one to three things changed, drawn from a seed.

Subjects are all named schedules with their options, ties, widths, recompute and ways to sync, with and without a flush, and
random ones with teams, halves, cells and turns; as built or lowered. Most mutants are refused. One that is accepted must
run to its end and give the result of one process (`whole_numbers_run.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

from meshwright import Action, Cell, MeshwrightError, Op, Placement, Recompute, Schedule, Transfer, check, lower
from meshwright.ir.action import Entry, Kind, Value
from meshwright.passes.widen import widen
from tests.support.cases import Case, builds, flat, option_sets, schedules
from tests.support.random_schedules import random_schedule
from tests.support.whole_numbers_run import verdict

SIZES = ((2, 2), (2, 4), (3, 3), (2, 1), (4, 4), (3, 2), (1, 2))
SYNCS = ("eager", "eager", "lazy", "eager-opt", "ring")
Rows = list[list[Entry]]


@cache
def named() -> list[Case]:
    """Every schedule with every small set of options, at the smallest two sizes that it takes."""
    found = []
    for name in schedules.names():
        for chosen in option_sets(name):
            found += [case for size in SIZES if builds(case := Case(name, *size, chosen))][:2]
    return found


def subject(rng: Random) -> Schedule:
    """A legal schedule, flat, lowered or not."""
    if rng.random() < 0.35:
        schedule = random_schedule(rng, workers=4, stages=3, microbatches=3)
    else:
        case = rng.choice(named())
        schedule = case.build()
        if not schedule.flush:
            schedule = case.build(steps=rng.randint(1, 3))
        elif rng.random() < 0.15:
            schedule = schedule.repeated(2)
        schedule = flat(_dressed(rng, schedule))
    if rng.random() < 0.5:
        try:
            return flat(lower(schedule, sync=rng.choice(SYNCS)))
        except MeshwrightError:
            return schedule
    return schedule


def _dressed(rng: Random, schedule: Schedule) -> Schedule:
    """With ties, teams or recompute, where the schedule takes them."""
    if rng.random() < 0.4 and schedule.stages > 1:
        first = sorted(rng.sample(range(schedule.stages), rng.randint(2, min(3, schedule.stages))))
        schedule = replace(schedule, ties=(tuple(first),))
    if rng.random() < 0.3:
        with suppress(MeshwrightError):
            schedule = widen(schedule, [rng.randint(1, 3) for _ in range(schedule.stages)])
    if rng.random() < 0.25 and schedule.recompute is None:
        schedule = replace(schedule, recompute=tuple(Recompute(rng.choice((0.0, 1.0))) for _ in range(schedule.stages)))
    return schedule


def mutant(seed: int | str) -> Schedule:
    """The mutant of a seed."""
    rng = Random(f"mutant {seed}")
    found = subject(rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = rng.choice(CHANGES)(rng, found)
    return found


def judged(seed: int | str) -> bool:
    """Is the mutant of a seed accepted? Then it must end, and give the result of one process."""
    schedule = mutant(seed)
    result = check(schedule)
    if not result.ok:
        assert result.reason, f"{seed}: {result}"
        return False
    for lowered in _lowered(schedule, Random(f"sync {seed}")):
        wrong = verdict(lowered)
        assert not wrong, f"mutant {seed}, {schedule.name}: {wrong}\n" + drawn(schedule) + "\n" + drawn(lowered)
    return True


def _lowered(schedule: Schedule, rng: Random) -> list[Schedule]:
    """What runs: the lists as they are, or lowered as they were proved and in another way."""
    if schedule.lowered:
        return [schedule]
    found = [lower(schedule)]
    sync = rng.choice(("lazy", "ring", "ring"))
    try:
        other = lower(schedule, sync=sync)
    except MeshwrightError:
        return found
    again = check(other)
    assert again.ok, f"{schedule.name} lowered with {sync}: {again}\n{drawn(schedule)}"
    return [*found, other]


def drawn(schedule: Schedule) -> str:
    rows = "\n".join(f"  {worker}: {' '.join(map(str, row))}" for worker, row in enumerate(schedule.lists))
    more = {key: getattr(schedule, key) for key in ("placement", "microbatches", "parts", "ties", "recompute", "turns")}
    return f"{more} flush={schedule.flush} ring={schedule.ring} lowered={schedule.lowered}\n{rows}"


# -- changes


def _rows(schedule: Schedule) -> Rows:
    return [list(row) for row in schedule.lists]


def _with(schedule: Schedule, rows: Rows) -> Schedule:
    return schedule.with_lists(tuple(map(tuple, rows)))


def _place(rng: Random, rows: Rows) -> tuple[int, int]:
    worker = rng.choice([w for w, row in enumerate(rows) if row] or [0])
    return worker, rng.randrange(len(rows[worker])) if rows[worker] else 0


def drop(rng: Random, schedule: Schedule) -> Schedule:
    rows = _rows(schedule)
    worker, index = _place(rng, rows)
    entry = rows[worker].pop(index) if rows[worker] else None
    if rng.random() < 0.4:  # on all workers, or at both ends
        for other, row in enumerate(rows):
            rows[other] = [e for e in row if e != entry and not _partner(e, other, entry, worker)]
    return _with(schedule, rows)


def _partner(entry: Entry, at: int, other: Entry | None, other_at: int) -> bool:
    """Are these the two ends of one message?"""
    if not isinstance(entry, Transfer) or not isinstance(other, Transfer):
        return False
    return entry == Transfer(not other.sends, other.value, other_at) and other.peer == at


def double(rng: Random, schedule: Schedule) -> Schedule:
    rows = _rows(schedule)
    worker, index = _place(rng, rows)
    target = rng.randrange(len(rows)) if rng.random() < 0.5 else worker
    if rows[worker]:
        rows[target].insert(rng.randint(0, len(rows[target])), rows[worker][index])
    return _with(schedule, rows)


def move(rng: Random, schedule: Schedule) -> Schedule:
    rows = _rows(schedule)
    worker, index = _place(rng, rows)
    if not rows[worker]:
        return schedule
    entry = rows[worker].pop(index)
    near = max(0, index - 3), min(len(rows[worker]), index + 3)
    target = rng.randrange(len(rows)) if rng.random() < 0.1 else worker
    at = rng.randint(*near) if target == worker and rng.random() < 0.7 else rng.randint(0, len(rows[target]))
    rows[target].insert(at, entry)
    return _with(schedule, rows)


def swap(rng: Random, schedule: Schedule) -> Schedule:
    rows = _rows(schedule)
    worker, index = _place(rng, rows)
    row = rows[worker]
    if len(row) > 1:
        other = rng.randrange(len(row)) if rng.random() < 0.3 else min(index + 1, len(row) - 1)
        row[index], row[other] = row[other], row[index]
    return _with(schedule, rows)


def everywhere(rng: Random, schedule: Schedule) -> Schedule:
    """Two entries exchanged on all workers that have both: messages at both ends, collectives on all members."""
    rows = _rows(schedule)
    worker, index = _place(rng, rows)
    if len(rows[worker]) < 2:
        return schedule
    one, two = rows[worker][index], rows[worker][min(index + 1, len(rows[worker]) - 1)]
    for at, row in enumerate(rows):
        places = [[i for i, e in enumerate(row) if e == x or _partner(e, at, x, worker)] for x in (one, two)]
        if all(places):
            i, j = places[0][0], places[1][0]
            row[i], row[j] = row[j], row[i]
    return _with(schedule, rows)


def relabel(rng: Random, schedule: Schedule) -> Schedule:
    """One number of an entry, here or wherever the entry is."""
    rows = _rows(schedule)
    worker, index = _place(rng, rows)
    if not rows[worker]:
        return schedule
    old = rows[worker][index]
    new = _relabelled(rng, old)
    if rng.random() < 0.5:
        rows[worker][index] = new
    else:
        rows = [[new if entry == old else entry for entry in row] for row in rows]
    return _with(schedule, rows)


def _relabelled(rng: Random, entry: Entry) -> Entry:
    if isinstance(entry, Cell):
        return Cell(*(action if rng.random() < 0.5 else _action(rng, action) for action in entry))
    if isinstance(entry, Action):
        return _action(rng, entry)
    value, what = entry.value, rng.choice(("peer", "stage", "mb", "piece", "part", "kind", "version"))
    if what == "peer":
        return entry._replace(peer=rng.randrange(4))
    change: dict[str, Any] = {what: rng.choice(list(Kind)) if what == "kind" else rng.randint(-1, 2)}
    return entry._replace(value=value._replace(**change))


def _action(rng: Random, action: Action) -> Action:
    what = rng.choice(("op", "stage", "mb", "replica", "version", "version", "version", "part"))
    change: dict[str, Any] = {what: rng.choice(list(Op)) if what == "op" else rng.randint(-1 if what == "part" else 0, 2)}
    return action._replace(**change)


def restage(rng: Random, schedule: Schedule) -> Schedule:
    """Another version for all that reads one, or for all of a microbatch on a stage."""
    version, mb, stage = rng.randint(0, 2), rng.randint(0, 3), rng.randrange(schedule.stages)

    def other(action: Action) -> Action:
        mine = action.mb == mb and (action.stage == stage or rng_all)
        return action._replace(version=version) if mine else action

    rng_all = rng.random() < 0.3
    rows = [[_mapped(entry, other) for entry in row] for row in schedule.lists]
    return _with(schedule, rows)


def _mapped(entry: Entry, change: Callable[[Action], Action]) -> Entry:
    if isinstance(entry, Transfer):
        return entry
    return change(entry) if isinstance(entry, Action) else Cell(*map(change, entry))


def message(rng: Random, schedule: Schedule) -> Schedule:
    """A message of any kind more, at both ends; there and back, or over a third worker."""
    rows = _rows(schedule)
    if len(rows) < 2:
        return schedule
    source, target = rng.sample(range(len(rows)), 2)
    known = [e.value for row in rows for e in row if isinstance(e, Transfer)]
    value = Value(rng.choice(list(Kind)), rng.randrange(schedule.units), rng.randint(-1, 2), piece=rng.randint(-1, 2))
    value = rng.choice(known) if known and rng.random() < 0.5 else value
    way = rng.choice(([source, target], [source, target, source]))
    at = [rng.randint(0, len(row)) for row in rows]
    for a, b in pairwise(way):
        rows[a].insert(at[a], Transfer(True, value, b))
        rows[b].insert(at[b], Transfer(False, value, a))
        at[a], at[b] = at[a] + 1, at[b] + 1
    return _with(schedule, rows)


def detour(rng: Random, schedule: Schedule) -> Schedule:
    """A message that goes over a third worker."""
    rows = _rows(schedule)
    sends = [(w, i) for w, row in enumerate(rows) for i, e in enumerate(row) if isinstance(e, Transfer) and e.sends]
    if len(rows) < 3 or not sends:
        return message(rng, schedule)
    worker, index = rng.choice(sends)
    entry = rows[worker][index]
    assert isinstance(entry, Transfer)
    third = rng.choice([w for w in range(len(rows)) if w not in (worker, entry.peer)])
    back = Transfer(False, entry.value, worker)
    if entry.peer >= len(rows) or back not in rows[entry.peer]:
        return schedule
    rows[worker][index] = entry._replace(peer=third)
    rows[entry.peer][rows[entry.peer].index(back)] = Transfer(False, entry.value, third)
    at = rng.randint(0, len(rows[third]))
    rows[third][at:at] = [Transfer(False, entry.value, worker), Transfer(True, entry.value, entry.peer)]
    return _with(schedule, rows)


def placed(rng: Random, schedule: Schedule) -> Schedule:
    """Syncs, reductions or updates put into the lists by hand, on all who hold a unit or on some."""
    rows = _rows(schedule)
    ops = rng.choice(((Op.S,), (Op.U,), (Op.S, Op.U), (Op.N,), (Op.S, Op.N, Op.U), (Op.N, Op.U)))
    units = range(schedule.stages if rng.random() < 0.5 else schedule.units)
    for round_ in range(schedule.steps):
        for op in ops:
            for unit in (-1,) if op is Op.N else units:
                for worker, row in enumerate(rows):
                    if (op is Op.N or worker in schedule.holders[unit]) and rng.random() < 0.99:
                        action = Action(op, unit, version=round_)
                        if action not in row:
                            row.append(action)
    return _with(schedule, rows)


def flag(rng: Random, schedule: Schedule) -> Schedule:
    """Something that is said of the schedule as a whole."""
    some = tuple(sorted(rng.sample(range(schedule.stages), min(2, schedule.stages))))
    changes: list[dict[str, Any]] = [
        {"ring": not schedule.ring},
        {"flush": not schedule.flush},
        {"norm": not schedule.norm},
        {"parts": 3 - min(schedule.parts, 2)},
        {"ties": () if schedule.ties else (some,)},
        {"ties": (*schedule.ties, some)},
        {"microbatches": rng.randint(1, 4)},
        {"placement": Placement(schedule.placement.teams, rng.randint(0, 4))},
        {"recompute": tuple(Recompute(1.0, early=rng.random() < 0.5) for _ in range(schedule.stages))},
        {"turns": ()},
    ]
    return replace(schedule, **rng.choice(changes))


def handover(rng: Random, schedule: Schedule) -> Schedule:
    """A stage with another team."""
    copies = [[[list(team) for team in teams] for teams in copy] for copy in schedule.placement.teams]
    teams = rng.choice(rng.choice(copies))
    rng.choice(teams)[:] = rng.sample(range(schedule.workers), rng.randint(1, min(2, schedule.workers)))
    found = Placement(tuple(tuple(tuple(map(tuple, teams)) for teams in copy) for copy in copies), schedule.placement.rows)
    return replace(schedule, placement=found) if found.workers == schedule.workers else schedule


CHANGES: list[Callable[[Random, Schedule], Schedule]] = [
    drop, double, move, move, move, swap, swap, everywhere, relabel, relabel, restage, message, detour, placed, placed, flag,
    handover,
]  # fmt: skip
