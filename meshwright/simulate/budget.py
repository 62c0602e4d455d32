"""Stage-aware recompute (Merak): the least that every stage has to recompute so that no worker exceeds a byte budget.

A stage holds fewer microbatches in flight the later it comes, so under one budget later stages keep more. Peaks are
simulated, with all that lives there (messages, gradients, versions), never taken from a closed
ratio. Dropping a little costs more than it frees, as the kept input and the working set come on top: a stage drops nothing,
or enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, isnan

from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.profile import StageCost
from meshwright.ir.schedule import Recompute, Schedule
from meshwright.simulate.engine import simulate

HALVINGS = 20
"""Steps of the search for a share; without layers it ends within a millionth."""


def stage_aware(
    schedule: Schedule,
    costs: Sequence[StageCost],
    *,
    budget_bytes: float,
    cluster: Cluster | None = None,
    layers: Sequence[int] | None = None,
) -> tuple[Recompute, ...]:
    """The least share per stage under the budget, in whole layers where their numbers are given.

    All stages of a worker drop the same share; a stage on several workers drops what the tightest of them needs. Recompute
    takes as long as the forward, where costs do not say otherwise.
    """
    if isnan(budget_bytes):
        raise MeshwrightError("the budget is not a number", fix="budget_bytes=16e9")
    rows = [cost if cost.recompute_s else replace(cost, recompute_s=cost.forward_s) for cost in costs]

    def choice(shares: Sequence[float]) -> tuple[Recompute, ...]:
        found = _of_stages(schedule, shares)
        if layers is not None:
            found = [min(1.0, ceil(share * n - 1e-9) / n) if n else 0.0 for share, n in zip(found, layers, strict=True)]
        return tuple(map(Recompute, found))

    def over(shares: Sequence[float]) -> dict[int, float]:
        """The workers that exceed the budget, with their peaks."""
        timeline = simulate(replace(schedule, recompute=choice(shares)), rows, cluster)
        found = {worker: timeline.peak_bytes(worker) for worker in range(schedule.workers)}
        return {worker: peak for worker, peak in found.items() if peak > budget_bytes * (1 + 1e-12)}

    shares = [0.0] * schedule.workers
    tight: set[int] = set()
    while more := over(shares):
        # What others drop of a stage that this worker holds too costs it its kept input: it may have to drop as well.
        if set(more) <= tight:
            return choice([float(worker in tight) for worker in range(schedule.workers)])
        tight |= set(more)
        full = over([float(worker in tight) for worker in range(schedule.workers)])
        if stuck := {worker: peak for worker, peak in full.items() if worker in tight}:
            worker, peak = min(stuck.items())
            raise MeshwrightError(
                f"worker {worker} needs {peak:.6g} bytes even with full recompute, the budget is {budget_bytes:.6g}",
                fix="more workers, a smaller microbatch or a larger budget",
            )
        low, shares = [0.0] * schedule.workers, [float(worker in tight) for worker in range(schedule.workers)]
        for _ in range(HALVINGS):
            middle = [(a + b) / 2 for a, b in zip(low, shares, strict=True)]
            now = over(middle)
            for worker in tight:
                low[worker], shares[worker] = (middle[worker], shares[worker]) if worker in now else (low[worker], middle[worker])
    return choice(shares)


def _of_stages(schedule: Schedule, shares: Sequence[float]) -> list[float]:
    """Each stage's share: the largest of its workers'."""
    found = [0.0] * schedule.stages
    for worker, held in enumerate(schedule.placement.held):
        for _, stage in held:
            found[stage] = max(found[stage], shares[worker])
    return found
