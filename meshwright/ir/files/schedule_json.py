"""The file form of a schedule: JSON, with one text of entries per worker and segment (see docs/schedule-file.md).

    {"schema": 1, "kind": "schedule", "name": "onef1b", "microbatches": 2,
     "placement": [[[[0]], [[1]]]], "period": ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]}

Keys that are left out have their default, so that short files stay short.
"""

from __future__ import annotations

import json
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir import reader as reading
from meshwright.ir.action import Action, parse
from meshwright.ir.input_limits import shown
from meshwright.ir.placement import Placement
from meshwright.ir.reader import Reader, count, flag, number, parsed, positive, rows
from meshwright.ir.schedule import ChannelOrder, Lists, Recompute, Schedule, Sharding

SCHEMA = 1
LARGEST = 5_000_000
"""The most entries that a schedule may have: 64 workers with 4096 microbatches, lowered, have a third of it."""
_KEYS = frozenset(
    [
        "schema",
        "kind",
        "name",
        "microbatches",
        "placement",
        "rows",
        "period",
        "prologue",
        "drain",
        "repeats",
        "options",
        "parts",
        "ties",
        "recompute",
        "turns",
        "channels",
        "flush",
        "ring",
        "norm",
        "sharding",
        "first",
        "owners",
        "lowered",
    ]
)


def schedule_to_json(schedule: Schedule) -> str:
    """Write a schedule as a file that `check`, `show` and `simulate` read.

    Args:
        schedule: The schedule, lowered or not.

    Returns:
        JSON text, from which `schedule_from_json` makes an equal schedule.

    Examples:
        >>> import meshwright as mw
        >>> schedule = mw.schedules.build("chimera", workers=4, microbatches=4)
        >>> mw.schedule_from_json(mw.schedule_to_json(schedule)) == schedule
        True
    """
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "schedule",
        "name": schedule.name,
        "microbatches": schedule.microbatches,
        "placement": schedule.placement.teams,
        "period": _texts(schedule.period),
    }
    optional: dict[str, tuple[Any, Any]] = {
        "rows": (schedule.placement.rows, 0),
        "prologue": (_texts(schedule.prologue), []),
        "drain": (_texts(schedule.drain), []),
        "repeats": (schedule.repeats, 1),
        "options": (dict(schedule.options), {}),
        "parts": (schedule.parts, 1),
        "ties": (schedule.ties, ()),
        "recompute": (schedule.recompute, None),
        "turns": ([[str(a), str(b)] for a, b in schedule.turns], []),
        "channels": ([[list(c.workers), " ".join(map(str, c.producers))] for c in schedule.channels], []),
        "flush": (schedule.flush, True),
        "ring": (schedule.ring, False),
        "norm": (schedule.norm, False),
        "sharding": (schedule.sharding.value, Sharding.NONE.value),
        "first": (schedule.first, 0),
        "owners": (schedule.owners, ()),
        "lowered": (schedule.lowered, False),
    }
    data |= {key: value for key, (value, default) in optional.items() if value != default}
    return json.dumps(data, indent=1)


def schedule_from_json(text: str) -> Schedule:
    """Read a schedule.

    Args:
        text: The JSON text.

    Returns:
        The schedule. It is not proved yet; `check` does that.

    Raises:
        MeshwrightError: The text is not a schedule file; the message names the place.

    Examples:
        >>> import meshwright as mw
        >>> text = '''{"schema": 1, "kind": "schedule", "name": "mine", "microbatches": 1,
        ...   "placement": [[[[0]], [[1]]]], "period": ["0F0 0B0", "1F0 1B0"]}'''
        >>> mw.check(mw.schedule_from_json(text)).ok
        True
    """
    return schedule_from(parsed(text, "a schedule file"), "a schedule file")


def schedule_from(data: Any, what: str) -> Schedule:
    """Reads a schedule from the parsed JSON object."""
    read = Reader(data, what, kind="schedule", schema=SCHEMA, keys=_KEYS)
    placement = Placement(read("placement", _teams), read("rows", count, 0))
    workers, stages = placement.workers, placement.stages
    schedule = Schedule(
        name=read("name", reading.text),
        placement=placement,
        microbatches=read("microbatches", positive),
        period=read("period", lambda value: _lists(value, workers)),
        prologue=read("prologue", lambda value: _lists(value, workers), ()),
        drain=read("drain", lambda value: _lists(value, workers), ()),
        repeats=read("repeats", count, 1),
        options=read("options", lambda value: tuple(sorted(value.items())), ()),
        parts=read("parts", positive, 1),
        ties=read("ties", lambda value: tuple(tuple(count(s) for s in rows(group)) for group in rows(value)), ()),
        recompute=read("recompute", lambda value: _recompute(value, stages), None),
        turns=read("turns", lambda value: tuple((_action(a), _action(b)) for a, b in rows(value)), ()),
        channels=read("channels", lambda value: tuple(_channel(c) for c in rows(value)), ()),
        flush=read("flush", flag, True),
        ring=read("ring", flag, False),
        norm=read("norm", flag, False),
        sharding=read("sharding", _sharding, Sharding.NONE),
        first=read("first", count, 0),
        owners=read("owners", lambda value: tuple(count(worker) for worker in rows(value)), ()),
        lowered=read("lowered", flag, False),
    )
    _refuse_large(schedule)
    return schedule


def _refuse_large(schedule: Schedule) -> None:
    """Raises if a short file unrolls to more than fits into memory. Periods, turns, parts and workers are all unrolled."""
    once, often = (sum(map(len, lists)) for lists in ((*schedule.prologue, *schedule.drain), schedule.period))
    lists = (once + schedule.repeats * (often + len(schedule.turns))) * schedule.parts
    if (size := schedule.workers + lists + schedule.parts) > LARGEST:
        raise MeshwrightError(
            f"{schedule.name} unrolls to {size} entries ({schedule.workers} workers, {often} entries in a period, "
            f"{schedule.repeats} repeats, {schedule.parts} parts), the limit is {LARGEST}",
            fix="fewer repeats: one period describes training of any length",
        )


def _recompute(value: Any, stages: int) -> tuple[Recompute, ...] | None:
    if value is None:
        return None
    if len(rows(value)) != stages:
        raise MeshwrightError(f"there are {stages} stages, but recompute has {len(value)}")
    found = tuple(Recompute(number(share), flag(early)) for share, early in value)
    if any(how.share > 1 for how in found):
        raise MeshwrightError("a recompute share is at most 1")
    return found


def _texts(lists: Lists) -> list[str]:
    return [" ".join(map(str, entries)) for entries in lists]


def _lists(value: Any, workers: int) -> Lists:
    if len(rows(value)) not in (0, workers):
        raise MeshwrightError(f"the placement has {workers} workers, but there are {len(value)} lists")
    return tuple(tuple(parse(word) for word in reading.text(text).split()) for text in value)


def _teams(value: Any) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]:
    teams = tuple(
        tuple(tuple(tuple(count(w) for w in rows(t)) for t in rows(stage)) for stage in rows(replica)) for replica in rows(value)
    )
    if not teams or not teams[0] or any(len(replica) != len(teams[0]) for replica in teams):
        raise MeshwrightError("every replica needs the same stages, at least one")
    if any(not stage or any(not team or len(set(team)) != len(team) for team in stage) for replica in teams for stage in replica):
        raise MeshwrightError("every stage needs at least one team, and the workers of a team must differ")
    return teams


def _channel(value: Any) -> ChannelOrder:
    (first, second), producers = value
    return ChannelOrder((count(first), count(second)), tuple(_action(word) for word in reading.text(producers).split()))


def _action(text: Any) -> Action:
    action = parse(reading.text(text))
    if not isinstance(action, Action):
        raise MeshwrightError(f"'{text}' is not a single action")
    return action


def _sharding(value: Any) -> Sharding:
    if value not in list(Sharding):
        raise MeshwrightError(f"sharding must be one of {', '.join(Sharding)}, got {shown(value)}")
    return Sharding(value)
