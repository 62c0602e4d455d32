"""The memory of a plan that its simulation does not count: temporary memory of layers, and buffers of communication."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.costs.memory.comm_buffers import copied_bytes, ring_bytes, window_bytes
from meshwright.costs.memory.memory_classes import AddedBytes
from meshwright.ir.placement import Placement
from meshwright.ir.plan.chosen_plan import PlanStage
from meshwright.ir.stage_cost import StageCost
from meshwright.planners._search.candidate_plans import Candidate
from meshwright.planners._search.grid_layout import DeviceGrid, sync_groups
from meshwright.planners._search.problem import Problem


def added_bytes(
    problem: Problem,
    plan: Candidate,
    placement: Placement,
    found: DeviceGrid,
    costs: Sequence[StageCost],
    scratch: Sequence[float],
) -> tuple[AddedBytes, ...]:
    """Returns the bytes of each worker that a simulation does not count. `scratch` is the temporary memory of each stage."""
    if not problem.on_cores:
        return tuple(AddedBytes(max(scratch[s] for _, s in pairs)) for pairs in placement.held)
    cluster = problem.cluster
    groups = [group.tolist() for group in sync_groups(found, placement)]
    seats = found.devices[:, 0, :].tolist()
    rings = ring_bytes(cluster, seats, costs, placement, microbatches=plan.microbatches)
    more = []
    for worker, pairs in enumerate(placement.held):
        stages = [s for _, s in pairs]
        transient = max(scratch[s] for s in stages)
        copied = [copied_bytes(cluster, groups[s], costs[s].parameter_bytes) for s in stages]
        if plan.zero == "replicated":
            windows = sum(window_bytes(cluster, groups[s], costs[s].parameter_bytes) for s in stages)
            more.append(AddedBytes(transient, rings[worker] + windows))
        elif plan.zero == "zero-1":  # all sums and gathers are at the end of a step
            more.append(AddedBytes(transient, rings[worker], sum(copied)))
        else:  # one unit after the other, while activations are alive
            more.append(AddedBytes(transient, rings[worker] + max(copied), sum(copied) - max(copied)))
    return tuple(more)


def added_to_wide(
    problem: Problem, stages: Sequence[PlanStage], costs: Sequence[StageCost], scratch: Sequence[float], microbatches: int
) -> tuple[AddedBytes, ...]:
    """Returns the same for stages with devices of their own. A device has at least one channel to each neighbouring stage."""
    if not problem.on_cores:
        return tuple(map(AddedBytes, scratch))
    cluster = problem.cluster
    first = [stage.devices[:1] for stage in stages]
    rings = ring_bytes(cluster, first, costs, Placement.line(len(stages)), microbatches=microbatches)
    windows = [window_bytes(cluster, s.devices, c.parameter_bytes) for s, c in zip(stages, costs, strict=True)]
    return tuple(AddedBytes(t, r + w) for t, r, w in zip(scratch, rings, windows, strict=True))
