"""Reads the inputs of verbs: sizes and options from flags, and schedules by name or file."""

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
from meshwright.cli._parts.cost_flags import CostFlags, Costs, read_costs
from meshwright.cli._parts.outputs import Format
from meshwright.errors import MeshwrightError
from meshwright.ir.schedule import Schedule
from meshwright.ir.timeline import Timeline

SIZES, OUTPUT = "Sizes", "Output"
MODEL_FORMS = "A preset, mlp, gpt, a TOML, a config.json, package.module:function"
"""The forms of MODEL; `train/models/model_names.py` resolves it for every verb."""
ENDLESS_STEPS = 4
"""Default number of steps for a schedule without a flush: enough to see more than its fill."""


size_option = partial(typer.Option, rich_help_panel=SIZES)
output_option = partial(typer.Option, rich_help_panel=OUTPUT)
"""Options of the panels that `--help` shows; `cost_flags` has the third."""

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
