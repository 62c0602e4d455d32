"""The ZeRO form of cyclic data parallelism: each stage has one owner, which alone keeps its parameters and updates them.

Worker N + 1 - j (both from 1) owns stage j: under rule v2 it is the first to read a new version, right after the sum of the last
one is complete. The lists are those of the replicated form without the updates of the other workers. They get the parameters of
a stage for one forward or one backward at a time, from the worker that used them two time steps before.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Action, Op
from meshwright.ir.schedule import Lists, Schedule


def with_owners(schedule: Schedule, rule: str, margin: int | None) -> Schedule:
    """Returns the ZeRO form of a replicated cyclic schedule. Raises if it has no such form."""
    _refuse_form(rule, margin, schedule.workers, schedule.stages)
    owners = tuple(reversed(range(schedule.stages)))

    def owned(lists: Lists) -> Lists:
        return tuple(
            tuple(e for e in row if not isinstance(e, Action) or e.op is not Op.U or owners[e.stage] == worker)
            for worker, row in enumerate(lists)
        )

    prologue, period, drain = owned(schedule.prologue), owned(schedule.period), owned(schedule.drain)
    return replace(schedule, owners=owners, prologue=prologue, period=period, drain=drain)


def _refuse_form(rule: str, margin: int | None, workers: int, stages: int) -> None:
    """Raises for rules under which the owner of a stage would not be its first reader, and if workers would wait for stages."""
    if stages != workers:
        raise MeshwrightError(
            f"form=zero needs as many stages as workers, got {stages} and {workers}: a stage is used by one worker at a time, so "
            f"workers would be busy for {stages / workers:.0%} of the time at most",
            fix=f"chunks={workers}",
        )
    if rule != "v2" or margin:
        given = f"rule={rule}" if rule != "v2" else f"margin={margin}"
        raise MeshwrightError(
            f"form=zero hands parameters from reader to reader under rule v2 only, got {given}: all {stages} stages would start "
            "at worker 1, which then holds up to all of them",
            fix="rule=v2 and margin=0, or form=replicated",
        )
