"""If no plan fits: the least memory with which one would, by the engine's memory curve."""

from __future__ import annotations

from dataclasses import replace

from meshwright.costs.memory_classes import RESERVE
from meshwright.planners._limits import NothingFitsError
from meshwright.planners._search.plan_row import name
from meshwright.planners._search.pool import Pool
from meshwright.planners._search.pricing import Priced, Pricer

SPARE = 1.01
"""How much more memory than the least is recommended, so that rounding does not matter."""
TRIED = 8
"""How many of the smallest plans are simulated."""
PROVED = 4
"""How many of them the engine simulates."""
ACTIONS = 200_000
"""Larger plans are not simulated by the engine."""


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
