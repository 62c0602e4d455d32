"""`meshwright plan`: chooses a plan for a profile on a cluster, and explains it. Exit code 3 if nothing fits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli import _inputs as inputs
from meshwright.cli import _outputs as outputs
from meshwright.errors import MeshwrightError
from meshwright.ir.input_limits import file_text

if TYPE_CHECKING:
    from meshwright.ir.layer_costs import Profile
    from meshwright.ir.plan.chosen_plan import Plan

NOTHING_FITS = 3
"""The exit code if no plan fits into memory."""
DEFAULT_MICROBATCHES = 16


def plan(
    *,
    profile: Annotated[Path, typer.Option("--profile", help="What each layer costs: JSON, or a published text profile.")],
    cluster: inputs.ClusterFile = None,
    microbatches: Annotated[
        int | None, inputs.size_option("--microbatches", "-n", show_default="16", help="Microbatches per step.")
    ] = None,
    batch: Annotated[
        int | None, inputs.size_option("--batch", help="Rows per step; the rows of a microbatch are chosen.")
    ] = None,
    rows: Annotated[int | None, inputs.size_option("--rows", help="Rows of a microbatch, with --microbatches.")] = None,
    planner: Annotated[str, typer.Option("--planner", help="even, spp or search.")] = "spp",
    split_rows: Annotated[
        str | None, typer.Option("--split-rows", metavar="even|uneven|ignore", help="How devices may divide rows.")
    ] = None,
    memory_free: Annotated[bool, typer.Option("--memory-free", help="Ignore the memory of devices.")] = False,
    seconds: Annotated[float | None, typer.Option("--seconds", min=0, help="End the search after this time.")] = None,
    schedule: Annotated[str | None, typer.Option("--schedule", help="Only this schedule.")] = None,
    pp: Annotated[int | None, inputs.size_option("--pp", help="Only pipelines of so many workers.")] = None,
    dp: Annotated[int | None, inputs.size_option("--dp", help="Only so many data-parallel copies.")] = None,
    no_tensor: Annotated[bool, typer.Option("--no-tensor", help="No tensor ranks.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Also find when another plan would be better.")] = False,
    as_json: inputs.Json = False,
    output: inputs.Output = None,
) -> None:
    """Choose a plan for a model on a cluster: predict the time of a step and the memory, and say why."""
    if cluster is None:
        raise MeshwrightError("a plan needs a cluster", fix="--cluster cluster.toml")
    from meshwright import planners
    from meshwright.ir.files.cluster_file import read_cluster
    from meshwright.report.plan_text import plan_text

    outputs.refuse_output(output)
    layers, machine = _profile(profile), read_cluster(cluster)
    if microbatches is None and batch is None:
        microbatches = DEFAULT_MICROBATCHES
    try:
        found = planners.plan(
            layers,
            machine,
            microbatches=microbatches,
            batch=batch,
            rows=rows,
            planner=planner,
            split_rows=split_rows,
            memory_free=memory_free,
            schedule=schedule,
            pp=pp,
            dp=dp,
            tensor=not no_tensor,
            seconds=float("inf") if seconds is None else seconds,
            explain=explain,
        )
    except planners.NothingFitsError as error:
        if as_json:
            sys.stdout.write(json.dumps({"fits": False, "reason": error.what, "needed_bytes": error.needed_bytes}) + "\n")
        sys.stderr.write(f"error: {error}\n")
        raise typer.Exit(NOTHING_FITS) from None
    if output is not None:
        outputs.write(output, plan_file(found))
    text = json.dumps(found.to_dict()) if as_json else plan_text(found, layers, machine, file=output)
    sys.stdout.write(text + "\n")


def plan_file(found: Plan) -> str:
    """Returns what `-o` writes."""
    return json.dumps(found.to_dict())


def _profile(path: Path) -> Profile:
    from meshwright.ir.files.profile_text import profile_from_text

    text = file_text(path, "the profile", fix="a text file with one line for each operation")
    if path.suffix == ".json":
        raise MeshwrightError(f"{path} is JSON; this version reads published text profiles", fix="see the documentation of plan")
    return profile_from_text(text)
