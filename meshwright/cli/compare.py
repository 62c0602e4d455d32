"""`meshwright compare`: all schedules side by side for equal work."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from meshwright import schedules
from meshwright.cli._parts import cost_flags, inputs, outputs
from meshwright.cli._parts.comparison_table import ComparedSchedule, csv_of, print_table
from meshwright.cli._parts.flag_groups import with_groups
from meshwright.cli._parts.outputs import Format
from meshwright.cli._parts.tensor_comparison import TensorFlags, compare_tensor
from meshwright.errors import MeshwrightError
from meshwright.ir.action import COMPUTE, walk
from meshwright.ir.byte_sizes import bytes_in
from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost, costs_from_json
from meshwright.ir.timeline import Timeline
from meshwright.passes.check import prove
from meshwright.simulate import simulate as predict


@with_groups
def compare(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE]...", help="Schedule files (.json, .csv) or package.module:function; with --tensor MODEL."),
    ] = None,
    *,
    workers: inputs.Workers = 4,
    microbatches: inputs.Microbatches = 8,
    flags: cost_flags.CostFlags,
    shape: TensorFlags,
    profile: Annotated[
        Path | None,
        cost_flags.cost_option("--profile", help="What layers cost, cut evenly by time; replaces --costs."),
    ] = None,
    mb_rows: Annotated[int | None, inputs.size_option("--rows", help="Rows of a microbatch, for --profile.")] = None,
    memory: Annotated[
        str | None,
        inputs.size_option(
            metavar="M|80GB", help="What a worker may hold: activations of one microbatch each; with --costs, bytes."
        ),
    ] = None,
    format: inputs.FormatChoice = Format.TEXT,
    as_json: inputs.Json = False,
    output: inputs.Output = None,
) -> None:
    """All schedules for equal work, fastest first: time per step, bubble, parameter copies, peak activations, what fits.

    With --tensor: all tensor modes and boxes for one transformer layer, or for MODEL as it is captured, the fewest words
    first. Exit code 3: nothing fits.
    """
    if shape.tensor:
        sizes = (workers, microbatches, profile, mb_rows)
        if flags != cost_flags.CostFlags() or sizes != (4, 8, None, None) or format not in (Format.TEXT, Format.JSON):
            raise MeshwrightError("--tensor compares tensor modes, not schedules", fix="--tensor with its own sizes only")
        compare_tensor(shape, files or (), memory, output, as_json=as_json or format is Format.JSON)
        return
    if format in (Format.PERFETTO, Format.SVG, Format.PNG):
        raise MeshwrightError(
            f"a comparison is not drawn as {format}", fix="--format text, json or csv; simulate draws one schedule"
        )
    if profile is not None or mb_rows is not None:
        from meshwright.cli._parts.profile_costs import with_profile  # most comparisons need no profile

        flags = with_profile(flags, profile, mb_rows)
    cap = None if memory is None else _cap(memory, flags)
    capacities = flags.capacities(workers) if memory is None else None
    schedules.build("gpipe", workers=workers, microbatches=microbatches)  # raises on sizes and costs that no schedule can take
    flags.refuse(workers)
    rows = _rows(files or (), Given(flags, workers, microbatches, cap, capacities))
    if as_json or format is Format.JSON:
        answer = json.dumps({"workers": workers, "microbatches": microbatches, "rows": [asdict(r) for r in rows]})
        outputs.give(answer, output)
    elif format is Format.CSV:
        outputs.give(csv_of(rows), output)
    else:
        print_table(rows, flags, capped=cap is not None or capacities is not None, output=output)
    if not any(r.feasible for r in rows):
        raise typer.Exit(3)


def _rows(files: Sequence[str], given: Given) -> list[ComparedSchedule]:
    """Returns every schedule with its options, and those of the files; the fastest that fit come first."""
    flags, cap = given.flags, None if given.flags.file else given.memory
    sets = [(name, options) for name in schedules.names() for options in option_sets(name, cap)]
    rows = [row(name, options, given) for name, options in sets]
    own = {name: _own(name, given) for name in files}
    rows += [row_of(name, built, given) for name, built in own.items()]
    _refuse_misfit(rows, flags, given.workers)
    return sorted(rows, key=lambda r: (r.step_s is None, not r.feasible, r.step_s or 0.0, r.peak_activations or 0.0))


def _cap(text: str, flags: cost_flags.CostFlags) -> float:
    """Returns what --memory allows: a number, or a size if costs have bytes."""
    size = bytes_in(text)
    if size is not None and flags.file is None:
        raise MeshwrightError(
            f"--memory {text} is in bytes, but the size of activations is not given",
            fix="--costs FILE, or --memory 4: activations",
        )
    try:
        found = float(text) if size is None else size
    except ValueError:
        raise MeshwrightError(f"--memory must be a number or a size, got {text!r}", fix="--memory 4, or --memory 80GB") from None
    if not found >= 0:
        raise MeshwrightError(f"--memory must be zero or more, got {text}")
    return found


def _refuse_misfit(rows: list[ComparedSchedule], flags: cost_flags.CostFlags, workers: int) -> None:
    """Raises once if a cost file fits no schedule, instead of one refusal per schedule."""
    if flags.file is None or any(not r.refused for r in rows) or all(cost_flags.MISFIT not in str(r.refused) for r in rows):
        return
    given = f"{len(costs_from_json(outputs.read(flags.file)))} {cost_flags.MISFIT}"
    raise MeshwrightError(
        f"--costs {flags.file} fits no schedule: {workers} workers have {workers} stages or a multiple, which {given}",
        fix=f"one row per stage: {workers}",
    )


def option_sets(name: str, memory: float | None) -> list[dict[str, object]]:
    """Returns the options worth comparing; with a cap, also those under which the schedule respects the cap itself."""
    found = list(schedules.compared(name))
    under = schedules.capped(name)
    if memory is not None and memory >= 1 and under is not None:
        found.append({**under, "memory": int(memory)})
    return found


Builder = Callable[[int | None], Schedule]
"""Builds a schedule for a number of steps; None means its default number."""


@dataclass(frozen=True)
class Given:
    """The conditions of a comparison."""

    flags: cost_flags.CostFlags
    workers: int
    microbatches: int
    memory: float | None = None
    capacities: tuple[float, ...] | None = None
    """The bytes of each worker, if a cluster says them."""

    def fits(self, timeline: Timeline) -> bool:
        """Whether no worker holds more than it may."""
        every = range(timeline.workers)
        if self.capacities is not None:
            return all(timeline.peak_bytes(worker) <= self.capacities[worker] for worker in every)
        held = timeline.peak if self.flags.file is None else timeline.peak_bytes
        return self.memory is None or max(map(held, every)) <= self.memory + 1e-9

    def load(self, name: str, steps: int | None, option: Sequence[str] | None = None) -> Schedule:
        """Loads a schedule at these sizes."""
        workers, microbatches = self.workers, self.microbatches
        return inputs.load(
            name, workers=workers, microbatches=microbatches, steps=steps, option=option, flags=self.flags, spread=True
        )


def row(name: str, options: dict[str, object], given: Given) -> ComparedSchedule:
    """Simulates one schedule by name."""
    text = [f"{key}={value}" for key, value in options.items()]
    return row_of(" ".join([name, *text]), lambda steps: given.load(name, steps, text), given)


def _own(name: str, given: Given) -> Builder:
    """Returns a builder for a schedule from a file or a function. Raises if its sizes differ, because the work must be equal."""
    schedule, workers, microbatches = given.load(name, None), given.workers, given.microbatches
    found = schedule.microbatches * (schedule.steps if schedule.flush else 1)
    if schedule.workers != workers or microbatches % found or (schedule.flush and microbatches != found):
        sizes = f"-w {schedule.workers} -n {found}"
        raise MeshwrightError(f"{name} is for {sizes}, which is not the same work as -w {workers} -n {microbatches}", fix=sizes)
    rounds = microbatches // schedule.microbatches

    def built(steps: int | None) -> Schedule:
        if not schedule.flush and steps is not None:
            return schedule.repeated(steps * rounds)
        prove(schedule)  # a schedule that breaks a law has no time
        return schedule

    return built


def row_of(title: str, built: Builder, given: Given) -> ComparedSchedule:
    """Simulates a schedule. Without a flush, the time of a step is what one more step adds."""
    flags = given.flags

    def run(schedule: Schedule) -> Timeline:
        flags.refuse_ring(schedule.ring)
        return predict(schedule, priced(schedule, flags.spread(schedule)), flags.links(schedule), overlap=flags.overlap)

    try:
        schedule = built(None)
        timeline, costs = run(schedule), flags.spread(schedule)
        step_s = timeline.makespan_s if timeline.flush else run(built(5)).makespan_s - run(built(4)).makespan_s
    except MeshwrightError as error:
        return ComparedSchedule(title, refused=error.what)
    every = range(schedule.workers)
    peak, size = max(timeline.peak(w) for w in every), max(timeline.peak_bytes(w) for w in every)
    return ComparedSchedule(
        title,
        step_s,
        timeline.makespan_s,
        timeline.bubble_ratio,
        max(timeline.parameter_copies),
        peak,
        size,
        given.fits(timeline),
        stale=is_stale(schedule),
        recompute_priced_as_forward=priced(schedule, costs) != costs,
    )


def priced(schedule: Schedule, costs: Sequence[StageCost]) -> Sequence[StageCost]:
    """Returns costs in which every recompute of the schedule has a price: one forward if none is given."""
    chosen = schedule.recompute or ()
    if all(cost.recompute_s or not how.share for cost, how in zip(costs, chosen, strict=False)):
        return costs
    return tuple(
        replace(cost, recompute_s=cost.forward_s) if how.share and not cost.recompute_s else cost
        for cost, how in zip(costs, chosen, strict=True)
    )


def is_stale(schedule: Schedule) -> bool:
    """True if any action reads older weights than those that its gradient will update."""
    computed = (action for entries in schedule.lists for action in walk(entries) if action.op in COMPUTE)
    return any(action.version < action.mb // schedule.microbatches for action in computed)
