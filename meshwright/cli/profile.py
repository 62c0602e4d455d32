"""`meshwright profile`: what each layer of a model costs, as the input of `plan`."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli._parts import cost_flags, inputs, outputs
from meshwright.errors import MeshwrightError

if TYPE_CHECKING:
    pass


def _row_counts(text: str) -> str:
    """Checks whole numbers with commas between them."""
    _numbers(text)
    return text


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise MeshwrightError(f"--rows takes whole numbers, got {text!r}", fix="--rows 1,2,4") from None


def profile(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{inputs.MODEL_FORMS}.")],
    cluster: cost_flags.ClusterFile = None,
    rows: Annotated[
        str, inputs.size_option(parser=_row_counts, metavar="N,N,...", help="Rows of the microbatches to time.")
    ] = "1,2,4",
    length: Annotated[int | None, inputs.size_option(help="Tokens per row.")] = None,
    batch: inputs.BatchFunction = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    optimizer: Annotated[str, typer.Option(help="adamw, adam, sgd or sgd-momentum: what it keeps per parameter.")] = "adamw",
    estimate: Annotated[
        bool | None,
        typer.Option("--estimate/--measure", show_default="by --cluster", help="Estimate times, or run the layers here."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="How often each layer runs; the shortest times count.")] = 5,
    *,
    as_json: inputs.Json = False,
    output: inputs.Output = None,
) -> None:
    """Time the layers of a model one by one, equal layers once, without the whole model in memory.

    With a cluster whose first device is not this machine, or with --estimate, times are estimated from operations and bytes.

    Exit code 2: the model cannot be captured, or the cluster does not tell what an estimate needs.
    """
    from meshwright.ir.files.cluster_file import read_cluster
    from meshwright.ir.files.profile_json import profile_to_json
    from meshwright.report.profile_table import profile_table
    from meshwright.train.models.named_layers import named_model
    from meshwright.train.profiling.profile_model import profile_model

    outputs.refuse_output(output)
    gc.enable()  # a trace leaves reference cycles
    machine, counts = None if cluster is None else read_cluster(cluster), _numbers(rows)
    built, example = named_model(model, length=length, batch=batch)
    found = profile_model(
        built,
        example,
        rows=counts,
        cluster=machine,
        precision=precision,
        optimizer=optimizer,
        estimate=estimate,
        repeats=repeats,
    )
    text = profile_to_json(found)
    if output is not None:
        outputs.write(output, text + "\n")
    typer.echo(text if as_json else profile_table(found))
