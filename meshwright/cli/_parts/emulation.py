"""`simulate --emulate`: runs the schedule on emulated devices and compares the result with the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli._parts import outputs
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost
from meshwright.ir.timeline import Timeline
from meshwright.runtime.tracing.clock import Timing

if TYPE_CHECKING:
    from meshwright.runtime.emulate.emulate import Measured

_option = partial(typer.Option, rich_help_panel="Emulation")


@dataclass(frozen=True)
class Emulation:
    """The flags of an emulation. They raise if no emulation is requested."""

    emulate: Annotated[
        Timing | None, _option(help="Also run it, with timed waits as compute and real messages between processes.")
    ] = None
    repeat: Annotated[int | None, _option(min=1, show_default="5", help="Runs; the median counts.")] = None
    transport: Annotated[
        str | None, _option(metavar="auto|torch|shared|strict", show_default="auto", help="Transport of messages.")
    ] = None
    limit: Annotated[float | None, _option(show_default="60", help="Longest time of all runs together, in seconds.")] = None
    trace: Annotated[Path | None, _option(help="Write prediction and measurement as one Perfetto file.")] = None

    def __post_init__(self) -> None:
        if self.emulate is not None:
            outputs.refuse_output(self.trace)
            return
        if self.trace is not None:
            raise MeshwrightError("--trace needs an emulation, whose measurement it writes", fix="--emulate wall")
        for name in ("repeat", "transport", "limit"):
            if (given := getattr(self, name)) is not None:
                raise MeshwrightError(f"--{name} {given} needs an emulation", fix="--emulate wall")

    @property
    def runs(self) -> int:
        """The number of runs."""
        return self.repeat or 5

    @property
    def carrier(self) -> str:
        """The name of the transport."""
        return "auto" if self.transport is None else self.transport

    def run(
        self,
        schedule: Schedule,
        costs: Sequence[StageCost],
        cluster: Cluster,
        overlap: float,
        predicted: Timeline,
        ranks: tuple[int, ...] = (),
    ) -> Measured:
        """Run a lowered schedule on local workers; worker w is rank `ranks[w]`."""
        shorter = "" if ranks else "--forward 0.01 --backward 0.02, or "  # a plan has times of its own
        total, limit = self.runs * predicted.makespan_s, 60.0 if self.limit is None else self.limit
        if not total <= limit:
            raise MeshwrightError(
                f"{self.runs} runs of {predicted.makespan_s:g} s are more than {limit:g} s (times are in seconds)",
                fix=f"{shorter}--limit {total:g}",
            )
        try:
            from meshwright.runtime.emulate.emulate import EmulationJob, emulate
        except ImportError as error:
            raise MeshwrightError("emulated devices need torch", fix="pip install 'meshwright[torch]'") from error
        job = EmulationJob(
            schedule,
            costs,
            cluster,
            overlap,
            self.emulate or Timing.WALL,
            self.carrier,
            trace=self.trace is not None,
            ranks=ranks,
        )
        [measured] = emulate([job], repeat=self.runs)
        if self.trace is not None:
            from meshwright.report.perfetto import both_to_perfetto

            assert measured.timeline is not None
            outputs.write(self.trace, both_to_perfetto(predicted, measured.timeline))
        return measured


def summary(wish: Emulation, measured: Measured, predicted: Timeline) -> dict[str, Any]:
    """Returns what `--json` adds; `modelled_makespan_s` is computed from the time stamps in the messages."""
    stamped = wish.emulate is Timing.STAMPED
    return {
        "measured_makespan_s": measured.makespan_s,
        "measured": {
            "timing": wish.emulate,
            "transport": wish.carrier,
            "runs": [run.makespan_s for run in measured.runs],
            "ratio_to_predicted": ratio(measured, predicted),
            "modelled_makespan_s": measured.runs[-1].modelled_s if stamped else None,
            "quiet_runs": len(measured.quiet),
            "foreign_cpu_ratio": [round(run.foreign_ratio, 3) for run in measured.runs],
            "cpu_s": [run.cpu_s for run in measured.runs],
        },
    }


def ratio(measured: Measured, predicted: Timeline) -> float | None:
    """Returns measured over predicted makespan; None if the prediction is zero."""
    return measured.makespan_s / predicted.makespan_s if predicted.makespan_s else None


def text(wish: Emulation, measured: Measured, predicted: Timeline) -> str:
    """Returns predicted against measured for the terminal; by op if the run was traced."""
    share = ratio(measured, predicted)
    times = sorted(run.makespan_s for run in measured.runs)
    head = (
        f"emulated ({wish.emulate}, {wish.runs} runs): predicted {predicted.makespan_s:.6g} s   measured"
        f" {measured.makespan_s:.6g} s" + (f"   ratio {share:.4f}" if share is not None else "") + f"   runs {times[0]:.6g} to"
        f" {times[-1]:.6g} s   undisturbed {len(measured.quiet)} of {wish.runs}"
    )
    if measured.timeline is None:
        return head
    from meshwright.report.comparison import versus, versus_text

    return head + "\n" + versus_text(versus(predicted, measured.timeline))
