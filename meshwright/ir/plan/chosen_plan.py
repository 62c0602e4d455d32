"""`Plan`, the result of a planner: stages on devices, predicted step time and memory, a lower bound, and other plans it tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PlanStage:
    """A stage of a plan: a run of layers on some devices, which share the rows of a microbatch.

    Args:
        first: The number of its first layer.
        last: The number of its last layer.
        devices: The devices of the cluster that run it: those that share its rows, and those of all data-parallel copies.
        recompute: The share of its layers that is recomputed.

    Examples:
        >>> from meshwright import PlanStage
        >>> PlanStage(0, 3, (4, 5)).width
        2
    """

    first: int
    last: int
    devices: tuple[int, ...]
    recompute: float = 0.0

    @property
    def width(self) -> int:
        """How many devices share it."""
        return len(self.devices)

    @property
    def layers(self) -> range:
        """The numbers of its layers."""
        return range(self.first, self.last + 1)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The peak memory of one device, in bytes by class. The classes add up to the peak.

    Args:
        parameters: Parameters, of all versions that are alive.
        gradients: Gradients and their sums.
        optimizer: The state of the optimizer.
        activations: Tensors that forwards save for backwards.
        messages: Activations and gradients that are sent or have arrived, and buffers of communication.
        transients: Temporary tensors while a layer runs: logits, and recomputed activations.
        reserve: Memory for the allocator and the driver.

    Examples:
        >>> from meshwright import MemoryUse
        >>> MemoryUse(parameters=4.0, activations=2.0).total
        6.0
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    messages: float = 0.0
    transients: float = 0.0
    reserve: float = 0.0

    @property
    def total(self) -> float:
        """All classes together."""
        return sum(float(size) for size in asdict(self).values())


@dataclass(frozen=True, slots=True)
class Rejected:
    """A plan that was tried and not chosen.

    Args:
        plan: The plan in words.
        step_s: Its predicted time of a step; infinite if it was not simulated.
        reason: Why it was not chosen.
        row: The columns of its table row: degrees, schedule, rates, peak.
    """

    plan: str
    step_s: float
    reason: str
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A plan for one model on one cluster.

    Args:
        planner: The planner that made it.
        stages: The stages, in order.
        microbatches: Microbatches of one step.
        step_s: The predicted time of a step, with the rows that really cross between stages.
        lower_bound_s: No order of these stages is faster; from a search: no plan that was enumerated is faster.
        peak_bytes: The peak memory of a device, for each worker.
        paper_step_s: The time by the planner's own published cost model, if that differs.
        alternatives: Other plans that were tried.
        planning_s: How long planning took.
        parallel: The plan as keywords of `Parallel`, with the rank layout.
        memory: The peak of each worker by class.
        causes: The time of a step by cause, in seconds.
        counts: How many plans were enumerated, bounded, rejected, simulated and proved.
        row: Degrees, rates and peak of the plan, as a row of a table.
        notes: The assumptions.
        rivals: For each choice, the best plan with another choice.
        flips: When another plan would be better.
        name: The plan in words.
        error: How far `step_s` may be off, from step_s / (1 + error) to step_s x (1 + error): by the times of layers, or by how
            earlier predictions were off.

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
    parallel: Mapping[str, Any] = field(default_factory=dict)
    memory: tuple[MemoryUse, ...] = ()
    causes: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    row: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    rivals: tuple[Rejected, ...] = ()
    flips: tuple[Mapping[str, Any], ...] = ()
    name: str = ""
    error: float = 0.0

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
        given = self.parallel.get("ranks")
        return tuple(given) if given else tuple(device for stage in self.stages for device in stage.devices)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON values, as `meshwright plan --json` prints it."""
        return {
            "planner": self.planner,
            "plan": self.name,
            "microbatches": self.microbatches,
            "step_s": self.step_s,
            "paper_step_s": self.paper_step_s,
            "lower_bound_s": self.lower_bound_s,
            "gap": self.gap,
            "error": self.error,
            "stages": [
                {"layers": [s.first, s.last], "devices": list(s.devices), "width": s.width, "recompute": s.recompute}
                for s in self.stages
            ],
            "parallel": dict(self.parallel),
            "peak_bytes": list(self.peak_bytes),
            "memory": [asdict(use) for use in self.memory],
            "causes": dict(self.causes),
            "counts": dict(self.counts),
            "row": dict(self.row),
            "alternatives": [_rejected(other) for other in self.alternatives],
            "rivals": [_rejected(other) for other in self.rivals],
            "flips": [dict(flip) for flip in self.flips],
            "notes": list(self.notes),
            "planning_s": self.planning_s,
        }


def _rejected(other: Rejected) -> dict[str, Any]:
    """Returns an alternative as JSON values; a time that is not known is null."""
    step_s = other.step_s if other.step_s < float("inf") else None
    return {"plan": other.plan, "step_s": step_s, "reason": other.reason, **other.row}
