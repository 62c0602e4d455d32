"""The order of a plan: a schedule in place of a name. Workers, microbatches and widths follow from it, or must agree with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.files.schedule_json import schedule_from
from meshwright.ir.input_limits import refuse_unfit, shown
from meshwright.ir.schedule import Schedule

SUFFIXES = (".json", ".csv")
"""How names of schedule files end."""


@dataclass(frozen=True)
class Follows:
    """What a plan says besides its order; None where it says nothing."""

    pp: int | None
    microbatches: int | None
    width: tuple[int, ...]
    schedule: str | None
    options: Mapping[str, object] | None = field(default_factory=dict)


def refers(schedule: str) -> bool:
    """Does this name a schedule file, or a function that makes a schedule?"""
    return schedule.endswith(SUFFIXES) or ":" in schedule


def order_of(given: object) -> Schedule | None:
    """A schedule as such, or in its file form."""
    if given is None or isinstance(given, Schedule):
        return given
    if not isinstance(given, Mapping):
        raise MeshwrightError(f"order is a Schedule or its file form, got {shown(given)}", fix="schedule_from_json(text)")
    refuse_unfit(given, "the order of a plan")
    return schedule_from(given, "the order of a plan")


def followed(order: Schedule, given: Follows) -> Follows:
    """What follows from an order; a contradiction to what was given is refused with both numbers."""
    try:
        workers, teams, name = order.workers, widths(order), order.name
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise MeshwrightError(f"the order of a plan is no schedule that can be read: {error}", fix="meshwright check") from error
    if given.schedule not in (None, name):
        raise MeshwrightError(f"the schedule is {given.schedule!r}, and the order is called {name!r}", fix=f'schedule="{name}"')
    if teams and given.width not in ((), teams):
        raise MeshwrightError(f"width is {given.width}, and the teams of {name} have {teams} workers", fix="leave width out")
    pp = len(teams) or workers
    if given.pp not in (None, pp):
        what = "stages" if teams else "workers"
        raise MeshwrightError(f"pp is {given.pp}, and {name} is for {pp} {what}", fix=f"pp={pp}, or leave it out")
    own: dict[str, Any] = dict(order.options)
    if given.options is not None and dict(given.options) != own:
        raise MeshwrightError(
            f"options are {shown(dict(given.options))}, and {name} was built with {shown(own)}", fix="leave options out"
        )
    return Follows(pp, _microbatches(order, given.microbatches), given.width or teams, name, own)


def _microbatches(order: Schedule, given: int | None) -> int:
    """Microbatches of a step: those of the lists; without a flush a step may be several of their rounds."""
    count = order.microbatches
    if given is None or given == count or (not order.flush and given % count == 0):
        return count if given is None else given
    often = "" if order.flush else " or a multiple"
    raise MeshwrightError(
        f"microbatches is {given}, and {order.name} has {count} per round",
        fix=f"microbatches={count}{often}, or leave it out",
    )


def widths(order: Schedule) -> tuple[int, ...]:
    """How many workers share each stage, where stages have teams of their own, one after another; else nothing."""
    teams = [stage[0] for copy in order.placement.teams for stage in copy]
    alone = order.placement.replicas == 1 and all(len(stage) == 1 for stage in order.placement.teams[0])
    numbered = [worker for team in teams for worker in team] == list(range(order.workers))
    return tuple(map(len, teams)) if alone and numbered and any(len(team) > 1 for team in teams) else ()
