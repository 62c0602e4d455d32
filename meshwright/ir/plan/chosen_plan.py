"""What a planner returns: stages on devices, how long a step takes, how good that is, and what else was tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PlanStage:
    """A stage of a plan: a run of layers on some devices, which share the rows of a microbatch.

    Args:
        first: The number of its first layer.
        last: The number of its last layer.
        devices: The devices of the cluster that run it.

    Examples:
        >>> from meshwright import PlanStage
        >>> PlanStage(0, 3, (4, 5)).width
        2
    """

    first: int
    last: int
    devices: tuple[int, ...]

    @property
    def width(self) -> int:
        """How many devices share it."""
        return len(self.devices)

    @property
    def layers(self) -> range:
        """The numbers of its layers."""
        return range(self.first, self.last + 1)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A plan that was tried and not chosen."""

    plan: str
    step_s: float
    reason: str


@dataclass(frozen=True)
class Plan:
    """A plan for one model on one cluster.

    Args:
        planner: The planner that made it.
        stages: The stages, in order.
        microbatches: Microbatches of one step.
        step_s: The predicted time of a step, with the rows that really cross between stages.
        lower_bound_s: No order of these stages is faster.
        peak_bytes: The most that a device of each stage holds.
        paper_step_s: The time by the planner's own published cost model, if that differs.
        alternatives: What else was tried.
        planning_s: How long planning took.

    Examples:
        >>> from meshwright import Plan, PlanStage
        >>> plan = Plan("spp", (PlanStage(0, 1, (0,)),), 4, step_s=1.1, lower_bound_s=1.0, peak_bytes=(0.0,))
        >>> round(plan.gap, 3)
        0.1
    """

    planner: str
    stages: tuple[PlanStage, ...]
    microbatches: int
    step_s: float
    lower_bound_s: float
    peak_bytes: tuple[float, ...]
    paper_step_s: float | None = None
    alternatives: tuple[Rejected, ...] = ()
    planning_s: float = 0.0

    @property
    def gap(self) -> float:
        """How much longer than the lower bound a step is, as a share."""
        return max(0.0, self.step_s / self.lower_bound_s - 1.0) if self.lower_bound_s > 0 else 0.0

    @property
    def widths(self) -> tuple[int, ...]:
        """How many devices share each stage."""
        return tuple(stage.width for stage in self.stages)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The device of each worker: those of the first stage, then those of the next."""
        return tuple(device for stage in self.stages for device in stage.devices)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON values, as `meshwright plan --json` prints it."""
        return {
            "planner": self.planner,
            "microbatches": self.microbatches,
            "step_s": self.step_s,
            "paper_step_s": self.paper_step_s,
            "lower_bound_s": self.lower_bound_s,
            "gap": self.gap,
            "stages": [
                {"layers": [s.first, s.last], "devices": list(s.devices), "width": s.width, "recompute": 0.0} for s in self.stages
            ],
            "peak_bytes": list(self.peak_bytes),
            "alternatives": [{"plan": r.plan, "step_s": r.step_s, "reason": r.reason} for r in self.alternatives],
            "planning_s": self.planning_s,
        }
