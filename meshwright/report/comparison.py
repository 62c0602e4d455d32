"""Prediction against measurement: compares two timelines of one schedule by worker, op and span."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from meshwright.ir.action import Op, actions
from meshwright.ir.timeline import Lane, Span, Timeline


class Pair(NamedTuple):
    """A span that is in both timelines; the worker is the measured one."""

    worker: int
    entry: str
    predicted_start_s: float
    predicted_s: float
    measured_start_s: float
    measured_s: float

    @property
    def late_s(self) -> float:
        """How much later than predicted it ended."""
        return self.measured_start_s + self.measured_s - self.predicted_start_s - self.predicted_s


class Row(NamedTuple):
    """The mean time of one kind of action on one worker."""

    worker: int
    op: str
    spans: int
    predicted_s: float
    measured_s: float


@dataclass(frozen=True)
class Versus:
    """The difference between a run and its prediction; `unmatched` counts spans that only one of the timelines has."""

    predicted_makespan_s: float
    measured_makespan_s: float
    predicted_bubble: float
    measured_bubble: float
    rows: tuple[Row, ...]
    largest: tuple[Pair, ...]
    unmatched: int

    @property
    def ratio(self) -> float:
        """Measured over predicted makespan."""
        return self.measured_makespan_s / self.predicted_makespan_s if self.predicted_makespan_s else float("inf")

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers, ready for JSON."""
        found = asdict(self)
        found["rows"] = [row._asdict() for row in self.rows]
        found["largest"] = [{**pair._asdict(), "late_s": pair.late_s} for pair in self.largest]
        return {**found, "ratio": self.ratio}


_UNTIMED = {Op.U.value, Op.S.value, Op.G.value}
"""Kinds that take no time in the prediction. There they wait for all workers at once; a real run does not have to."""


def versus(predicted: Timeline, measured: Timeline, *, largest: int = 5) -> Versus:
    """Compares compute spans. Each data-parallel copy of the measured run is compared with the one predicted copy."""
    pairs, unmatched = _pairs(predicted, measured)
    sums: dict[tuple[int, str], list[Pair]] = defaultdict(list)
    for name, pair in pairs:
        sums[pair.worker, name].append(pair)
    rows = tuple(
        Row(worker, name, len(found), _mean([p.predicted_s for p in found]), _mean([p.measured_s for p in found]))
        for (worker, name), found in sorted(sums.items())
    )
    timed = (pair for name, pair in pairs if name not in _UNTIMED)
    worst = sorted(timed, key=lambda pair: -abs(pair.late_s))[:largest]
    return Versus(
        predicted.makespan_s,
        measured.makespan_s,
        predicted.bubble_ratio,
        measured.bubble_ratio,
        rows,
        tuple(worst),
        unmatched,
    )


def versus_text(found: Versus) -> str:
    """Returns totals, a line per kind of action, and the spans with the largest difference."""
    lines = [
        f"predicted {found.predicted_makespan_s:.6g} s   measured {found.measured_makespan_s:.6g} s   ratio {found.ratio:.4f}"
        f"   bubble {found.predicted_bubble:.2%} predicted, {found.measured_bubble:.2%} measured",
        f"{'worker':>6}  {'op':>3}  {'spans':>5}  {'predicted ms':>12}  {'measured ms':>11}  {'ratio':>6}",
    ]
    for row in found.rows:
        ratio = f"{row.measured_s / row.predicted_s:.4f}" if row.predicted_s else "-"
        times = f"{row.predicted_s * 1e3:>12.3f}  {row.measured_s * 1e3:>11.3f}"
        lines.append(f"{row.worker:>6}  {row.op:>3}  {row.spans:>5}  {times}  {ratio:>6}")
    for pair in found.largest:
        lines.append(f"worker {pair.worker} {pair.entry} ended {pair.late_s * 1e3:+.3f} ms relative to its prediction")
    if found.unmatched:
        lines.append(f"{found.unmatched} actions are in one of the timelines only")
    return "\n".join(lines)


def _pairs(predicted: Timeline, measured: Timeline) -> tuple[list[tuple[str, Pair]], int]:
    """Returns compute spans of both timelines, matched by worker and entry, each with its kind of action."""
    known: dict[tuple[int, str], Span] = {
        (span.worker, str(span.entry)): span for span in predicted.spans if span.lane is Lane.COMPUTE
    }
    pairs: list[tuple[str, Pair]] = []
    alone = 0
    seen: set[tuple[int, str]] = set()
    for span in measured.spans:
        if span.lane is not Lane.COMPUTE:
            continue
        key = span.worker % predicted.workers, str(span.entry)
        seen.add(key)
        if (model := known.get(key)) is None:
            alone += 1
            continue
        kind = "|".join(action.op.value for action in actions(span.entry))
        times = (model.start_s, model.end_s - model.start_s, span.start_s, span.end_s - span.start_s)
        pairs.append((kind, Pair(span.worker, key[1], *times)))
    return pairs, alone + len(set(known) - seen)


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)
