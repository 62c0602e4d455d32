"""A plan that can run: own schedules read, called and proved, names and options that do not exist refused.

Everything that takes a plan calls `settled` before it does anything else. After it an own schedule is `Parallel.order`; a
function that takes costs or steps stays a name, and is called again when they are known.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from meshwright import schedules
from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import Parallel, Unsaid
from meshwright.ir.plan.plan_order import refers
from meshwright.ir.schedule import Schedule
from meshwright.passes.check import prove
from meshwright.passes.lower import named
from meshwright.passes.recompute import Mode
from meshwright.passes.sync import Sync

LATER = ("costs", "steps")
"""What is known only when training starts."""


def settled(parallel: Parallel, *, accumulation: int = 1) -> Parallel:
    """The plan with the schedule that it refers to; sizes, names and options that cannot be used are refused.

    Where nobody says how many microbatches an own function is to build for, it is the least multiple of `accumulation` that
    fills the pipeline.
    """
    parallel = _resolved(parallel, accumulation) if refers(parallel.schedule) and parallel.order is None else parallel
    named(Sync, parallel.sync)
    if isinstance(parallel.recompute, str):
        named(Mode, parallel.recompute)
    if parallel.order is not None:
        _refuse_order(parallel, parallel.order)
    else:
        schedules.converted(parallel.schedule, parallel.options)
    return parallel


def _resolved(parallel: Parallel, accumulation: int) -> Parallel:
    """The plan with the schedule that it refers to as its order; sizes follow from it.

    A function that takes costs or steps stays a name: it is called again when they are known.
    """
    name = parallel.schedule
    if ":" not in name:
        return _with_order(parallel, schedules.read(Path(name)), parallel.options)
    takes = schedules.parameters(name)
    sizes = {"workers": int(parallel.pp), "microbatches": int(parallel.microbatches)}
    if isinstance(parallel.microbatches, Unsaid):
        sizes["microbatches"] = accumulation * ceil(parallel.pp / accumulation)
    for key, count in (("workers", parallel.pp), ("microbatches", parallel.microbatches)):
        if isinstance(count, Unsaid) and key in takes and takes[key].default is not inspect.Parameter.empty:
            sizes[key] = takes[key].default
    values: dict[str, Any] = schedules.converted(name, parallel.options)
    workers, microbatches = sizes["workers"], sizes["microbatches"]
    built = schedules.build(name, workers=workers, microbatches=microbatches, costs=parallel.costs or None, **values)
    found = _with_order(replace(parallel, options={}), built, {})
    later = [key for key in LATER if key in takes and not (key == "costs" and parallel.costs)]
    if not later:
        return found
    degrees = {"pp": found.pp, "microbatches": found.microbatches}
    return Parallel.of({**parallel.given(), **degrees, "options": values})


def _with_order(parallel: Parallel, order: Schedule, options: Any) -> Parallel:
    """A plan that has this order in place of its name."""
    given = {key: value for key, value in parallel.given().items() if key not in ("schedule", "order", "options")}
    return Parallel.of({**given, "order": order, "options": dict(options)})


def _refuse_order(parallel: Parallel, order: Schedule) -> None:
    """Prove an order before anything runs, and refuse what no run could do with it."""
    schedules.refuse_malformed(order, order.name)
    once = order.repeated(1) if order.flush else order
    if once.forward_only:
        raise MeshwrightError(f"{order.name} has forwards alone: there is nothing to train", fix="a schedule with backwards")
    if order.flush and once.steps != 1:
        raise MeshwrightError(
            f"{order.name} has {once.steps} rounds of {order.microbatches} microbatches between two flushes, a step is one round",
            fix=f"microbatches={order.microbatches * once.steps} in the schedule, or a period of one round",
        )
    if order.lowered:
        for what, given in (("sync", parallel.sync != "eager"), ("recompute", parallel.recompute is not None)):
            if given:
                raise MeshwrightError(
                    f"{order.name} is lowered, its {what} is settled: {what}={getattr(parallel, what)!r} would change nothing",
                    fix=f"the schedule before lowering, or no {what}",
                )
    prove(once)
