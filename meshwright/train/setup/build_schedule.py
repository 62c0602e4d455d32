"""Builds the schedule of a plan: take or build an order of actions, widen it, add ties, lower it, and prove it.

This is the only place where a plan becomes a schedule. `costs` are those of the captured stages. If the plan has measured
costs, they are used instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshwright import schedules
from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.plan.plan_dp import ZERO_3_STAGES, DpMode
from meshwright.ir.plan.plan_order import widths
from meshwright.ir.schedule import Recompute, Schedule, Sharding
from meshwright.ir.stage_cost import StageCost, rows_for
from meshwright.passes.check import prove
from meshwright.passes.lower import lower
from meshwright.passes.widen import widen
from meshwright.simulate.recompute_budget import stage_aware, with_recompute

if TYPE_CHECKING:
    from meshwright.train.setup.saved_bytes import KeptBytes

SEGMENT = 16
"""The most rounds that a schedule without a flush trains before all workers finish their updates."""


def stages_of(parallel: Parallel) -> int:
    """Returns the number of stages in the schedule of a plan."""
    return (parallel.order or _by_name(parallel, steps=1, costs=None)).stages


def splits_rows(parallel: Parallel) -> bool:
    """Returns whether several workers, or several actions, share the rows of one microbatch."""
    order = parallel.order or _by_name(parallel, steps=1, costs=None)
    return order.parts > 1 or any(width > 1 for width in (*parallel.width, *widths(order)))


def lists_for(
    parallel: Parallel,
    *,
    ties: Sequence[tuple[int, ...]] = (),
    steps: int = 1,
    first: int = 0,
    kept: Sequence[KeptBytes] | None = None,
    costs: Sequence[StageCost] | None = None,
) -> Schedule:
    """Returns the lowered and proved schedule of a plan: one step to repeat, or all steps if the schedule has no flush.

    With `first` > 0 the schedule continues a run at that round. This needs a schedule that can do so, such as cyclic.
    `kept` are the bytes that stages keep. They are needed if recompute is chosen from a memory budget.
    """
    built = built_for(parallel, steps=steps, first=first, costs=costs)
    if parallel.width and not widths(built):
        built = widen(built, parallel.width)
    built = _sharded(_tied(built, tuple(ties)), parallel)
    recompute = parallel.recompute
    how: str | Sequence[Recompute] | None = recompute if isinstance(recompute, str) else None
    if isinstance(recompute, float):
        built, how = _within_budget(built, recompute, kept)
    elif isinstance(recompute, Sequence) and not isinstance(recompute, str):
        how = [Recompute(float(share)) for share in recompute]
    given = rows_for(parallel.costs, built.stages) if parallel.costs else None
    lowered = lower(built, sync=parallel.sync, recompute=how, costs=given)
    if not lowered.flush:
        lowered = lowered.with_lists(lowered.lists)
    return prove(lowered)


def built_for(parallel: Parallel, *, steps: int = 1, first: int = 0, costs: Sequence[StageCost] | None = None) -> Schedule:
    """Returns the schedule of a plan before it is widened and lowered."""
    if parallel.order is not None:
        return _rounds(parallel.order, parallel, steps)
    built = _by_name(parallel, steps=steps, first=first, costs=costs)
    if ":" in parallel.schedule:
        Parallel.of({**parallel.given(), "schedule": built.name, "order": built})  # raises if its sizes changed with the costs
        return _rounds(built, parallel, steps)
    return built.repeated(1) if built.flush else built


def _by_name(parallel: Parallel, *, steps: int, first: int = 0, costs: Sequence[StageCost] | None) -> Schedule:
    """Builds a schedule by its name, with the costs of the plan, or else with those of the captured stages."""
    workers = parallel.workers if parallel.mode.is_cyclic else parallel.pp
    sizes = {"workers": workers, "microbatches": parallel.microbatches, "steps": steps, "first": first}
    form = {} if parallel.mode.form is None else {"form": parallel.mode.form}
    given: dict[str, Any] = {**sizes, **parallel.options, **form}
    rows = parallel.costs or costs

    def of_stages(schedule: Schedule) -> Sequence[StageCost] | None:
        return None if rows is None else rows_for(rows, schedule.stages)

    try:
        return schedules.shaped(parallel.schedule, costs=of_stages, **given)
    except MeshwrightError as error:
        raise in_terms_of_mode(error, parallel) from error


def in_terms_of_mode(error: MeshwrightError, parallel: Parallel) -> MeshwrightError:
    """Returns an error of a schedule that a data-parallel mode has chosen, in the words of the plan."""
    mode, chunks = parallel.mode, str(parallel.options.get("chunks"))
    if mode is DpMode.ZERO_3 and chunks.removeprefix("-").isdigit() and int(chunks) < 1:
        what = f'dp_mode="{mode}" gathers one stage after another and needs at least 1 stage, got the option chunks={chunks}'
        return MeshwrightError(what, fix=f'options={{"chunks": {ZERO_3_STAGES}}}, or leave it out')
    if not mode.is_cyclic:
        return error
    said = {f"cyclic: form={each.form}": f'dp_mode="{each}"' for each in DpMode if each.form is not None}
    said |= {f"form={each.form}": f'dp_mode="{each}"' for each in DpMode if each.form is not None}
    said["form=replicated"] = 'dp_mode="cyclic"'
    what, fix = error.what, error.fix and re.sub(r", form=[\w|]+$", "", error.fix)  # the mode says which form it is
    if error.what.startswith("workers must be"):
        what, fix = f'dp_mode="{mode}" needs at least 1 stage, got the option chunks={chunks}', f"chunks={parallel.dp}"
    for internal, own in said.items():
        what, fix = what.replace(internal, own), fix and fix.replace(internal, own)
    return MeshwrightError(what, fix=fix)


@contextmanager
def explaining_chunks(parallel: Parallel) -> Iterator[None]:
    """If a model has fewer layers than a data-parallel mode has stages, raises an error that names the option to change."""
    try:
        yield
    except MeshwrightError as error:
        found = re.search(r"(\d+) layers?( and)? cannot be cut into", error.what)
        if found is None or not (parallel.mode.is_cyclic or parallel.mode is DpMode.ZERO_3):
            raise
        why = "gathers one after another" if parallel.mode is DpMode.ZERO_3 else f"runs on dp={parallel.dp} copies"
        fix = f'options={{"chunks": {found[1]}}}' if parallel.mode is not DpMode.CYCLIC_ZERO else f"dp={found[1]}"
        raise MeshwrightError(f'{error.what}, which dp_mode="{parallel.mode}" {why}', fix=fix) from error


def _rounds(order: Schedule, parallel: Parallel, steps: int) -> Schedule:
    """Repeats an order: once if it has a flush, otherwise as many rounds as `steps` steps need."""
    if order.flush:
        return order.repeated(1)
    wanted = steps * parallel.microbatches // order.microbatches
    if order.steps == wanted:
        return order
    repeats = order.repeats + wanted - order.steps
    if not any(order.period) or repeats < 0:
        least = order.steps if not any(order.period) else order.steps - order.repeats
        raise MeshwrightError(
            f"{order.name} has lists for {'' if not any(order.period) else 'at least '}{least} rounds of "
            f"{order.microbatches} microbatches, but {steps} steps of {parallel.microbatches} microbatches need {wanted} rounds",
            fix="the number of steps that the lists have, or a period that can be repeated",
        )
    return order.repeated(repeats)


def _tied(built: Schedule, ties: tuple[tuple[int, ...], ...]) -> Schedule:
    """Adds the model's ties to a schedule. An order may have ties of its own; a lowered one must have the model's ties."""
    if built.ties == ties:
        return built
    if built.ties or built.lowered:
        why = "is lowered for" if built.lowered else "has"
        raise MeshwrightError(
            f"{built.name} {why} the ties {built.ties}, but the stages of the model share parameters in the groups {ties}",
            fix="the schedule before lowering, without ties: they are taken from the model",
        )
    return replace(built, ties=ties)


def _sharded(built: Schedule, parallel: Parallel) -> Schedule:
    """Adds what the data-parallel copies divide among them. It needs collectives, and a point where a step ends."""
    if not parallel.mode.is_zero:
        return built
    if parallel.sync == "ring" and built.flush and not built.ring:
        raise MeshwrightError(
            f'dp_mode="{parallel.mode}" divides sums among ranks, but sync="ring" sums gradients along a ring',
            fix='sync="eager", or dp_mode="replicated"',
        )
    if not built.flush or built.ring:
        why = "has no flush" if not built.flush else "sums gradients along a ring"
        raise MeshwrightError(
            f'dp_mode="{parallel.mode}" divides sums among ranks, but {built.name} {why}',
            fix="a schedule with a flush and sync='eager', such as onef1b",
        )
    if parallel.mode is DpMode.ZERO_3 and built.workers > 1:
        gathers = 2 * parallel.microbatches
        raise MeshwrightError(
            f'dp_mode="zero-3" gathers a stage for each use: with pp={parallel.pp} and {parallel.microbatches} microbatches '
            f"there are {gathers} gathers of every stage in a step, where zero-1 has one",
            fix='dp_mode="zero-2" with pipelines, or pp=1 with options={"chunks": K} for K stages',
        )
    if parallel.mode is DpMode.ZERO_3 and parallel.tp > 1:
        raise MeshwrightError(
            f'dp_mode="zero-3" and tp={parallel.tp} cannot be combined',
            fix=f"box=({parallel.dp}, {parallel.tp}, 1), which divides weights over its first side in the same way",
        )
    return replace(built, sharding=Sharding(parallel.dp_mode))


def _within_budget(
    schedule: Schedule, budget_bytes: float, kept: Sequence[KeptBytes] | None
) -> tuple[Schedule, list[Recompute] | None]:
    """Chooses how much each stage recomputes, so that its activations fit into the budget.

    Returns the schedule and the choice for each stage, or a schedule that already contains the choice and None.
    """
    if kept is None:
        raise MeshwrightError(
            "a recompute budget needs the bytes that stages keep, which are unknown here",
            fix="recompute='inline', or shares for each stage",
        )
    sizes = [{"activation_bytes": of.bytes[0], "output_bytes": of.output, "gradient_bytes": of.output} for of in kept]
    costs = [StageCost(1.0, 1.0, 1.0, **size) for size in sizes]
    reserved = max(of.output for of in kept)  # the first run of a stage keeps a copy of its input
    shares = stage_aware(schedule, costs, budget_bytes=budget_bytes, reserved_bytes=reserved, layers=[of.bytes for of in kept])
    return (schedule, list(shares)) if schedule.recompute is None else (with_recompute(schedule, shares), None)


def stages_to_train(parallel: Parallel) -> int:
    """Returns the number of stages in the schedule of a plan. Refuses schedules that cannot train any model."""
    refuse_without_flush(parallel, flush=parallel.order is None or parallel.order.flush)
    return stages_of(parallel)


def refuse_without_flush(parallel: Parallel, *, flush: bool) -> None:
    """Refuses a schedule without a flush: logging, evaluation and checkpoints need a point where a step ends on all workers.

    A cyclic mode trains in segments, which end at such points and keep both versions of the parameters.
    """
    if flush or parallel.mode.is_cyclic:
        return
    cyclic = f'dp={parallel.pp}, dp_mode="cyclic", which trains in segments' if parallel.schedule == "cyclic" else ""
    raise MeshwrightError(
        f"{parallel.schedule} has no flush: a step never ends on all workers at once, so nothing can be logged or saved",
        fix=cyclic or "a schedule with a flush: onef1b, chimera, zero_bubble, ... (meshwright.verify runs the others)",
    )


def refuse_cyclic_precision(parallel: Parallel, compute: str) -> None:
    """Refuses fp16 under a cyclic mode: updates of other stages have already run when the gradient of one overflows."""
    if parallel.mode.is_cyclic and compute == "fp16":
        raise MeshwrightError(
            f'dp_mode="{parallel.mode}" has no flush, so a step cannot be skipped as a whole when fp16 overflows',
            fix="bf16=True, or dp_mode='replicated'",
        )
