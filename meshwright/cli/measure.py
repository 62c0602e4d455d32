"""`meshwright measure`: the measured cost of a plan next to its prediction, and what its steps wait for most."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli._parts import inputs, outputs
from meshwright.cli._parts.flag_groups import with_groups
from meshwright.cli._parts.mode_flags import ModeFlags, flag_of
from meshwright.cli.train import CONTEXT as CONTEXT
from meshwright.cli.train import asked_job
from meshwright.errors import MeshwrightError
from meshwright.ir.files.measurement import FILE, Measurement, measurement_from_json
from meshwright.ir.stage_cost import costs_to_json

if TYPE_CHECKING:
    from meshwright.train.trainer import Trainer


@with_groups
def measure(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL|JOB.toml",
            help="The output folder of a run with --trace; or a model or job as in train, to run a few steps.",
        ),
    ],
    parallel: inputs.Plan = None,
    *,
    split: inputs.DegreeFlags,
    tensor: ModeFlags,
    dataset: Annotated[str | None, typer.Option(help="The data set, as in train.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per row.")] = None,
    steps: Annotated[int | None, typer.Option(show_default="3", help="Number of steps to average.")] = None,
    trace: Annotated[Path | None, inputs.output_option(help="Write prediction and measurement as one Perfetto file.")] = None,
    as_json: inputs.Json = False,
    output: Annotated[
        Path | None, inputs.output_option("--output", "-o", help="Write the costs, for --costs of simulate.")
    ] = None,
) -> None:
    """Measure a plan: predicted against measured, the bottleneck, and costs in seconds and bytes.

    Exit code 0: measured. 2: the run or the job cannot be used.
    """
    gc.enable()
    outputs.refuse_output(output)
    outputs.refuse_output(trace)
    degrees = {**split.plan_fields(), **tensor.plan_fields()}
    if Path(model).is_dir():
        extra = {**degrees, "plan": parallel, "dataset": dataset, "length": length, "steps": steps}
        given = [f"--{flag_of(name)}" for name, value in extra.items() if value is not None]
        found: Measurement | None = _kept(Path(model), given + context.args)
    else:
        job = asked_job(model, context.args, parallel, degrees, {"dataset": dataset, "length": length, "resume": None})
        found = _run(job.trainer(), 3 if steps is None else steps, as_json=as_json)
    if found is None:
        return  # only rank 0 of torchrun reports
    if output is not None:
        outputs.write(output, costs_to_json(found.costs) + "\n")
    _show(found, trace, as_json=as_json)


def _kept(folder: Path, extra: list[str]) -> Measurement:
    """Reads the measurement that a run has written."""
    if extra:
        raise MeshwrightError(f"{folder} is a measured run, so {extra[0]} would have no effect", fix="leave it out")
    if not (folder / FILE).exists():
        raise MeshwrightError(
            f"{folder} has no {FILE}: it is not a run with --trace", fix="meshwright train MODEL --trace trace.json"
        )
    return measurement_from_json(outputs.read(folder / FILE))


def _run(trainer: Trainer, steps: int, *, as_json: bool) -> Measurement | None:
    """Runs a few traced steps."""
    from meshwright.cli._parts import running
    from meshwright.train.measure import measured

    running.follow(trainer, None, as_json=as_json)
    return measured(trainer, steps)


def _show(found: Measurement, trace: Path | None, *, as_json: bool) -> None:
    from meshwright.report.measured_text import measured_dict, measured_text, prediction

    if trace is not None:
        from meshwright.report.perfetto import both_to_perfetto

        outputs.write(trace, both_to_perfetto(prediction(found), found.timeline))
    typer.echo(json.dumps(measured_dict(found)) if as_json else measured_text(found))
