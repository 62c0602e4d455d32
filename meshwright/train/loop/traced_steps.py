"""Trace some steps of a run: their timeline, what stages cost there, and what they keep and send.

trainer.traced = Traced("trace.json")       # steps 3 to 6, after two that warm up
trainer.train()

All other steps run as they always do. In the step before the first traced one the bytes are counted, which takes a little
longer; behind the last one ranks send their times to rank 0, which writes them down.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import fmean

from torch import nn

from meshwright.errors import MeshwrightError
from meshwright.ir.action import NONE, Op, actions
from meshwright.ir.analysis.price import Price
from meshwright.ir.files.measurement import FILE, Measurement, measurement_to_json
from meshwright.ir.profile import StageCost
from meshwright.ir.schedule import Schedule
from meshwright.ir.timeline import Lane, Timeline
from meshwright.report.perfetto import to_perfetto
from meshwright.runtime.json_exchange import all_gather_json
from meshwright.runtime.stage.batch import Given, Own
from meshwright.runtime.tracing.footprint import Footprint, Totals
from meshwright.runtime.tracing.trace import Trace
from meshwright.train.session.session import Session, StepResult

WARM_UP = 2
"""Steps that are not traced: first calls allocate and choose."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Traced:
    """Which steps of a run to trace, and where their Perfetto trace goes (None: nowhere).

    Steps are counted from 1 since the run has started or gone on. A shorter run traces its last steps. The measurement itself
    is written to `measurement.json` in output_dir.
    """

    path: str | Path | None = None
    first: int = WARM_UP + 1
    steps: int = 4

    def __post_init__(self) -> None:
        for name, value in (("first", self.first), ("steps", self.steps)):
            if type(value) is not int or value < 1:
                raise MeshwrightError(f"Traced({name}=...) is a whole number of at least 1, got {value!r}", fix=f"{name}=3")


@dataclass
class Tracing:
    """A session whose steps from `first` to `last` are traced; `found` is there behind the last one, on rank 0."""

    session: Session
    trace: Trace
    first: int
    last: int
    folder: Path | None = None
    path: Path | None = None
    found: Measurement | None = None

    def __post_init__(self) -> None:
        self.trace.on, self.done, self.bytes = False, 0, Footprint()

    @classmethod
    def of(cls, wanted: Traced, session: Session, trace: Trace, steps: int, folder: Path) -> Tracing:
        """For a run of so many steps."""
        first = max(1, min(wanted.first, steps - wanted.steps + 1))
        path = None if wanted.path is None else Path(wanted.path)
        return cls(session, trace, first, min(first + wanted.steps - 1, max(steps, 1)), folder, path)

    def step(self, batch: Given | Own) -> StepResult:
        """The next step."""
        self.done += 1
        self.trace.on = self.first <= self.done <= self.last
        try:
            if self.done == max(1, self.first - 1):
                with self.bytes.watching(self.session.engine.graphs.stages):
                    result = self.session.step(batch)
            else:
                result = self.session.step(batch)
        finally:
            self.trace.on = False
        if self.done == self.last:
            self.finish()
        return result

    def finish(self) -> None:
        """Put together what all ranks have traced; all ranks call this together, where the last step has not done so."""
        traced, self.last = min(self.done, self.last) - self.first + 1, 0
        if traced < 1:
            return
        engine = self.session.engine
        whole = engine.timeline()
        self.trace.keep_last()
        one = engine.timeline()
        self.trace.clear()
        totals = _gathered(self.bytes)
        if whole is None or one is None:
            return
        costs = costs_of(whole, engine.schedule, rounds=max(1, traced - 1))
        sizes = sizes_of(totals, engine.schedule.stages, engine.settings.microbatches * engine.mesh.copies)
        weights = [_weights(self.session.layers.of_stage(stage)) for stage in range(engine.schedule.stages)]
        joined = tuple(_joined(*parts) for parts in zip(costs, sizes, weights, strict=True))
        self.found = Measurement(engine.schedule, joined, one, (self.first, self.first + traced - 1))
        if self.folder is not None:
            _written(self.folder / FILE, measurement_to_json(self.found))
        if self.path is not None:
            _written(self.path, to_perfetto(whole))


def forget(folder: Path) -> None:
    """A new run begins in a folder: what another one has measured is not its own."""
    with suppress(OSError):
        (folder / FILE).unlink()


def costs_of(timeline: Timeline, schedule: Schedule, *, rounds: int | None = None) -> tuple[StageCost, ...]:
    """The mean time of every kind of action of every stage, of a whole microbatch; a whole backward is halved.

    Later walks than the first `rounds` are left out. What an action did for a part of a microbatch's rows is scaled up.
    """
    price, times = Price(schedule, [StageCost()] * schedule.stages), defaultdict[tuple[int, Op], list[float]](list)
    end = float("inf") if rounds is None else rounds * schedule.steps * schedule.microbatches
    for span in timeline.spans:
        done = [a for a in actions(span.entry) if a.mb < end] if span.lane is Lane.COMPUTE else []
        for action in done:
            if action.mb == NONE:
                continue
            share = price.row_share(span.worker % schedule.workers, action.replica, action.stage, action.mb)
            share /= 1 if action.part == NONE else schedule.parts
            if share:
                times[action.stage, action.op].append((span.end_s - span.start_s) / len(done) / share)
    mean = {key: fmean(found) for key, found in times.items()}

    def cost(stage: int) -> StageCost:
        whole = mean.get((stage, Op.B), 0.0)
        return StageCost(
            forward_s=mean.get((stage, Op.F), 0.0),
            input_s=mean.get((stage, Op.I), whole / 2),
            weight_s=mean.get((stage, Op.W), whole / 2),
            recompute_s=mean.get((stage, Op.R), 0.0),
        )

    return tuple(cost(stage) for stage in range(schedule.stages))


def sizes_of(totals: dict[int, Totals], stages: int, microbatches: int) -> tuple[StageCost, ...]:
    """Bytes of a microbatch of every stage: what autograd keeps, what goes on, and what comes back over the same boundary."""

    def of(stage: int, name: str) -> float:
        found = totals.get(stage, Totals())
        return float(getattr(found, name)) / microbatches if found.rows else 0.0

    return tuple(
        StageCost(activation_bytes=of(stage, "kept"), output_bytes=of(stage, "output"), gradient_bytes=of(stage + 1, "gradient"))
        for stage in range(stages)
    )


def _gathered(mine: Footprint) -> dict[int, Totals]:
    """What all ranks have counted; each row passes each stage once."""
    found: dict[int, Totals] = defaultdict(Totals)
    for one in all_gather_json([[stage, *astuple(totals)] for stage, totals in mine.stages.items()]):
        for stage, *numbers in one:
            found[stage] += Totals(*numbers)
    return found


def _weights(layers: Sequence[nn.Module]) -> int:
    """The bytes of a stage's parameters; one that several stages share is there on each."""
    held = {p for layer in layers for p in layer.parameters()}
    return sum(p.numel() * p.element_size() for p in held)


def _joined(times: StageCost, sizes: StageCost, weights: int) -> StageCost:
    return StageCost(
        times.forward_s, times.input_s, times.weight_s, times.recompute_s, times.sync_s,
        sizes.activation_bytes, sizes.output_bytes, sizes.gradient_bytes, float(weights),
    )  # fmt: skip


def _written(path: Path, text: str) -> None:
    """A trace that cannot be written is no reason to end a run."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        _log.warning("cannot write %s: %s", path, error)
