"""Resolves a plan: reads or calls the user's own schedule and proves it, and refuses unknown names and options.

All code that takes a plan calls `settled` first. It stores the user's own schedule in `Parallel.order`. If the user's function
takes costs or steps, the plan keeps the name of the function, which is called again when they are known.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from meshwright import schedules
from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.plan.plan_order import refers
from meshwright.ir.plan.unset_values import Unset
from meshwright.ir.schedule import Schedule
from meshwright.passes.check import prove
from meshwright.passes.lower import named
from meshwright.passes.recompute import Mode
from meshwright.passes.sync import Sync
from meshwright.train.setup.build_schedule import in_terms_of_mode

LATER = ("costs", "steps")
"""Arguments of a schedule function that are known only when training starts."""


def settled(parallel: Parallel, *, accumulation: int = 1) -> Parallel:
    """Returns the plan with the schedule that it refers to. Raises if its sizes, names or options cannot be used.

    If the number of microbatches for the user's function is not given, it is the smallest multiple of `accumulation` that fills
    the pipeline.
    """
    parallel = _resolved(parallel, accumulation) if refers(parallel.schedule) and parallel.order is None else parallel
    named(Sync, parallel.sync)
    if isinstance(parallel.recompute, str):
        named(Mode, parallel.recompute)
    if parallel.order is not None:
        parallel = replace(parallel, order=_proved_order(parallel, parallel.order))
    else:
        try:
            schedules.converted(parallel.schedule, parallel.options)
        except MeshwrightError as error:
            raise in_terms_of_mode(error, parallel) from error
    return parallel


def _resolved(parallel: Parallel, accumulation: int) -> Parallel:
    """Returns the plan with the schedule that it refers to as its order. The sizes are those of the schedule.

    If the user's function takes costs or steps, the plan keeps its name. It is called again when they are known.
    """
    name = parallel.schedule
    if ":" not in name:
        return _with_order(parallel, schedules.read(Path(name)), parallel.options)
    takes = schedules.parameters(name)
    sizes = {"workers": int(parallel.pp), "microbatches": int(parallel.microbatches)}
    if isinstance(parallel.microbatches, Unset):
        sizes["microbatches"] = accumulation * ceil(parallel.pp / accumulation)
    for key, count in (("workers", parallel.pp), ("microbatches", parallel.microbatches)):
        if isinstance(count, Unset) and key in takes and takes[key].default is not inspect.Parameter.empty:
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
    """Returns the plan with this order instead of the name of a schedule."""
    given = {key: value for key, value in parallel.given().items() if key not in ("schedule", "order", "options")}
    return Parallel.of({**given, "order": order, "options": dict(options)})


def _proved_order(parallel: Parallel, order: Schedule) -> Schedule:
    """Returns an order with its proof, so that it is proved once. Refuses orders that cannot train."""
    schedules.refuse_malformed(order, order.name)
    once = order.repeated(1) if order.flush else order
    if once.forward_only:
        raise MeshwrightError(f"{order.name} has only forwards: there is nothing to train", fix="a schedule with backwards")
    if order.flush and once.steps != 1:
        raise MeshwrightError(
            f"{order.name} has {once.steps} rounds of {order.microbatches} microbatches between two flushes, but a step has one",
            fix=f"microbatches={order.microbatches * once.steps} in the schedule, or a period of one round",
        )
    if order.lowered:
        for what, given in (("sync", parallel.sync != "eager"), ("recompute", parallel.recompute is not None)):
            if given:
                raise MeshwrightError(
                    f"{order.name} is already lowered: {what}={getattr(parallel, what)!r} would have no effect",
                    fix=f"the schedule before lowering, or no {what}",
                )
    return replace(order, proof=prove(once).proof)
