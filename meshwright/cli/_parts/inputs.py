"""Reads the inputs of verbs: sizes, options and costs from flags, and schedules by name or file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright import schedules
from meshwright.cli._parts import outputs
from meshwright.cli._parts.outputs import Format
from meshwright.errors import MeshwrightError
from meshwright.ir.byte_sizes import bytes_in
from meshwright.ir.cluster import Cluster, Duplex, Link
from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost, costs_from_json, even_costs
from meshwright.ir.timeline import Timeline

SIZES, TIMES, OUTPUT = "Sizes", "Costs", "Output"
MISFIT = "rows of costs do not divide"
"""Error text for a cost file whose number of rows does not match the stages of a schedule."""
MODEL_FORMS = "A preset, mlp, gpt, a TOML, a config.json, package.module:function"
"""The forms of MODEL; `train/models/model_names.py` resolves it for every verb."""
ENDLESS_STEPS = 4
"""Default number of steps for a schedule without a flush: enough to see more than its fill."""


def _bandwidth(text: str | float) -> float:
    """Returns bytes per second from a number or a size such as 25GB. Raises on 25Gb, which could mean bits."""
    if isinstance(text, str) and text.strip()[-2:] in ("kb", "Kb", "Mb", "Gb", "Tb"):
        raise MeshwrightError(
            f"--bandwidth {text} may mean bits; it is given in bytes per second",
            fix="--bandwidth 25GB, or 3.125GB for 25 gigabits",
        )
    size = bytes_in(text) if isinstance(text, str) else None
    try:
        return float(text) if size is None else size
    except ValueError:
        raise MeshwrightError(f"--bandwidth must be a number or a size, got {text!r}", fix="--bandwidth 25GB") from None


size_option = partial(typer.Option, rich_help_panel=SIZES)
cost_option = partial(typer.Option, rich_help_panel=TIMES)
output_option = partial(typer.Option, rich_help_panel=OUTPUT)
"""Options of the three panels that `--help` shows."""

Name = Annotated[
    str,
    typer.Argument(metavar="NAME|FILE", help="A schedule by name, a file with one (.json, .csv), or package.module:function."),
]
ScheduleChoice = Annotated[
    str | None,
    size_option(
        "--schedule",
        metavar="NAME|FILE",
        show_default="onef1b",
        help="A schedule by name, a file with one (.json, .csv), or package.module:function.",
    ),
]
Workers = Annotated[int, size_option("--workers", "-w", help="Workers of one pipeline.")]
Microbatches = Annotated[int, size_option("--microbatches", "-n", help="Microbatches per step.")]
DataMode = Annotated[
    str | None,
    size_option("--dp-mode", metavar="NAME", show_default="replicated", help="zero-1, zero-2, cyclic, ...: what copies share."),
]
Ranks = Annotated[
    str | None, size_option("--ranks", metavar="3,1,0,2", help="The rank that runs each worker; other ranks are idle.")
]
Steps = Annotated[int | None, size_option(help="Steps to run: 1, or 4 for schedules without a flush.")]
Option = Annotated[list[str] | None, size_option("--option", metavar="KEY=VALUE", help="An option of the schedule.")]
Costs = Annotated[Path | None, cost_option("--costs", help="JSON with one row of costs per stage.")]
ClusterFile = Annotated[
    Path | None,
    cost_option(
        "--cluster",
        metavar="FILE|PRESET",
        help="Devices and their links, JSON or TOML, or a preset: 8xdgx-a100; replaces --send and --bandwidth.",
    ),
]
BatchFunction = Annotated[
    str | None, typer.Option("--batch-function", metavar="package.module:function", help="batch(step), for your own model.")
]
OldBatch = Annotated[str | None, typer.Option("--batch", hidden=True)]
Plan = Annotated[
    str | None, size_option("--plan", "--parallel", metavar="PLAN", help="A plan file (.json, .toml), or JSON text.")
]
Json = Annotated[bool, output_option("--json", help="Print the numbers as one JSON object.")]


FormatChoice = Annotated[
    Format, output_option("--format", help="text, a file of JSON or CSV, a Perfetto trace, or a picture (svg; png needs -o).")
]
Output = Annotated[Path | None, output_option("--output", "-o", help="Write to a file.")]

STAGE_TIMES = ("forward", "backward", "split", "recompute", "sync_cost")
"""The fields of `CostFlags` that are times of stages."""


@dataclass(frozen=True)
class CostFlags:
    """Costs as given on the command line, a group of flags."""

    forward: Annotated[float, cost_option(help="One worker's forward per microbatch.")] = 1.0
    backward: Annotated[float, cost_option(help="One worker's backward per microbatch.")] = 2.0
    split: Annotated[str, cost_option(metavar="I:W", help="How a backward splits into its halves.")] = "1:1"
    recompute: Annotated[
        float, cost_option("--recompute-cost", help="Recompute per microbatch; above 0 every stage recomputes.")
    ] = 0.0
    old_recompute: Annotated[float | None, typer.Option("--recompute", hidden=True)] = None
    send: Annotated[float, cost_option(help="Latency of a message between two workers.")] = 0.0
    sync_cost: Annotated[float, cost_option(help="Gradient sync of one worker's parameters.")] = 0.0
    bandwidth: Annotated[
        float, cost_option(parser=_bandwidth, metavar="SIZE", help="Bytes per second of a link: 25GB; with --costs.")
    ] = float("inf")
    duplex: Annotated[Duplex, cost_option("--duplex", help="Whether both directions of a link share its bandwidth.")] = (
        Duplex.FULL
    )
    overlap: Annotated[float, cost_option(min=0, max=1, help="How much of the shorter action a cell hides.")] = 0.0
    file: Costs = None
    cluster_file: ClusterFile = None

    def __post_init__(self) -> None:
        """Raises if a file and flags that it replaces are both given."""
        if self.old_recompute is not None:
            if self.recompute:
                raise MeshwrightError("--recompute is the old name of --recompute-cost", fix="--recompute-cost alone")
            sys.stderr.write("note: --recompute is now --recompute-cost here\n")
            object.__setattr__(self, "recompute", self.old_recompute)
        self._refuse_replaced("--costs", self.file, STAGE_TIMES)
        self._refuse_replaced("--cluster", self.cluster_file, ("send", "bandwidth", "duplex"))

    def _refuse_replaced(self, flag: str, file: Path | None, names: Sequence[str]) -> None:
        if file is not None and (given := self.given(names)):
            raise MeshwrightError(f"{flag} {file} replaces {', '.join(given)}", fix="give only one of the two")

    def given(self, names: Sequence[str]) -> list[str]:
        """Returns the flags of these fields that have other values than their defaults."""
        return [_flag(name) for name in names if getattr(self, name) != getattr(type(self), name)]

    def stages(self, schedule: Schedule) -> Sequence[StageCost]:
        """Returns one row per stage of this schedule."""
        if self.file is not None:
            return costs_from_json(outputs.read(self.file))
        return self.even(stages=schedule.stages, workers=schedule.workers)

    def spread(self, schedule: Schedule) -> Sequence[StageCost]:
        """Spreads the rows of a file over the stages of this schedule. With v times as many stages, each row is split into v."""
        if self.file is None:
            return self.stages(schedule)
        rows = costs_from_json(outputs.read(self.file))
        parts, left = divmod(schedule.stages, len(rows))
        if left:
            raise MeshwrightError(f"{schedule.name} has {schedule.stages} stages, which {len(rows)} {MISFIT}")
        return tuple(row.scaled(1 / parts) for row in rows for _ in range(parts))

    @property
    def is_profiled(self) -> bool:
        """Whether stages have the costs of a profile."""
        return False

    def links(self, schedule: Schedule) -> Cluster | None:
        """Returns the links between the workers of this schedule."""
        return self.cluster

    def capacities(self, workers: int) -> tuple[float, ...] | None:
        """Returns the bytes that each worker may hold; None if they are not known."""
        return None

    def refuse(self, workers: int) -> None:
        """Raises on costs that no schedule can take."""
        self.even(stages=workers, workers=workers) if self.file is None else costs_from_json(outputs.read(self.file))

    def refuse_ring(self, ring: bool) -> None:
        """Raises if a sync cost is given for a ring, which has no collective: its sums are sent as messages."""
        if ring and self.sync_cost:
            raise MeshwrightError(
                f"--sync-cost {self.sync_cost:g} is the time of a collective, but a ring sends its sums from worker to worker",
                fix="--send, or --costs with parameter_bytes and --bandwidth",
            )

    def even(self, *, stages: int, workers: int) -> Sequence[StageCost]:
        """Returns equal stages from one worker's totals."""
        for name in ("forward", "backward", "recompute", "send", "sync_cost"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise MeshwrightError(f"{_flag(name)} must be zero or more, got {getattr(self, name)}")
        return even_costs(
            stages=stages,
            workers=workers,
            forward_s=self.forward,
            backward_s=self.backward,
            split=self._ratio(),
            recompute_s=self.recompute,
            sync_s=self.sync_cost,
        )

    @property
    def cluster(self) -> Cluster | None:
        """One kind of link between all workers; None if messages are free."""
        if self.cluster_file is not None:
            from meshwright.ir.files.cluster_file import read_cluster  # most answers need no file

            return read_cluster(self.cluster_file)
        if not self.send and self.bandwidth == float("inf"):
            return None
        if self.bandwidth <= 0:
            raise MeshwrightError(f"--bandwidth must be above zero, got {self.bandwidth}")
        return Cluster(Link(self.send, self.bandwidth), duplex=self.duplex)

    def _ratio(self) -> tuple[float, float]:
        try:
            first, second = (float(part) for part in self.split.split(":"))
        except ValueError:
            raise MeshwrightError(f"--split must be a ratio I:W, got {self.split!r}", fix="--split 1:1") from None
        if not (0 <= first < float("inf") and 0 <= second < float("inf") and first + second > 0):
            raise MeshwrightError(f"--split must be a ratio of positive numbers, got {self.split!r}", fix="--split 1:1")
        return first, second


def _flag(field: str) -> str:
    """Returns the flag name of a cost field."""
    return "--recompute-cost" if field == "recompute" else f"--{field.replace('_', '-')}"


def batch_function(name: str | None, old: str | None) -> str | None:
    """Returns --batch-function. Its old name --batch still works for a function, and will become a size."""
    if old is None:
        return name
    if name is not None or ":" not in old:
        raise MeshwrightError(f"--batch {old} is not a batch function", fix="--batch-function package.module:function")
    sys.stderr.write("note: --batch is now --batch-function; --batch will be a size\n")
    return old


def load(
    name: str,
    *,
    workers: int,
    microbatches: int,
    steps: int | None,
    option: Sequence[str] | None,
    flags: CostFlags,
    spread: bool = False,
) -> Schedule:
    """Returns a schedule from its file, or builds it by name with the given sizes and options."""
    path = Path(name)
    if path.suffix in (".json", ".csv") or os.path.isfile(path):
        if option or steps is not None:
            raise MeshwrightError(f"{name} is a schedule file: --option and --steps are for schedules by name")
        return schedules.read(path)
    chosen = pairs(option)
    if steps is None:
        steps = ENDLESS_STEPS if "steps" in schedules.parameters(name) else 1
    sizes = {"workers": workers, "microbatches": microbatches, "steps": steps}
    costs = flags.spread if spread else flags.stages
    return schedules.shaped(name, costs=costs, cluster=flags.cluster, **sizes, **chosen)


@dataclass(frozen=True)
class DegreeFlags:
    """The plan of a training run, a group of flags. `ModeFlags` has those of tensor modes."""

    pp: Annotated[int | None, size_option("--pp", help="Workers of one pipeline.")] = None
    dp: Annotated[int | None, size_option("--dp", help="Data-parallel copies.")] = None
    dp_mode: DataMode = None
    schedule: ScheduleChoice = None
    microbatches: Annotated[int | None, size_option("--microbatches", help="Microbatches per step.")] = None
    option: Option = None
    costs: Costs = None

    def plan_fields(self) -> dict[str, Any]:
        """Returns the fields of a plan; None if a flag was not given."""
        found = {**vars(self), "costs": read_costs(self.costs), "options": pairs(self.option) or None}
        return {name: value for name, value in found.items() if name != "option"}


def read_costs(path: Path | None) -> tuple[StageCost, ...] | None:
    """Reads the rows of --costs."""
    return None if path is None else costs_from_json(outputs.read(path))


def timeline_file(name: str) -> Timeline | None:
    """Returns the timeline in a file; None if the name is something else, for example a schedule."""
    path = Path(name)
    if path.suffix != ".json" or not os.path.isfile(path):
        return None
    text = outputs.read(path)
    return Timeline.from_json(text) if '"kind": "timeline"' in text[:200] else None


def rank_list(text: str | None) -> tuple[int, ...] | None:
    """Returns the numbers of --ranks."""
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise MeshwrightError(f"--ranks takes whole numbers with commas between them, got {text!r}", fix="--ranks 1,0") from None


def pairs(option: Sequence[str] | None) -> dict[str, Any]:
    """Returns `--option key=value` flags as a mapping."""
    found: dict[str, Any] = {}
    for text in option or ():
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise MeshwrightError(f"--option takes KEY=VALUE, got {text!r}", fix="--option warmup=2")
        if key in found:
            raise MeshwrightError(f"--option {key} is given twice: {found[key]} and {value}", fix="give it once")
        found[key] = value
    return found
