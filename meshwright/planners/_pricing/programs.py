"""The lists of plans as programs of the quick sweep. Those that are not large are kept: later searches need them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.ir.schedule import Schedule, Sharding
from meshwright.ir.stage_cost import StageCost
from meshwright.planners._pricing.priced_plan import Priced
from meshwright.planners._search.families import Family, shaped_by_costs, shaped_by_links
from meshwright.schedules import build
from meshwright.simulate.quick_sweep import QuickProgram

LARGE = 60_000
"""Programs with more actions are kept until a search ends, others also for later searches."""
KEPT = 500_000
"""The most actions of all programs that later searches find."""


class Programs:
    """The programs of one search."""

    def __init__(self) -> None:
        self._large: dict[Key, QuickProgram] = {}

    def of(self, priced: Priced) -> QuickProgram:
        """Returns the lists of a plan."""
        if shaped_by_links(priced.family):
            return QuickProgram(_built(_shape(priced), costs=priced.costs, cluster=priced.links), as_run=True)
        key = (_shape(priced), _compute_times(priced.costs) if shaped_by_costs(priced.family) else None)
        if priced.actions <= LARGE:
            return _kept.of(key, priced.actions)
        if key not in self._large:
            self._large[key] = _program(*key)
        return self._large[key]


class KeptPrograms:
    """The programs that were used last. The next search, with other links or another memory, needs them again."""

    def __init__(self, most: int) -> None:
        self.most, self.actions = most, 0
        self._programs: dict[Key, tuple[QuickProgram, int]] = {}

    def of(self, key: Key, actions: int) -> QuickProgram:
        """Returns a program with so many actions, and forgets the oldest ones if they are too many now."""
        found = self._programs.pop(key, None)
        if found is None:
            found = _program(*key), actions
            self.actions += actions
        self._programs[key] = found  # the last one is the newest
        while self.actions > self.most and len(self._programs) > 1:
            self.actions -= self._programs.pop(next(iter(self._programs)))[1]
        return found[0]


Shape = tuple[Family, int, int, Sharding]
ComputeTimes = tuple[tuple[float, float, float, float], ...]
Key = tuple[Shape, ComputeTimes | None]


def _shape(priced: Priced) -> Shape:
    return priced.family, priced.workers, priced.microbatches, priced.sharding


def _compute_times(costs: Sequence[StageCost]) -> ComputeTimes:
    """All that an order depends on which is made for costs, but not for links."""
    return tuple((cost.forward_s, cost.input_s, cost.weight_s, cost.recompute_s) for cost in costs)


def _built(shape: Shape, **more: Any) -> Schedule:
    family, workers, microbatches, sharding = shape
    built = build(family.schedule, workers=workers, microbatches=microbatches, **{**family.options, **more})
    return replace(built, sharding=sharding)


def _program(shape: Shape, times: ComputeTimes | None) -> QuickProgram:
    """The lists of a schedule that does not depend on links."""
    more = {} if times is None else {"costs": tuple(StageCost(*of_stage) for of_stage in times)}
    return QuickProgram(_built(shape, **more), as_run=True)


_kept = KeptPrograms(KEPT)
