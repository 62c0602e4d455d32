"""The file form of a schedule: JSON, one text of entries per worker and segment (docs/schedule-file.md describes it).

    {"schema": 1, "kind": "schedule", "name": "onef1b", "microbatches": 2,
     "placement": [[[[0]], [[1]]]], "period": ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]}

What is left out has its default, so that short files stay short.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Action, parse
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import ChannelOrder, Lists, Recompute, Schedule

SCHEMA = 1
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
        "lowered",
    ]
)


def schedule_to_json(schedule: Schedule) -> str:
    """Write a schedule; `schedule_from_json` gives back an equal one."""
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
        "lowered": (schedule.lowered, False),
    }
    data |= {key: value for key, (value, default) in optional.items() if value != default}
    return json.dumps(data, indent=1)


def schedule_from_json(text: str) -> Schedule:
    """Read a schedule; whatever is wrong with the file is said, with the place."""
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise MeshwrightError(f"the file is not JSON: {error}", fix="meshwright show NAME --format json writes one") from error
    if not isinstance(data, Mapping) or data.get("kind") != "schedule":
        raise MeshwrightError('the file is not a schedule: it has no "kind": "schedule"', fix="see docs/schedule-file.md")
    if not isinstance(data.get("schema"), int) or data["schema"] > SCHEMA:
        raise MeshwrightError(
            f"the file has schema {data.get('schema')!r}, this version reads up to {SCHEMA}", fix="update meshwright"
        )
    if unknown := sorted(set(data) - _KEYS):
        raise MeshwrightError(f"the file has unknown keys: {', '.join(unknown)}", fix="see docs/schedule-file.md")
    read = _Reader(data)
    placement = Placement(read("placement", _teams), read("rows", _count, 0))
    workers = placement.workers
    return Schedule(
        name=read("name", _text),
        placement=placement,
        microbatches=read("microbatches", _positive),
        period=read("period", lambda value: _lists(value, workers)),
        prologue=read("prologue", lambda value: _lists(value, workers), ()),
        drain=read("drain", lambda value: _lists(value, workers), ()),
        repeats=read("repeats", _count, 1),
        options=read("options", lambda value: tuple(sorted(value.items())), ()),
        parts=read("parts", _positive, 1),
        ties=read("ties", lambda value: tuple(tuple(_count(s) for s in group) for group in value), ()),
        recompute=read("recompute", lambda value: tuple(Recompute(float(s), bool(e)) for s, e in value), None),
        turns=read("turns", lambda value: tuple((_action(a), _action(b)) for a, b in value), ()),
        channels=read("channels", lambda value: tuple(_channel(c) for c in value), ()),
        flush=read("flush", bool, True),
        ring=read("ring", bool, False),
        lowered=read("lowered", bool, False),
    )


class _Reader:
    """Reads one key after another and says which one is wrong."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    def __call__(self, key: str, convert: Callable[[Any], Any], *default: Any) -> Any:
        if key not in self.data:
            if default:
                return default[0]
            raise MeshwrightError(f"the schedule has no '{key}'", fix="see docs/schedule-file.md")
        try:
            return convert(self.data[key])
        except MeshwrightError as error:
            raise MeshwrightError(f"'{key}' of the schedule: {error.what}", fix=error.fix) from error
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            raise MeshwrightError(f"'{key}' of the schedule is malformed: {error}", fix="see docs/schedule-file.md") from error


def _texts(lists: Lists) -> list[str]:
    return [" ".join(map(str, entries)) for entries in lists]


def _lists(value: Any, workers: int) -> Lists:
    if not isinstance(value, list) or len(value) not in (0, workers):
        raise MeshwrightError(f"the placement has {workers} workers, there are {len(value)} lists")
    return tuple(tuple(parse(word) for word in _text(text).split()) for text in value)


def _teams(value: Any) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]:
    teams = tuple(tuple(tuple(tuple(_count(w) for w in t) for t in stage) for stage in copy) for copy in value)
    if not teams or not teams[0] or any(len(copy) != len(teams[0]) for copy in teams):
        raise MeshwrightError("every replica needs the same stages, at least one")
    if any(not stage or any(not team or len(set(team)) != len(team) for team in stage) for copy in teams for stage in copy):
        raise MeshwrightError("every stage needs at least one team, and a team different workers")
    return teams


def _channel(value: Any) -> ChannelOrder:
    (first, second), producers = value
    return ChannelOrder((_count(first), _count(second)), tuple(_action(word) for word in _text(producers).split()))


def _action(text: Any) -> Action:
    action = parse(_text(text))
    if not isinstance(action, Action):
        raise MeshwrightError(f"'{text}' is not a single action")
    return action


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise MeshwrightError(f"{value!r} is not a text")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1_000_000:
        raise MeshwrightError(f"{value!r} is not a count")
    return value


def _positive(value: Any) -> int:
    if _count(value) < 1:
        raise MeshwrightError(f"{value!r} is not at least 1")
    return int(value)
