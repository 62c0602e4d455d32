"""When each entry runs, predicted or measured: spans on lanes, and memory over time.

There are two separate measures: the flush makespan (one synchronous step, from first start to last end) and the longest
worker span (the number that zero-bubble papers report).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import isfinite
from typing import Any, NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.ir import reader as reading
from meshwright.ir.action import COMPUTE, Action, Entry, Op, actions, parse
from meshwright.ir.reader import Reader, count, flag, number, parsed, positive, rows

SCHEMA = 1


class Lane(StrEnum):
    """The resource of a worker that a span occupies: compute, send, receive or collective.

    Examples:
        >>> from meshwright import Lane
        >>> [lane.value for lane in Lane]
        ['compute', 'send', 'receive', 'collective']
    """

    COMPUTE = "compute"
    SEND = "send"
    RECEIVE = "receive"
    COLLECTIVE = "collective"


class Span(NamedTuple):
    """An entry of a schedule with its times on one worker.

    Args:
        worker: The worker.
        lane: What it occupies there.
        entry: The action, cell or transfer.
        start_s: When it starts, in seconds.
        end_s: When it ends.

    Examples:
        >>> import meshwright as mw
        >>> schedule = mw.schedules.build("gpipe", workers=2, microbatches=1)
        >>> span = mw.simulate(schedule, mw.even_costs(stages=2, workers=2)).compute[1][0]
        >>> str(span.entry), span.start_s, span.end_s
        ('1F0', 1.0, 2.0)
    """

    worker: int
    lane: Lane
    entry: Entry
    start_s: float
    end_s: float


class Level(NamedTuple):
    """The memory of a worker from `time_s` on: bytes, and activations (1 = one worker's activations of one microbatch)."""

    time_s: float
    bytes: float
    activations: float


@dataclass(frozen=True)
class Timeline:
    """When everything happens, simulated or measured, and what each worker holds.

    Args:
        schedule: The name of the schedule.
        workers: How many workers there are.
        spans: All entries with their times.
        memory: For each worker its levels of memory over time; empty if unknown.
        parameter_copies: For each worker how many copies of its parameters it holds; empty if unknown.
        lower_bound_s: A makespan that no order can beat.
        flush: Whether a step ends before the next one begins.

    Examples:
        >>> import meshwright as mw
        >>> schedule = mw.schedules.build("onef1b", workers=4, microbatches=8)
        >>> timeline = mw.simulate(schedule, mw.even_costs(stages=4, workers=4))
        >>> timeline.makespan_s, round(timeline.bubble_ratio, 4), timeline.peak(0)
        (33.0, 0.2727, 4.0)
    """

    schedule: str
    workers: int
    spans: tuple[Span, ...]
    memory: tuple[tuple[Level, ...], ...] = ()
    parameter_copies: tuple[float, ...] = ()
    lower_bound_s: float = 0.0
    flush: bool = True

    @cached_property
    def makespan_s(self) -> float:
        """The time from zero to the end of the last span."""
        return max((span.end_s for span in self.spans), default=0.0)

    @cached_property
    def compute(self) -> tuple[tuple[Span, ...], ...]:
        """For each worker, its compute spans in order."""
        found: list[list[Span]] = [[] for _ in range(self.workers)]
        for span in self.spans:
            if span.lane is Lane.COMPUTE and _computes(span.entry):
                found[span.worker].append(span)
        return tuple(tuple(spans) for spans in found)

    def busy_s(self, worker: int, begin_s: float = 0.0, end_s: float = float("inf")) -> float:
        """Returns how long a worker computes, in a window or in total."""
        inside = [s for s in self.compute[worker] if s.start_s < end_s and s.end_s > begin_s]
        return sum([min(s.end_s, end_s) - max(s.start_s, begin_s) for s in inside])

    @property
    def bubble_ratio(self) -> float:
        """The idle share of the flush makespan; without a flush, the idle share between fill and drain."""
        begin, end = (0.0, self.makespan_s) if self.flush else self.steady
        total = (end - begin) * self.workers
        return 1.0 - sum(self.busy_s(w, begin, end) for w in range(self.workers)) / total if total > 0 else 0.0

    @property
    def span_bubble_ratio(self) -> float:
        """The idle share of the longest worker span (from a worker's first action to its last)."""
        longest = max((spans[-1].end_s - spans[0].start_s for spans in self.compute if spans), default=0.0)
        mean = sum(self.busy_s(w) for w in range(self.workers)) / self.workers
        return 1.0 - mean / longest if longest > 0 else 0.0

    @cached_property
    def steady(self) -> tuple[float, float]:
        """The window between fill and drain, or the whole timeline if they overlap.

        It starts when the last worker begins its first backward, and ends when the first worker finishes its last forward.
        """
        begin = max(self._first(spans) for spans in self.compute)
        end = min(self._last(spans) for spans in self.compute)
        return (begin, end) if begin < end else (0.0, self.makespan_s)

    def peak(self, worker: int) -> float:
        """The most activations that a worker holds at once (1 = one worker's activations of one microbatch)."""
        return max((level.activations for level in self.memory[worker]), default=0.0)

    def peak_bytes(self, worker: int) -> float:
        """The most bytes that a worker holds at once."""
        return max((level.bytes for level in self.memory[worker]), default=0.0)

    def _first(self, spans: Sequence[Span]) -> float:
        return next((s.start_s for s in spans if any(a.op in (Op.B, Op.I) for a in actions(s.entry))), 0.0)

    def _last(self, spans: Sequence[Span]) -> float:
        return next((s.end_s for s in reversed(spans) if any(a.op is Op.F for a in actions(s.entry))), self.makespan_s)

    def to_json(self) -> str:
        """Returns the file form."""
        return json.dumps(
            {
                "schema": SCHEMA,
                "kind": "timeline",
                "schedule": self.schedule,
                "workers": self.workers,
                "flush": self.flush,
                "lower_bound_s": self.lower_bound_s,
                "parameter_copies": self.parameter_copies,
                "spans": [[s.worker, s.lane.value, str(s.entry), s.start_s, s.end_s] for s in self.spans],
                "memory": self.memory,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Reads the file form."""
        read = Reader(parsed(text, "a timeline"), "a timeline", kind="timeline", schema=SCHEMA, keys=_KEYS)
        workers = read("workers", positive)

        def span(row: Any) -> Span:
            worker, lane, entry, start, end = rows(row)
            if count(worker) >= workers:
                raise MeshwrightError(f"worker {worker} does not exist, there are {workers}")
            return Span(worker, Lane(reading.text(lane)), parse(reading.text(entry)), number(start), number(end))

        def each(values: list[Any], convert: Callable[[Any], Any]) -> tuple[Any, ...]:
            if len(values) not in (0, workers):
                raise MeshwrightError(f"there are {workers} workers, but rows for {len(values)}")
            return tuple(map(convert, values))

        return cls(
            read("schedule", reading.text),
            workers,
            read("spans", lambda value: tuple(map(span, rows(value)))),
            read("memory", lambda value: each(rows(value), lambda levels: tuple(map(_level, rows(levels))))),
            read("parameter_copies", lambda value: each(rows(value), number)),
            read("lower_bound_s", number),
            read("flush", flag),
        )


_KEYS = frozenset(["schema", "kind", "schedule", "workers", "flush", "lower_bound_s", "parameter_copies", "spans", "memory"])


def _computes(entry: Entry) -> bool:
    return entry.op in COMPUTE if isinstance(entry, Action) else any(a.op in COMPUTE for a in actions(entry))


def _level(row: Any) -> Level:
    """Reads a memory level. Rounding errors can make a byte count slightly negative, so any finite number is accepted."""
    found = Level(*(float(x) for x in rows(row) if isinstance(x, int | float) and not isinstance(x, bool)))
    if not all(map(isfinite, found)):
        raise MeshwrightError(f"{row!r} is not a level of memory")
    return found
