"""`meshwright plan`: chooses a plan for a profile on a cluster, and explains it. Exit code 3 if nothing fits."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli._parts import inputs, outputs
from meshwright.errors import MeshwrightError
from meshwright.ir.input_limits import file_text

if TYPE_CHECKING:
    from meshwright.ir.cluster import Cluster
    from meshwright.ir.layer_costs import Profile

NOTHING_FITS = 3
"""The exit code if no plan fits into memory."""
DEFAULT_MICROBATCHES = 16


def plan(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help=f"{inputs.MODEL_FORMS}; or --profile.")] = None,
    *,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="What each layer costs: JSON, or a published text profile.")
    ] = None,
    length: Annotated[int | None, inputs.size_option("--length", help="Tokens per row, for MODEL.")] = None,
    precision: Annotated[str, typer.Option("--precision", help="fp32, bf16 or fp16, for MODEL.")] = "fp32",
    cluster: inputs.ClusterFile = None,
    microbatches: Annotated[
        int | None, inputs.size_option("--microbatches", "-n", show_default="16", help="Microbatches per step.")
    ] = None,
    batch: Annotated[
        int | None, inputs.size_option("--batch", help="Rows per step; the rows of a microbatch are chosen.")
    ] = None,
    rows: Annotated[int | None, inputs.size_option("--rows", help="Rows of a microbatch, with --microbatches.")] = None,
    planner: Annotated[
        str | None, typer.Option("--planner", show_default="search with --batch, else spp", help="even, spp or search.")
    ] = None,
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
    from meshwright.planners._planned_text import planned_text
    from meshwright.report.plan_text import plan_text
    from meshwright.report.prediction_log import error_band
    from meshwright.report.progress import SearchBar

    outputs.refuse_output(output)
    machine = read_cluster(cluster)
    layers = _layers(model, profile, machine, length, precision)
    if microbatches is None and batch is None:
        microbatches = DEFAULT_MICROBATCHES
    step = batch
    if microbatches is not None and batch is not None:
        rows = _rows(batch, microbatches, rows)
        batch = None
    try:
        with SearchBar(quiet=as_json) as bar:
            found = planners.plan(
                layers,
                machine,
                microbatches=microbatches,
                batch=batch,
                rows=rows,
                planner=planner or ("search" if batch is not None else "spp"),
                split_rows=split_rows,
                memory_free=memory_free,
                schedule=schedule,
                pp=pp,
                dp=dp,
                tensor=not no_tensor,
                seconds=float("inf") if seconds is None else seconds,
                explain=explain,
                progress=bar.at,
            )
    except planners.NothingFitsError as error:
        if as_json:
            sys.stdout.write(json.dumps({"fits": False, "reason": error.what, "needed_bytes": error.needed_bytes}) + "\n")
        sys.stderr.write(f"error: {error}\n")
        raise typer.Exit(NOTHING_FITS) from None
    if output is not None:
        outputs.write(output, planned_text(found, layers, machine, batch=step, error=error_band(layers.device)))
    text = json.dumps(found.to_dict()) if as_json else plan_text(found, layers, machine, file=output)
    sys.stdout.write(text + "\n")


def _rows(batch: int, microbatches: int, rows: int | None) -> int:
    """Returns the rows of a microbatch, if both the batch and the number of microbatches are given."""
    if rows is not None or batch < 1 or microbatches < 1 or batch % microbatches:
        raise MeshwrightError(
            f"--batch {batch} cannot be cut into {microbatches} microbatches of {rows or 'equal'} rows",
            fix=f"--batch {max(microbatches, 1) * (rows or 1)}",
        )
    return batch // microbatches


def _layers(model: str | None, profile: Path | None, cluster: Cluster, length: int | None, precision: str) -> Profile:
    """Returns the layers of a profile, or of a model that is profiled for this cluster."""
    if (model is None) == (profile is None):
        raise MeshwrightError(
            "a plan needs either MODEL or --profile", fix="meshwright plan gpt-small --cluster laptop --batch 32"
        )
    if profile is not None:
        return _profile(profile)
    from meshwright.train.models.named_layers import named_model
    from meshwright.train.profiling.profile_model import profile_model

    assert model is not None
    gc.enable()  # a trace leaves reference cycles
    built, example = named_model(model, length=length)
    return profile_model(built, example, cluster=cluster, precision=precision)


def _profile(path: Path) -> Profile:
    from meshwright.ir.files.profile_json import profile_from_json
    from meshwright.ir.files.profile_text import profile_from_text

    text = file_text(path, "the profile", fix="meshwright profile MODEL -o profile.json, or a published text profile")
    return profile_from_json(text) if path.suffix == ".json" else profile_from_text(text)
