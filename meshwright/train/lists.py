"""From what a user asks for to the lists that run: build, widen, tie, lower, and prove."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright import schedules
from meshwright.errors import MeshwrightError
from meshwright.ir.plan import Parallel
from meshwright.ir.schedule import Recompute, Schedule
from meshwright.passes.check import check
from meshwright.passes.lower import lower
from meshwright.passes.widen import widen


def stages_of(parallel: Parallel) -> int:
    """How many stages the schedule of a plan has."""
    return _built(parallel, steps=1).stages


def lists_for(parallel: Parallel, *, ties: Sequence[tuple[int, ...]] = (), steps: int = 1) -> Schedule:
    """The lowered and proved schedule of a plan: one step to repeat, or all steps where it has no flush."""
    built = _built(parallel, steps=steps)
    if built.flush:
        built = built.repeated(1)
    if parallel.width:
        built = widen(built, parallel.width)
    built = replace(built, ties=tuple(ties))
    recompute = parallel.recompute
    how = recompute if recompute is None or isinstance(recompute, str) else [Recompute(float(share)) for share in recompute]
    lowered = lower(built, sync=parallel.sync, recompute=how)
    if not lowered.flush:
        lowered = lowered.with_lists(lowered.lists)
    result = check(lowered)
    if not result.ok:
        raise MeshwrightError(f"{parallel.schedule} breaks the law '{result.law}': {result.reason}")
    return lowered


def _built(parallel: Parallel, *, steps: int) -> Schedule:
    options: dict[str, Any] = dict(parallel.options)
    return schedules.build(parallel.schedule, workers=parallel.pp, microbatches=parallel.microbatches, steps=steps, **options)
