"""Trace some steps of a run: their timeline, the time of each stage, and the bytes that stages keep and send.

trainer.traced = Traced("trace.json")       # steps 3 to 6, after two warm-up steps
trainer.train()

All other steps run as usual. The bytes are counted in the step before the first traced step, which makes that step a little
slower. After the last traced step all ranks send their times to rank 0, which writes the files.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from math import prod
from pathlib import Path
from statistics import fmean

from meshwright.errors import MeshwrightError
from meshwright.ir.action import NONE, Op, actions
from meshwright.ir.analysis.price import Price
from meshwright.ir.files.measurement import FILE, Measurement, measurement_to_json
from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost
from meshwright.ir.timeline import Lane, Timeline
from meshwright.report.perfetto import to_perfetto
from meshwright.runtime.json_exchange import all_gather_json
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.stage.batch import Given, Own
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.tracing.footprint import Footprint, Totals
from meshwright.runtime.tracing.trace import Trace
from meshwright.train.session.segment import StepResult
from meshwright.train.session.session import Session

WARM_UP = 2
"""Steps before the first traced one. First calls allocate memory and select kernels."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Traced:
    """Which steps of a run to trace, and the file for their Perfetto trace (None writes no trace).

    Steps are counted from 1, starting when the run starts or is resumed. A run that is too short traces its last steps. The
    measurement itself is written to `measurement.json` in output_dir.
    """

    path: str | Path | None = None
    first: int = WARM_UP + 1
    steps: int = 4

    def __post_init__(self) -> None:
        for name, value in (("first", self.first), ("steps", self.steps)):
            if type(value) is not int or value < 1:
                raise MeshwrightError(f"Traced({name}=...) must be a whole number of at least 1, got {value!r}", fix=f"{name}=3")


@dataclass
class Tracing:
    """A session whose steps from `first` to `last` are traced. `found` is set on rank 0 after the last traced step."""

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
        """Chooses the traced steps of a run of `steps` steps."""
        first = max(1, min(wanted.first, steps - wanted.steps + 1))
        path = None if wanted.path is None else Path(wanted.path)
        return cls(session, trace, first, min(first + wanted.steps - 1, max(steps, 1)), folder, path)

    @property
    def counted(self) -> int:
        """The step in which bytes are counted: the one before the first traced step."""
        return max(1, self.first - 1)

    @property
    def steps_to_border(self) -> int | None:
        """The steps until the counted step starts or ends, or tracing ends. A segment must not pass this point."""
        return min((at - self.done for at in (self.counted - 1, self.counted, self.last) if at > self.done), default=None)

    def train(self, batches: Sequence[Given | Own]) -> list[StepResult]:
        """Runs the next training steps, up to a border, with tracing if they are traced steps."""
        start = self.done + 1
        self.done += len(batches)
        self.trace.on = self.first <= start <= self.last
        try:
            if start == self.counted:
                with self.bytes.watching(self.session.engine.graphs.stages):
                    results = self.session.train(batches)
            else:
                results = self.session.train(batches)
        finally:
            self.trace.on = False
        if self.done == self.last:
            self.finish()
        return results

    def finish(self) -> None:
        """Merges the traces of all ranks and writes the files. A collective call: all ranks must call it.

        The last traced step calls it. A second call does nothing.
        """
        traced, self.last = min(self.done, self.last) - self.first + 1, 0
        if traced < 1:
            return
        engine = self.session.engine
        whole = engine.timeline()
        self.trace.keep_last()
        one = engine.timeline()
        self.trace.clear()
        totals = _summed_over_seats(self.bytes, engine.mesh)
        if whole is None or one is None:
            return
        several = self.session.run.is_segmented  # the last step of a segment is like the others
        costs = costs_of(whole, engine.schedule, rounds=None if several else max(1, traced - 1))
        sizes = sizes_of(totals, engine.schedule.stages, engine.settings.microbatches * engine.mesh.copies)
        weights = [_weights(self.session.layers, stage) for stage in range(engine.schedule.stages)]
        combined = tuple(_combined(*parts) for parts in zip(costs, sizes, weights, strict=True))
        self.found = Measurement(engine.program.schedule, combined, one, (self.first, self.first + traced - 1))
        if self.folder is not None:
            _write_or_warn(self.folder / FILE, measurement_to_json(self.found))
        if self.path is not None:
            _write_or_warn(self.path, to_perfetto(whole))


def remove_measurement(folder: Path) -> None:
    """Deletes the measurement of an earlier run when a new run starts in the same folder."""
    with suppress(OSError):
        (folder / FILE).unlink()


def costs_of(timeline: Timeline, schedule: Schedule, *, rounds: int | None = None) -> tuple[StageCost, ...]:
    """Returns the mean time of each kind of action for each stage and one whole microbatch.

    The time of a full backward is split into two halves, one for inputs and one for weights. Only the first `rounds` repetitions
    of the schedule count. The time of an action on part of a microbatch's rows is scaled up to all rows.
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
    """Returns the bytes of one microbatch for each stage.

    These are the activations that autograd keeps, the output that is sent, and the gradient that is received for that output.
    """

    def of(stage: int, name: str) -> float:
        found = totals.get(stage, Totals())
        return float(getattr(found, name)) / microbatches if found.rows else 0.0

    return tuple(
        StageCost(activation_bytes=of(stage, "kept"), output_bytes=of(stage, "output"), gradient_bytes=of(stage + 1, "gradient"))
        for stage in range(stages)
    )


def _summed_over_seats(mine: Footprint, mesh: Mesh) -> dict[int, Totals]:
    """Sums the counts of coordinate 0 of all seats. Each row passes each stage on one seat, so nothing is counted twice."""
    found: dict[int, Totals] = defaultdict(Totals)
    stages = mine.stages.items() if mesh.coordinate == 0 else ()
    for one in all_gather_json([[stage, *astuple(totals)] for stage, totals in stages]):
        for stage, *numbers in one:
            found[stage] += Totals(*numbers)
    return found


def _weights(layers: Layers, stage: int) -> int:
    """Returns the bytes of a stage's parameters on one rank. A parameter that several stages share counts for each of them."""
    held = {p for layer in layers.of_stage(stage) for p in layer.parameters()}
    cuts = {} if layers.tensor is None else layers.tensor.cuts
    shapes = {p: cuts[p].part_shape if p in cuts else tuple(p.shape) for p in held}
    return sum(prod(shape) * p.element_size() for p, shape in shapes.items())


def _combined(times: StageCost, sizes: StageCost, weights: int) -> StageCost:
    return StageCost(
        times.forward_s, times.input_s, times.weight_s, times.recompute_s, times.sync_s,
        sizes.activation_bytes, sizes.output_bytes, sizes.gradient_bytes, float(weights),
    )  # fmt: skip


def _write_or_warn(path: Path, text: str) -> None:
    """Writes a file. If that fails, it logs a warning, because a missing trace is no reason to stop training."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        _log.warning("cannot write %s: %s", path, error)
