"""Which stages recompute: inside the backward, or early in an R action that needs no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Entry, Op, Transfer, walk
from meshwright.ir.schedule import Recompute, Schedule
from meshwright.passes.wellformed import recompute_faults


class Mode(StrEnum):
    """The default for all stages, if recompute is not given per stage."""

    NONE = "none"
    INLINE = "inline"
    EARLY = "early"


def recompute(schedule: Schedule, choice: Mode | Sequence[Recompute] | None) -> Schedule:
    """Sets recompute for every stage and adds R actions where it is early. Keeps a schedule that already sets its recompute."""
    if schedule.recompute is not None or choice is None:
        return schedule
    if isinstance(choice, Mode):
        share = 0.0 if choice is Mode.NONE else 1.0
        chosen = (Recompute(share, choice is Mode.EARLY),) * schedule.stages
    elif isinstance(choice, list | tuple) and all(isinstance(how, Recompute) for how in choice):
        chosen = tuple(choice)
    else:
        raise MeshwrightError(
            f"recompute cannot be {choice!r}", fix=f"{', '.join(Mode)}, or one Recompute(share, early) per stage"
        )
    if len(chosen) != schedule.stages:
        raise MeshwrightError(
            f"{schedule.name} has {schedule.stages} stages, but recompute has {len(chosen)}",
            fix=f"one share for each of the {schedule.stages} stages",
        )
    for fault in recompute_faults(chosen):
        raise MeshwrightError(f"{schedule.name}: {fault}", fix="Recompute(1.0) for all of a stage, Recompute(0.0) for nothing")
    early = {stage for stage, how in enumerate(chosen) if how.early and how.share > 0}

    def placed(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        result: list[Entry] = []
        for entry in entries:
            for action in () if isinstance(entry, Transfer) else walk((entry,)):
                if action.op in (Op.B, Op.I) and action.stage in early:
                    result.append(action._replace(op=Op.R))
            result.append(entry)
        return tuple(result)

    prologue, period, drain = (tuple(map(placed, lists)) for lists in (schedule.prologue, schedule.period, schedule.drain))
    return replace(schedule, recompute=chosen, prologue=prologue, period=period, drain=drain)
