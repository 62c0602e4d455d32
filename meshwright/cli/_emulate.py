"""`simulate --emulate`: runs the schedule on emulated devices and compares the result with the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli import _outputs as outputs
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.profile import StageCost
from meshwright.ir.schedule import Schedule
from meshwright.ir.timeline import Timeline
from meshwright.runtime.tracing.clock import Timing

if TYPE_CHECKING:
    from meshwright.runtime.emulate.emulate import Measured

PANEL = "Emulation"

Emulate = Annotated[
    Timing | None,
    typer.Option(help="Also run it, with timed waits as compute and real messages between processes.", rich_help_panel=PANEL),
]
Repeat = Annotated[int | None, typer.Option(min=1, show_default="5", help="Runs; the median counts.", rich_help_panel=PANEL)]
Transport = Annotated[
    str | None,
    typer.Option(metavar="auto|torch|shared|strict", show_default="auto", help="Transport of messages.", rich_help_panel=PANEL),
]
Limit = Annotated[
    float | None, typer.Option(show_default="60", help="Refuse to run for more seconds than this.", rich_help_panel=PANEL)
]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", help="Write prediction and measurement as one Perfetto file.", rich_help_panel=PANEL)
]


@dataclass(frozen=True)
class Wish:
    """The flags of an emulation."""

    timing: Timing
    repeat: int
    transport: str
    limit: float
    trace: Path | None

    def run(
        self, schedule: Schedule, costs: Sequence[StageCost], cluster: Cluster, overlap: float, predicted: Timeline
    ) -> Measured:
        """Run a lowered schedule on local workers."""
        total = self.repeat * predicted.makespan_s
        if not total <= self.limit:
            raise MeshwrightError(
                f"{self.repeat} runs of {predicted.makespan_s:g} s are more than {self.limit:g} s (times are in seconds)",
                fix=f"--forward 0.01 --backward 0.02, or --limit {total:g}",
            )
        try:
            from meshwright.runtime.emulate.emulate import EmulationJob, emulate
        except ImportError as error:
            raise MeshwrightError("emulated devices need torch", fix="pip install 'meshwright[torch]'") from error
        job = EmulationJob(schedule, costs, cluster, overlap, self.timing, self.transport, trace=self.trace is not None)
        [measured] = emulate([job], repeat=self.repeat)
        if self.trace is not None:
            from meshwright.report.perfetto import both_to_perfetto

            assert measured.timeline is not None
            outputs.write(self.trace, both_to_perfetto(predicted, measured.timeline))
        return measured


def wished(
    timing: Timing | None, *, repeat: int | None, transport: str | None, limit: float | None, trace: Path | None
) -> Wish | None:
    """Returns the emulation that the flags ask for, or None. Raises if its flags are given without --emulate."""
    if timing is not None:
        outputs.refuse_output(trace)
        return Wish(timing, repeat or 5, "auto" if transport is None else transport, 60.0 if limit is None else limit, trace)
    if trace is not None:
        raise MeshwrightError("--trace writes the measurement of an emulation", fix="--emulate wall")
    for flag, given in (("--repeat", repeat), ("--transport", transport), ("--limit", limit)):
        if given is not None:
            raise MeshwrightError(f"{flag} {given} needs an emulation", fix="--emulate wall")
    return None


def summary(wish: Wish, measured: Measured, predicted: Timeline) -> dict[str, Any]:
    """Returns what `--json` adds; `modelled_makespan_s` is computed from the time stamps in the messages."""
    stamped = wish.timing is Timing.STAMPED
    return {
        "measured_makespan_s": measured.makespan_s,
        "measured": {
            "timing": wish.timing.value,
            "transport": wish.transport,
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


def text(wish: Wish, measured: Measured, predicted: Timeline) -> str:
    """Returns predicted against measured for the terminal; by op if the run was traced."""
    share = ratio(measured, predicted)
    times = sorted(run.makespan_s for run in measured.runs)
    head = (
        f"emulated ({wish.timing.value}, {wish.repeat} runs): predicted {predicted.makespan_s:.6g} s   measured"
        f" {measured.makespan_s:.6g} s" + (f"   ratio {share:.4f}" if share is not None else "") + f"   runs {times[0]:.6g} to"
        f" {times[-1]:.6g} s   undisturbed {len(measured.quiet)} of {wish.repeat}"
    )
    if measured.timeline is None:
        return head
    from meshwright.report.comparison import versus, versus_text

    return head + "\n" + versus_text(versus(predicted, measured.timeline))
