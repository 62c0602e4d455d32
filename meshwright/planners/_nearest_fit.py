"""If no plan fits: finds the smallest changes that make one fit. Each change is planned before it is reported.

memory      raise the memory of smaller devices to a common size
batch       halve the batch, the rows of a microbatch, or the number of microbatches if rows are not known, until a plan fits
requests    leave out one thing that was asked for: a schedule, a degree, --no-tensor, --no-zero, --rows of a batch
planner     take `search`, which knows recompute and ZeRO, if another one was asked
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from meshwright.costs.memory.memory_classes import RESERVE
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.plan.chosen_plan import Plan
from meshwright.planners._answer.plan_row import name
from meshwright.planners._limits import Asked, NothingFitsError
from meshwright.planners._pricing.pool import Pool
from meshwright.planners._pricing.priced_plan import Priced
from meshwright.planners._pricing.pricing import Pricer
from meshwright.planners._refused_requests import refuse_contradictions

HALVINGS = 6
TRIES = 3
"""How often the memory is raised until a plan fits."""
SPARE = 1.01
"""How much more memory than the least is recommended, so that rounding does not matter."""
TRIED = 8
"""How many of the smallest plans are simulated."""
FIX_S = 3.0
"""After how many seconds the search for one change ends with the best plan that it has."""
PROVED = 4
"""How many of them the engine simulates."""
ACTIONS = 200_000
"""Larger plans are not simulated by the engine."""
Planner = Callable[..., Iterator[Plan]]


def answered(planner: Planner, asked: Asked) -> Plan:
    """Returns the best plan for a question; raises NothingFitsError if nothing fits, another error if it contradicts itself."""
    best: Plan
    refuse_contradictions(planner.__module__.rpartition(".")[2], asked)
    *_, best = planner(
        profile=asked.profile, cluster=asked.cluster, microbatches=asked.microbatches, batch=asked.batch, limits=asked.limits
    )
    return best


def with_nearest_fit(error: NothingFitsError, planner: Planner, search: Planner, asked: Asked) -> NothingFitsError:
    """Returns the error with the changes that let a plan fit. `search` is the planner that knows the most plans."""
    asked = replace(asked, limits=replace(asked.limits, seconds=min(asked.limits.seconds, FIX_S)))
    needed = _enough_memory(error.needed_bytes, planner, asked)
    changes: list[tuple[str, dict[str, Any]]] = []
    if planner is not search and _fits(search, asked):
        changes.append(("--planner search", {"planner": "search"}))
    changes += [(f"without {flag}", {"without": flag}) for flag, other in _dropped(asked) if _fits(planner, other)]
    sizes = [size for size in _halved(asked) if _is_possible(planner, size[2])]
    if sizes and _fits(planner, sizes[-1][2]):
        flag, count, _ = next((size for size in sizes[:-1] if _fits(planner, size[2])), sizes[-1])
        changes.append((f"{flag} {count}", {flag.removeprefix("--"): count}))
    if needed < float("inf"):
        changes.append((f"devices with {needed / 1e9:.4g} GB of memory", {"memory_bytes": needed}))
    fix = ", or ".join(text for text, _ in changes) or "more devices, or --memory-free"
    return NothingFitsError(error.what, fix=fix, needed_bytes=needed, changes=tuple(change for _, change in changes))


def with_least_memory(cluster: Cluster, size: float) -> Cluster:
    """Returns a cluster whose devices have at least this memory."""
    return replace(cluster, devices=tuple(replace(d, memory_bytes=max(d.memory_bytes, size)) for d in cluster.devices))


def _enough_memory(needed: float, planner: Planner, asked: Asked) -> float:
    """Returns a memory with which a plan fits, starting from what one plan needs; infinite if that is not found."""
    for _ in range(TRIES):
        if needed == float("inf"):
            break
        try:
            answered(planner, replace(asked, cluster=with_least_memory(asked.cluster, needed)))
        except NothingFitsError as error:
            needed = max(1.01 * needed, error.needed_bytes)
        else:
            return needed
    return float("inf")


def _is_possible(planner: Planner, asked: Asked) -> bool:
    try:
        refuse_contradictions(planner.__module__.rpartition(".")[2], asked)
    except MeshwrightError:
        return False
    return True


def _fits(planner: Planner, asked: Asked) -> bool:
    try:
        answered(planner, asked)
    except MeshwrightError:
        return False
    return True


def _dropped(asked: Asked) -> Iterator[tuple[str, Asked]]:
    """Yields the question without each thing that was asked for."""
    limits = asked.limits
    without = (
        (limits.schedule is not None, f"--schedule {limits.schedule}", replace(limits, schedule=None)),
        (limits.pp is not None, f"--pp {limits.pp}", replace(limits, pp=None)),
        (limits.dp is not None, f"--dp {limits.dp}", replace(limits, dp=None)),
        (not limits.tensor, "--no-tensor", replace(limits, tensor=True)),
        (not limits.zero, "--no-zero", replace(limits, zero=True)),
        (asked.batch is not None and limits.rows is not None, f"--rows {limits.rows}", replace(limits, rows=None)),
    )
    for is_given, flag, other in without:
        if is_given:
            yield flag, replace(asked, limits=other)


def _halved(asked: Asked) -> Iterator[tuple[str, int, Asked]]:
    """Yields the question with smaller and smaller steps, or microbatches of fewer rows."""
    limits = asked.limits
    sizes = {"--batch": asked.batch, "--rows": limits.rows, "--microbatches": asked.microbatches}
    flag, given = next((flag, size) for flag, size in sizes.items() if size is not None)
    for count in (given // 2**k for k in range(1, min(HALVINGS, given.bit_length() - 1) + 1)):
        match flag:
            case "--batch":
                yield flag, count, replace(asked, batch=count)
            case "--rows":
                yield flag, count, replace(asked, limits=replace(limits, rows=count))
            case _:
                yield flag, count, replace(asked, microbatches=count)


def nothing_fits(pricer: Pricer, pool: Pool) -> NothingFitsError:
    """The error if no plan fits. Devices with `needed_bytes` instead of less memory let the nearest plan fit."""
    nearest = sorted(pool.listed.misfit, key=lambda c: (c.over_bytes, c.key))[:TRIED]
    tried = [priced for each in nearest if (priced := pricer.quick(each)) is not None]
    small = [each for each in (*tried, *pool.misfits) if 2 * each.workers * each.microbatches * each.family.chunks < ACTIONS]
    small = sorted(small, key=lambda each: (each.over_bytes, each.step_s))[:PROVED]
    if not small:
        return NothingFitsError("no plan fits on these devices", fix="more devices, or --memory-free", needed_bytes=float("inf"))
    needs: list[tuple[float, int, Priced]] = []
    for each in small:
        pricer.engine(each)
        needs.append((_needed(each), len(needs), replace(each)))
    needed, _, best = min(needs, key=lambda item: item[:2])
    return NothingFitsError(
        f"no plan fits: the one that needs the least ({name(best.plan)}) needs {needed / 1e9:.4g} GB "
        f"on a device that has {min(best.capacity) / 1e9:.4g} GB",
        fix=f"devices with {needed / 1e9:.4g} GB of memory",
        needed_bytes=needed,
    )


def _needed(priced: Priced) -> float:
    """The memory that devices need which have too little now."""
    pairs = [(peak - RESERVE * cap, cap) for peak, cap in zip(priced.peak_bytes, priced.capacity, strict=True)]
    short = [held for held, cap in pairs if held > (1.0 - RESERVE) * cap]
    return SPARE * max(short or [held for held, _ in pairs]) / (1.0 - RESERVE)
