"""`meshwright verify`: checks that a plan trains a model like one process does."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright import schedules
from meshwright.cli._parts import cost_flags, inputs, outputs
from meshwright.cli._parts.flag_groups import with_groups
from meshwright.cli._parts.mode_flags import ModeFlags, flag_of
from meshwright.costs.planned_grid import row_unit
from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import Parallel, refuse_crowd
from meshwright.ir.plan.plan_file import asked
from meshwright.ir.plan.plan_order import refers
from meshwright.passes.sync import Sync
from meshwright.train.setup.settled_plan import settled

if TYPE_CHECKING:
    from meshwright.train.verify.certificate import Certificate

Maker = Callable[..., Any]


@with_groups
def verify(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{inputs.MODEL_FORMS}.")],
    plan: inputs.Plan = None,
    schedule: inputs.ScheduleChoice = None,
    pp: Annotated[int | None, inputs.size_option(show_default="2; 1 with --tp", help="Workers of one pipeline.")] = None,
    microbatches: Annotated[
        int | None,
        inputs.size_option("--microbatches", "-n", show_default="4", help="Microbatches per step."),
    ] = None,
    dp: Annotated[int | None, inputs.size_option(show_default="1", help="Data-parallel copies.")] = None,
    dp_mode: inputs.DataMode = None,
    option: inputs.Option = None,
    costs: cost_flags.Costs = None,
    steps: Annotated[int, inputs.size_option(help="Steps to train.")] = 5,
    *,
    tensor: ModeFlags,
    ranks: inputs.Ranks = None,
    width: Annotated[str | None, inputs.size_option(metavar="3,2,1", help="Workers that share each stage.")] = None,
    sync: Annotated[Sync | None, inputs.size_option(show_default="eager", help="When gradients are summed.")] = None,
    recompute: Annotated[
        str | None,
        typer.Option(metavar="none|inline|early|0.5,1|2GB", help="One mode for all stages, a share per stage, or a budget."),
    ] = None,
    length: Annotated[int | None, inputs.size_option(help="Tokens per row of a model by name.")] = None,
    batch: inputs.BatchFunction = None,
    old_batch: inputs.OldBatch = None,
    dtype: Annotated[str, typer.Option(help="float64 or float32; both runs compute in it.")] = "float64",
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16: dtype of the layers, with float32 weights.")] = "fp32",
    seed: Annotated[int, typer.Option(help="Seed of the weights and of dropout.")] = 0,
    transport: Annotated[str | None, typer.Option(show_default="auto", help="auto, torch, shared or strict.")] = None,
    as_json: inputs.Json = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the certificate here; default certificate.json unless --json.")
    ] = None,
) -> None:
    """Train a few steps on local workers and in one process, and compare losses, gradients and weights.

    Exit code 0: they agree. 2: the model or the plan cannot be used. 3: they do not agree.
    """
    flags: dict[str, Any] = {
        "pp": pp,
        "dp": dp,
        "dp_mode": dp_mode,
        "schedule": schedule,
        "microbatches": microbatches,
        "options": inputs.pairs(option) or None,
    }
    flags |= {"sync": sync and sync.value, "recompute": _recompute(recompute), "transport": transport}
    flags |= {"costs": cost_flags.read_costs(costs), "width": tuple(_numbers("--width", width, int)) if width else None}
    flags |= {"ranks": inputs.rank_list(ranks), **tensor.plan_fields()}
    parallel = _plan(plan, {name: value for name, value in flags.items() if value is not None})
    path = output or (None if as_json else Path("certificate.json"))
    outputs.refuse_output(path)
    build, data = _model(model, inputs.batch_function(batch, old_batch), length, parallel)
    from meshwright.train.verify.verify import verify as compare

    certificate = compare(build, data, parallel, steps=steps, dtype=dtype, seed=seed, precision=precision)
    _report(certificate, path, as_json=as_json)
    raise typer.Exit(0 if certificate.passed else 3)


def _plan(plan: str | None, given: dict[str, Any]) -> Parallel:
    """Returns the plan from a file or from flags; the default is 1F1B on two workers, or one under a tensor or dp mode."""
    if plan is not None and given:
        raise MeshwrightError(f"--plan and --{flag_of(next(iter(given)))} both say how to split", fix="give only one of them")
    count = given.get("microbatches", 4)
    if count < 1:
        raise MeshwrightError(
            f"--microbatches must be at least 1, got {count}", fix=f"--microbatches {max(given.get('pp', 2), 1)}"
        )
    usual = {"pp": 1 if {"tp", "box", "dp_mode"} & set(given) else 2, "schedule": "onef1b", "microbatches": 4, "sync": "eager"}
    if given.get("dp_mode") == "zero-3":
        del usual["schedule"]
    if str(given.get("dp_mode", "")).startswith("cyclic"):  # it has its own schedule, with one microbatch per copy
        usual = {"sync": "eager"}
    own = given.get("schedule")
    if own is not None and refers(own):  # the schedule has its own sizes, or its function takes them as arguments
        wanted = schedules.needed(own) if ":" in own else frozenset()
        usual = {flag: usual[flag] for flag, size in (("pp", "workers"), ("microbatches", "microbatches")) if size in wanted}
    parallel = settled(Parallel.of({**usual, **given} if plan is None else asked(plan)))
    refuse_crowd(parallel.started)
    return parallel


def _report(certificate: Certificate, path: Path | None, *, as_json: bool) -> None:
    """Writes the certificate, and prints it or a summary."""
    if path is not None:
        outputs.write(path, certificate.to_json() + "\n")
    if as_json:
        typer.echo(certificate.to_json())
    else:
        _print(certificate, path)


def _print(certificate: Certificate, path: Path | None) -> None:
    """Prints what was compared, the errors, and other problems."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    verdict = "passed" if certificate.passed else "NOT PASSED"
    console.print(
        f"{certificate.schedule}  {certificate.steps} steps, {certificate.updates} updates, {certificate.dtype}: {verdict}"
    )
    table = Table(box=None, pad_edge=False)
    for column in ("compared", "largest relative error", "bar"):
        table.add_column(column, justify="left" if column == "compared" else "right")
    for what in ("loss", "gradient", "weight"):
        table.add_row(what, f"{getattr(certificate, f'{what}_error'):.2e}", f"{certificate.tolerance:.0e}")
    table.add_row("copies, bit by bit", "equal" if certificate.replicas_equal else "unequal", "equal")
    console.print(table)
    if not certificate.max_relative_error <= certificate.tolerance:
        console.print(f"worst: {certificate.worst}")
    for problem in certificate.problems:
        console.print(f"problem: {problem}")
    console.print(f"certificate: {path}")


def _model(model: str, batch: str | None, length: int | None, parallel: Parallel) -> tuple[Maker, Maker]:
    """Returns the functions that make the model and its batches: two rows per microbatch, or one per member of a team.

    Under a tensor mode they are what the mode divides; twice that with halves.
    """
    from meshwright.train.models.example_batches import batches_for
    from meshwright.train.models.model_names import SMALL, resolve_model
    from meshwright.train.setup.build_schedule import stages_of

    named = resolve_model(model, stages=stages_of(parallel) if model in SMALL else 1)
    unit = row_unit(parallel) * (2 if parallel.overlap else 1)
    rows = unit * ceil(max((2, *parallel.width)) / unit)
    return named.build, batches_for(named, batch, rows=rows * parallel.microbatches * parallel.copies, length=length)


def _recompute(text: str | None) -> str | list[float] | None:
    """Returns a mode by name, or shares; a text that contains a number is read as shares."""
    if text is None or not any(_is_number(part) for part in text.split(",")):
        return text
    return _numbers("--recompute", text, float)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _numbers(flag: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise MeshwrightError(f"{flag} takes numbers with commas between them, got {text!r}", fix=f"{flag} 1,1") from None
