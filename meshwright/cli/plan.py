"""`meshwright plan`: chooses a plan for a profile on a cluster, and explains it. Exit code 3 if nothing fits."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli._parts import cost_flags, inputs, outputs
from meshwright.errors import MeshwrightError

if TYPE_CHECKING:
    from meshwright.ir.cluster import Cluster
    from meshwright.planners import NothingFitsError
    from meshwright.planners._limits import Refusal

NOTHING_FITS = 3
"""The exit code if no plan fits into memory."""
DEFAULT_MICROBATCHES = 16
EXPLAIN_S = 5.0
"""How long other answers are looked for if nothing else is asked for."""


def plan(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help=f"{inputs.MODEL_FORMS}; or --profile.")] = None,
    *,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="What each layer costs: JSON, or a published text profile.")
    ] = None,
    length: Annotated[int | None, inputs.size_option("--length", help="Tokens per row, for MODEL.")] = None,
    batch_function: inputs.BatchFunction = None,
    precision: Annotated[
        str | None, typer.Option("--precision", show_default="fp32", help="fp32, bf16 or fp16, for MODEL.")
    ] = None,
    cluster: cost_flags.ClusterFile = None,
    microbatches: Annotated[
        int | None, inputs.size_option("--microbatches", "-n", show_default="16", help="Microbatches per step.")
    ] = None,
    batch: Annotated[
        int | None, inputs.size_option("--batch", help="Rows per step; the rows of a microbatch are chosen.")
    ] = None,
    rows: Annotated[int | None, inputs.size_option("--rows", help="Rows of a microbatch.")] = None,
    planner: Annotated[
        str | None,
        typer.Option(
            "--planner", show_default="search, or spp for --microbatches without flags of a search", help="even, spp or search."
        ),
    ] = None,
    split_rows: Annotated[
        str | None, typer.Option("--split-rows", metavar="even|uneven|ignore", help="How devices may divide rows.")
    ] = None,
    memory_free: Annotated[bool, typer.Option("--memory-free", help="Ignore the memory of devices.")] = False,
    seconds: Annotated[float | None, typer.Option("--seconds", min=0, help="End the search after this time.")] = None,
    schedule: Annotated[str | None, typer.Option("--schedule", help="Only this schedule.")] = None,
    pp: Annotated[int | None, inputs.size_option("--pp", help="Only pipelines with this number of workers.")] = None,
    dp: Annotated[int | None, inputs.size_option("--dp", help="Only this number of data-parallel copies.")] = None,
    no_tensor: Annotated[bool, typer.Option("--no-tensor", help="No tensor ranks.")] = False,
    no_zero: Annotated[bool, typer.Option("--no-zero", help="Copies do not divide optimizer state or parameters.")] = False,
    explain: Annotated[
        bool | None,
        typer.Option(
            "--explain/--no-explain", show_default="5 s, not with --json", help="Find when another plan would be better."
        ),
    ] = None,
    as_json: inputs.Json = False,
    output: inputs.Output = None,
) -> None:
    """Choose a plan for a model on a cluster: predict the time of a step and the memory, and say why.

    Exit code 0: a plan was found. 2: the request contradicts itself, the cluster or the model. 3: nothing fits into memory.
    """
    if cluster is None:
        raise MeshwrightError("a plan needs a cluster", fix="--cluster cluster.toml")
    from meshwright import planners
    from meshwright.cli._parts.next_commands import Planned, next_commands
    from meshwright.cli._parts.request_layers import request_layers
    from meshwright.ir.files.cluster_file import read_cluster
    from meshwright.planners._planned_text import planned_text
    from meshwright.report.plan_text import plan_text
    from meshwright.report.prediction_log import with_earlier_errors
    from meshwright.report.progress import SearchBar

    outputs.refuse_output(output)
    machine = read_cluster(cluster)
    if microbatches is None and batch is None:
        microbatches = DEFAULT_MICROBATCHES
    step, rows_given = batch, rows is not None
    if microbatches is not None and batch is not None:
        rows, batch = _rows(batch, microbatches, rows), None
    searched = step is not None or any((schedule, pp, dp, no_tensor, no_zero, seconds is not None, explain))
    planner, usual_s = _usual_answer(planner, searched, as_json=as_json)
    asked: dict[str, Any] = {
        "microbatches": microbatches,
        "batch": batch,
        "rows": rows,
        "split_rows": split_rows,
        "schedule": schedule,
        "pp": pp,
        "dp": dp,
        "seconds": float("inf") if seconds is None else seconds,
    }
    try:
        source = (model, length, batch_function, precision)
        layers, refusal = request_layers(profile, *source, machine, str(cluster), planner, asked)
        with SearchBar(quiet=as_json) as bar:
            found = planners.plan(
                layers,
                machine,
                planner=planner,
                memory_free=memory_free,
                tensor=not no_tensor,
                zero=not no_zero,
                **asked,
                explain=usual_s if explain is None else explain,
                refusal=refusal,
                progress=bar.at,
            )
    except MeshwrightError as error:
        raise _in_flags(error, step, microbatches, rows_given=rows_given, as_json=as_json) from None
    found = with_earlier_errors(replace(found, notes=(*found.notes, _about(cluster, machine))), layers.device)
    if layers.rows and step is None and microbatches is not None and rows is not None:
        step = microbatches * rows
    if output is not None:
        outputs.write(output, planned_text(found, layers, machine, batch=step))
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict()) + "\n")
        return
    data = _dataset(model, refusal)
    made_for = (length, layers.precision, step)
    planned = Planned(found, machine, str(cluster), model, batch_function, *made_for, output, data, lambda: _draws(refusal))
    sys.stdout.write(plan_text(found, layers, machine, steps=list(next_commands(context, planned))) + "\n")


def _usual_answer(planner: str | None, searched: bool, *, as_json: bool) -> tuple[str, float]:
    """Returns the planner, and for how many seconds it looks when another plan would be better, if that is not said."""
    planner = planner or ("search" if searched else "spp")
    return planner, EXPLAIN_S if planner == "search" and not as_json else 0.0


def _in_flags(
    error: MeshwrightError, batch: int | None, microbatches: int | None, *, rows_given: bool, as_json: bool
) -> Exception:
    """Returns what to raise: the error in the flags of the request, or the exit after what would fit is printed."""
    from meshwright.planners import NothingFitsError

    if isinstance(error, NothingFitsError):
        return _nothing_fits(_by_smaller_batch(error, batch, microbatches, rows_given=rows_given), as_json=as_json)
    return _by_batch(error, batch, microbatches)


def _by_smaller_batch(
    error: NothingFitsError, batch: int | None, microbatches: int | None, *, rows_given: bool
) -> NothingFitsError:
    """Returns the error with a smaller batch instead of fewer rows, if the request gives rows by --batch and --microbatches."""
    rows = next((change["rows"] for change in error.changes if "rows" in change), None)
    if batch is None or microbatches is None or rows is None:
        return error
    smaller = {"batch": rows * microbatches, **({"rows": rows} if rows_given else {})}
    flags = " ".join(f"--{name} {size}" for name, size in smaller.items())
    return type(error)(
        error.what,
        fix=(error.fix or "").replace(f"--rows {rows}", flags),
        needed_bytes=error.needed_bytes,
        changes=tuple(smaller if "rows" in change else change for change in error.changes),
    )


def _by_batch(error: MeshwrightError, batch: int | None, microbatches: int | None) -> MeshwrightError:
    """Returns the error with another batch instead of other rows, if the request gives rows by --batch and --microbatches."""
    flag, _, rows = (error.fix or "").partition(" ")
    if batch is None or microbatches is None or flag != "--rows" or not rows.isdigit():
        return error
    return MeshwrightError(error.what, fix=f"--batch {int(rows) * microbatches}")


def _nothing_fits(error: NothingFitsError, *, as_json: bool) -> typer.Exit:
    """Prints what would fit, and returns the exit."""
    if as_json:
        needed = error.needed_bytes if error.needed_bytes < float("inf") else None
        found = {"fits": False, "reason": error.what, "fix": error.fix, "needed_bytes": needed, "changes": list(error.changes)}
        sys.stdout.write(json.dumps(found) + "\n")
    sys.stderr.write(f"error: {error}\n")
    return typer.Exit(NOTHING_FITS)


def _about(path: Path, cluster: Cluster) -> str:
    """What is known about the cluster."""
    from meshwright.ir.files.cluster_file import preset_names

    is_preset = not path.suffix and any(name in path.name for name in preset_names()) and not path.exists()
    how = "a preset: data sheets and assumed shares of them, not measured" if is_preset else "speeds and links as the file says"
    return f"cluster: {path}, {cluster.size} device{'s' * (cluster.size != 1)} ({how})"


def _rows(batch: int, microbatches: int, rows: int | None) -> int:
    """Returns the rows of a microbatch, if both the batch and the number of microbatches are given."""
    if batch < 1 or microbatches < 1 or batch % microbatches or rows not in (None, batch // microbatches):
        raise MeshwrightError(
            f"--batch {batch} cannot be cut into {microbatches} microbatches of {rows or 'equal'} rows",
            fix=f"--batch {max(microbatches, 1) * (rows or max(1, batch // max(microbatches, 1)))}",
        )
    return batch // microbatches


def _draws(refusal: Refusal | None) -> bool:
    """Whether the model that a plan was made for draws random numbers; true if only its profile is known."""
    if refusal is None:
        return True
    from meshwright.train.auto.plan_refusal import PlanRefusal

    return refusal.draws if isinstance(refusal, PlanRefusal) else True


def _dataset(model: str | None, refusal: Refusal | None) -> str | None:
    """Returns what `train --dataset` has to say for this model; None if nothing."""
    if model is None:
        return None
    from meshwright.cli._parts.next_commands import PLACEHOLDER
    from meshwright.train.auto.plan_refusal import PlanRefusal
    from meshwright.train.models.example_batches import dataset_for
    from meshwright.train.models.model_names import resolve_model

    if resolve_model(model).dataset is not None:
        return None
    assert isinstance(refusal, PlanRefusal), "the model was built for its profile"
    return dataset_for(refusal.model) or PLACEHOLDER
