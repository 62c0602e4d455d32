"""A plan with its own schedule (`order`) instead of a name. Workers, microbatches and widths are taken from the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.files.schedule_json import schedule_from
from meshwright.ir.input_limits import refuse_unfit, shown
from meshwright.ir.schedule import Schedule

SUFFIXES = (".json", ".csv")
"""File name endings of schedule files."""


@dataclass(frozen=True)
class Follows:
    """The fields of a plan besides its order; None for fields that are not set."""

    pp: int | None
    microbatches: int | None
    width: tuple[int, ...]
    schedule: str | None
    options: Mapping[str, object] | None = field(default_factory=dict)


def refers(schedule: str) -> bool:
    """True if this names a schedule file, or a function that builds a schedule."""
    return schedule.endswith(SUFFIXES) or ":" in schedule


def order_of(given: object) -> Schedule | None:
    """Returns a schedule from a `Schedule` or its file form."""
    if given is None or isinstance(given, Schedule):
        return given
    if not isinstance(given, Mapping):
        raise MeshwrightError(f"order is a Schedule or its file form, got {shown(given)}", fix="schedule_from_json(text)")
    refuse_unfit(given, "the order of a plan")
    return schedule_from(given, "the order of a plan")


def followed(order: Schedule, given: Follows) -> Follows:
    """Returns the values that follow from an order. Raises with both numbers if a given value contradicts the order."""
    try:
        workers, teams, name = order.workers, widths(order), order.name
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise MeshwrightError(f"the order of a plan cannot be read as a schedule: {error}", fix="meshwright check") from error
    if given.schedule not in (None, name):
        raise MeshwrightError(f"the schedule is {given.schedule!r}, but the order is called {name!r}", fix=f'schedule="{name}"')
    if teams and given.width not in ((), teams):
        raise MeshwrightError(f"width is {given.width}, but the teams of {name} have {teams} workers", fix="leave width out")
    pp = len(teams) or workers
    if given.pp not in (None, pp):
        what = "stages" if teams else "workers"
        raise MeshwrightError(f"pp is {given.pp}, but {name} is for {pp} {what}", fix=f"pp={pp}, or leave it out")
    own: dict[str, Any] = dict(order.options)
    if given.options is not None and dict(given.options) != own:
        raise MeshwrightError(
            f"options are {shown(dict(given.options))}, but {name} was built with {shown(own)}", fix="leave options out"
        )
    return Follows(pp, _microbatches(order, given.microbatches), given.width or teams, name, own)


def _microbatches(order: Schedule, given: int | None) -> int:
    """Returns the microbatches of a step. Without a flush, a step may contain several rounds of the lists."""
    count = order.microbatches
    if given is None or given == count or (not order.flush and given % count == 0):
        return count if given is None else given
    often = "" if order.flush else " or a multiple"
    raise MeshwrightError(
        f"microbatches is {given}, but {order.name} has {count} per round",
        fix=f"microbatches={count}{often}, or leave it out",
    )


def widths(order: Schedule) -> tuple[int, ...]:
    """Returns the team size of each stage if every stage has one team of its own, numbered in order; otherwise ()."""
    teams = [stage[0] for replica in order.placement.teams for stage in replica]
    single = order.placement.replicas == 1 and all(len(stage) == 1 for stage in order.placement.teams[0])
    numbered = [worker for team in teams for worker in team] == list(range(order.workers))
    return tuple(map(len, teams)) if single and numbered and any(len(team) > 1 for team in teams) else ()
