"""A plan with its costs, links and limits, and what its simulation found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from meshwright.costs.memory.memory_classes import AddedBytes
from meshwright.costs.stages import of_microbatch
from meshwright.ir.cluster import Cluster
from meshwright.ir.plan.chosen_plan import PlanStage
from meshwright.ir.schedule import Sharding
from meshwright.ir.stage_cost import StageCost
from meshwright.planners._search.candidate_plans import Candidate, WidePlan
from meshwright.planners._search.families import Family


@dataclass
class Priced:
    """What the simulation of a plan needs, and what the plan says."""

    plan: Candidate | WidePlan
    family: Family
    workers: int
    microbatches: int
    costs: tuple[StageCost, ...]
    links: Cluster
    capacity: tuple[float, ...]
    added: tuple[AddedBytes, ...]
    static: tuple[float, ...]
    update_s: float
    tensor_s: float
    sharding: Sharding
    copies: int
    details: Callable[[], tuple[tuple[PlanStage, ...], Mapping[str, Any]]]
    """Makes stages and keywords: most plans are only compared by their times."""
    step_s: float = float("inf")
    peak_bytes: tuple[float, ...] = ()
    waiting_bytes: tuple[float, ...] = ()
    """The part of `peak_bytes` that is only estimated: gradients that wait for their sums."""

    @property
    def keywords(self) -> dict[str, Any]:
        """The plan as keywords of `Parallel`, with the costs of whole microbatches: lists are lowered and simulated with them."""
        costs = of_microbatch(self.costs, self.widths) if self.widths else self.costs
        return {**self.parallel, "costs": [asdict(cost) for cost in costs]}

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of devices of each stage, if stages have devices of their own."""
        return tuple(stage.width for stage in self.plan.stages) if isinstance(self.plan, WidePlan) else ()

    @property
    def actions(self) -> int:
        """About how many actions a simulation has."""
        return 2 * self.workers * self.microbatches * self.family.chunks

    @cached_property
    def stages(self) -> tuple[PlanStage, ...]:
        """The stages with their layers and devices."""
        return self.details()[0]

    @cached_property
    def parallel(self) -> Mapping[str, Any]:
        """The keywords of `Parallel`."""
        return self.details()[1]

    @property
    def over_bytes(self) -> float:
        """By how much the tightest worker misses its memory; 0 if all fit."""
        return max([0.0, *(peak - cap for peak, cap in zip(self.peak_bytes, self.capacity, strict=True))])

    @property
    def tightest(self) -> int:
        """The worker whose devices are the fullest; the one that holds the most if their memory is not known."""
        return max(range(self.workers), key=lambda w: (_share(self.peak_bytes[w], self.capacity[w]), self.peak_bytes[w]))

    @property
    def may_fit(self) -> bool:
        """Whether the plan only misses its memory by what is estimated."""
        sums = zip(self.peak_bytes, self.waiting_bytes, self.capacity, strict=False)
        return self.over_bytes > 0 and bool(self.waiting_bytes) and all(peak - late <= cap for peak, late, cap in sums)

    @property
    def filled(self) -> float:
        """The share of its memory that the tightest worker uses."""
        return max(_share(peak, cap) for peak, cap in zip(self.peak_bytes, self.capacity, strict=True))


def _share(peak: float, capacity: float) -> float:
    """The part of a device that is used, which may have no memory at all."""
    return peak / capacity if capacity else float("inf") if peak else 0.0
