"""Checks of an engine before the first collective. They give the same result on all ranks."""

from __future__ import annotations

import torch.distributed as dist

from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan_ranks import refuse_count
from meshwright.ir.schedule import Schedule
from meshwright.passes.check import refuse_unproved
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.engine.shared_storage import refuse_shared_storage
from meshwright.runtime.json_exchange import all_gather_json
from meshwright.runtime.parameters.parameters import refuse_rules
from meshwright.runtime.stage.cpu_formats import require
from meshwright.runtime.stage.layers import Layers, refuse_hooks, refuse_tied_hooks
from meshwright.runtime.stage.precision import refuse
from meshwright.runtime.started_ranks import started

EQUAL = ("microbatches", "copies", "box", "ranks", "loss_kind", "rules", "transport", "seed", "precision")
"""The settings that must be the same on all ranks."""


def refuse_run(schedule: Schedule, layers: Layers, settings: Settings) -> None:
    """Raises if the run is not possible: before the first collective, and on all ranks alike."""
    world = dist.get_world_size()
    needed = schedule.workers * settings.copies * settings.box
    if world != needed:
        raise MeshwrightError(
            f"{schedule.name} needs {schedule.workers} workers x {settings.copies} copies = {needed} ranks, got {world}",
            fix=f"torchrun --nproc-per-node {needed}",
        )
    refuse_count(settings.ranks, needed, (f"{schedule.workers} workers", f"{settings.copies} copies"))
    if layers.stages != schedule.stages:
        raise MeshwrightError(f"{schedule.name} has {schedule.stages} stages, but the model is cut into {layers.stages}")
    if layers.ties != schedule.ties:
        raise MeshwrightError(f"the model ties stages {layers.ties}, but the schedule was lowered for ties {schedule.ties}")
    if not schedule.lowered:
        raise MeshwrightError(f"{schedule.name} has no sends and receives yet", fix="meshwright.lower(schedule)")
    refuse_unproved(schedule)
    refuse(settings.precision, {name: p.dtype for p, name in layers.names.items()}, norm=schedule.norm, name=schedule.name)
    require(settings.precision.dtype, settings.device)
    refuse_rules(settings.rules, schedule)
    refuse_shared_storage(schedule, layers)
    _refuse_microbatches(schedule, settings.microbatches)


def refuse_hooks_of(schedule: Schedule, layers: Layers, *, whole: bool) -> None:
    """Raises if the schedule would not call a gradient hook, or not with a whole gradient. Also called before every walk."""
    if not whole:
        why = f"{schedule.name} computes on versions of the parameters, or splits weight gradients from input gradients"
        refuse_hooks(layers, why, fix="use a schedule with a flush and whole backwards, such as onef1b, or remove the hook")
    refuse_tied_hooks(layers)


def _refuse_microbatches(schedule: Schedule, found: int) -> None:
    """Raises if rounds and steps of data do not fit.

    Lists with only a part of a step would lose its other rows. A round over two steps would use rows twice.
    """
    count, rounds = schedule.microbatches, schedule.steps
    whole = type(found) is int and found > 0 and not found % count and not count * rounds % found
    if not whole or (schedule.first and found != count):
        fits = [count * k for k in range(1, 2 if schedule.first else rounds + 1) if not rounds % k]
        raise MeshwrightError(
            f"{schedule.name} has {rounds} rounds of {count} microbatches, but a step of data has {found!r}: a step must contain "
            f"whole rounds, and the lists must contain whole steps",
            fix=" or ".join(f"microbatches={fit}" for fit in sorted({fits[0], fits[-1]})),
        )


def refuse_unequal(schedule: Schedule, layers: Layers, settings: Settings) -> None:
    """Raises if ranks have different arguments: they would exchange wrong data, or wait forever. This is compared first."""
    mine = {
        "cut the model in different ways": layers.digest,
        "have different schedules": f"{schedule.name} {schedule.digest[:16]}",
    } | {f"have different settings, {name}": repr(getattr(settings, name)) for name in EQUAL}
    found: list[dict[str, str]] = all_gather_json(mine)
    for what in mine:
        if other := [rank for rank, words in enumerate(found) if words[what] != found[0][what]]:
            raise MeshwrightError(
                f"ranks {what}: rank {started(0)} has {found[0][what]}, rank {started(other[0])} has {found[other[0]][what]}",
                fix="use the same model, example batch, plan, settings and version of torch on all ranks",
            )
