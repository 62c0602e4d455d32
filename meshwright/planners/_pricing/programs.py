"""The lists of plans as programs of the quick sweep. Small ones are kept: later searches need them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from meshwright.ir.schedule import Schedule, Sharding
from meshwright.ir.stage_cost import StageCost
from meshwright.planners._pricing.priced_plan import Priced
from meshwright.planners._search.families import Family, shaped_by_costs, shaped_by_links
from meshwright.schedules import build
from meshwright.simulate.quick_sweep import QuickProgram

TINY, SMALL = 512, 8192
"""Lists with at most these numbers of actions are kept for the next search: many tiny ones, some small ones."""


class Programs:
    """The programs of one search."""

    def __init__(self) -> None:
        self._large: dict[tuple[object, ...], QuickProgram] = {}

    def of(self, priced: Priced) -> QuickProgram:
        """Returns the lists of a plan."""
        if shaped_by_links(priced.family):
            return QuickProgram(_built(*_shape(priced), costs=priced.costs, cluster=priced.links))
        key = (*_shape(priced), _compute_times(priced.costs) if shaped_by_costs(priced.family) else None)
        if priced.actions <= SMALL:
            return (_tiny_program if priced.actions <= TINY else _small_program)(*key)
        if key not in self._large:
            self._large[key] = _program(*key)
        return self._large[key]


Shape = tuple[Family, int, int, Sharding]
ComputeTimes = tuple[tuple[float, float, float, float], ...]


def _shape(priced: Priced) -> Shape:
    return priced.family, priced.workers, priced.microbatches, priced.sharding


def _compute_times(costs: Sequence[StageCost]) -> ComputeTimes:
    """All that an order depends on which is made for costs, but not for links."""
    return tuple((cost.forward_s, cost.input_s, cost.weight_s, cost.recompute_s) for cost in costs)


def _built(family: Family, workers: int, microbatches: int, sharding: Sharding, **more: Any) -> Schedule:
    built = build(family.schedule, workers=workers, microbatches=microbatches, **{**family.options, **more})
    return replace(built, sharding=sharding)


def _program(
    family: Family, workers: int, microbatches: int, sharding: Sharding, times: ComputeTimes | None = None
) -> QuickProgram:
    """The lists of a schedule that does not depend on links."""
    more = {} if times is None else {"costs": tuple(StageCost(*of_stage) for of_stage in times)}
    return QuickProgram(_built(family, workers, microbatches, sharding, **more))


_tiny_program, _small_program = lru_cache(maxsize=512)(_program), lru_cache(maxsize=64)(_program)
"""The next search, with other links or another memory, needs them again."""
