"""Stage-aware recompute (Merak): the least recompute per stage that keeps every worker under a byte budget.

Later stages hold fewer microbatches in flight, so under one budget they keep more. Peaks are simulated with everything that
is alive (messages, gradients, versions); they never come from a closed formula. Dropping very little costs more memory than
it frees, because the kept input and the working set are added. So a stage drops nothing, or enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil, isnan

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Action, Entry, Op
from meshwright.ir.cluster import Cluster
from meshwright.ir.schedule import Recompute, Schedule
from meshwright.ir.stage_cost import StageCost
from meshwright.simulate.simulator import simulate

HALVINGS = 20
"""Steps of the binary search for a share; without layers the result is exact to one millionth."""


def stage_aware(
    schedule: Schedule,
    costs: Sequence[StageCost],
    *,
    budget_bytes: float,
    reserved_bytes: float = 0.0,
    cluster: Cluster | None = None,
    layers: Sequence[int | Sequence[float]] | None = None,
) -> tuple[Recompute, ...]:
    """The least that every stage has to recompute so that no worker exceeds a budget.

    All stages of a worker drop the same share. A stage on several workers drops what the tightest of them needs. A schedule
    that has its own recompute actions uses them for a stage, or the stage recomputes nothing. Recompute takes as long as the
    forward where costs do not say otherwise.

    Args:
        schedule: The schedule.
        costs: One cost for each stage, with bytes.
        budget_bytes: The most that a worker may hold.
        reserved_bytes: How much of the budget is taken by something else.
        cluster: The links between workers.
        layers: For each stage its number of layers, or the bytes that it keeps when none, one, two ... all of them are
            dropped. The shares are then whole layers.

    Returns:
        For each stage how it recomputes; pass it to `lower`.

    Raises:
        MeshwrightError: A worker exceeds the budget even if it recomputes everything.

    Examples:
        >>> import meshwright as mw
        >>> schedule = mw.schedules.build("onef1b", workers=2, microbatches=4)
        >>> cost = mw.StageCost(forward_s=1.0, input_s=1.0, weight_s=1.0, activation_bytes=8.0, output_bytes=1.0)
        >>> found = mw.stage_aware(schedule, [cost, cost], budget_bytes=14.0, layers=[4, 4])
        >>> [each.share for each in found]
        [0.25, 0.0]
    """
    if isnan(budget_bytes):
        raise MeshwrightError("the budget is not a number", fix="budget_bytes=16e9")
    rows = [cost if cost.recompute_s else replace(cost, recompute_s=cost.forward_s) for cost in costs]
    table = None if layers is None else [_dropped(of) for of in layers]
    if table is not None and len(table) != schedule.stages:
        raise MeshwrightError(f"{schedule.name} has {schedule.stages} stages, but layers are given for {len(table)}")

    def choice(shares: Sequence[float], *, of_bytes: bool = False) -> tuple[Recompute, ...]:
        found = _of_stages(schedule, shares)
        if table is not None:
            counts = [ceil(share * (len(of) - 1) - 1e-9) for share, of in zip(found, table, strict=True)]
            found = [of[n] if of_bytes else n / max(1, len(of) - 1) for n, of in zip(counts, table, strict=True)]
        return _settled(schedule, found)

    def over(shares: Sequence[float]) -> dict[int, float]:
        """Returns the workers that exceed the budget, with their peaks."""
        timeline = simulate(with_recompute(schedule, choice(shares, of_bytes=True)), rows, cluster)
        found = {worker: timeline.peak_bytes(worker) + reserved_bytes for worker in range(schedule.workers)}
        return {worker: peak for worker, peak in found.items() if peak > budget_bytes * (1 + 1e-12)}

    return choice(_least(schedule, over, budget_bytes))


def _least(schedule: Schedule, over: Callable[[Sequence[float]], dict[int, float]], budget_bytes: float) -> list[float]:
    """Returns the least share of each worker with which no worker exceeds the budget."""
    shares = [0.0] * schedule.workers
    tight: set[int] = set()
    while more := over(shares):
        # If another worker drops a shared stage, this worker has to hold the kept input, and may have to drop as well.
        if set(more) <= tight:
            return [float(worker in tight) for worker in range(schedule.workers)]
        tight |= set(more)
        full = over([float(worker in tight) for worker in range(schedule.workers)])
        if stuck := {worker: peak for worker, peak in full.items() if worker in tight}:
            worker, peak = min(stuck.items())
            raise MeshwrightError(
                f"worker {worker} needs {peak:.6g} bytes even with full recompute, but the budget is {budget_bytes:.6g}",
                fix="more workers, a smaller microbatch or a larger budget",
            )
        low, shares = [0.0] * schedule.workers, [float(worker in tight) for worker in range(schedule.workers)]
        for _ in range(HALVINGS):
            middle = [(a + b) / 2 for a, b in zip(low, shares, strict=True)]
            now = over(middle)
            for worker in tight:
                low[worker], shares[worker] = (middle[worker], shares[worker]) if worker in now else (low[worker], middle[worker])
    return shares


def with_recompute(schedule: Schedule, choice: Sequence[Recompute]) -> Schedule:
    """Returns the schedule with these shares, without R actions that have nothing to recompute."""
    none = {stage for stage, how in enumerate(choice) if not how.share}

    def kept(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        return tuple(e for e in entries if not (isinstance(e, Action) and e.op is Op.R and e.stage in none))

    prologue, period, drain = (tuple(map(kept, lists)) for lists in (schedule.prologue, schedule.period, schedule.drain))
    return replace(schedule, recompute=tuple(choice), prologue=prologue, period=period, drain=drain)


def _settled(schedule: Schedule, shares: Sequence[float]) -> tuple[Recompute, ...]:
    """Returns shares that the schedule can use. If it sets its recompute itself: early where it is early, otherwise none."""
    if schedule.recompute is None:
        return tuple(map(Recompute, shares))
    pairs = zip(shares, schedule.recompute, strict=True)
    return tuple(Recompute(share, how.early) if how.share else Recompute(0.0) for share, how in pairs)


def _dropped(layers: int | Sequence[float]) -> list[float]:
    """Returns the share of a stage's bytes that is dropped with none, one, two ... all of its layers."""
    if isinstance(layers, int):
        return [n / layers for n in range(layers + 1)] if layers else [0.0]
    if len(layers) < 2 or any(b > a for a, b in pairwise(layers)) or layers[-1] < 0:
        raise MeshwrightError(
            f"the bytes that a stage keeps must decrease from layer to layer, got {list(layers)[:8]}",
            fix="one number for each number of dropped layers",
        )
    return [1.0 - kept / layers[0] if layers[0] else n / (len(layers) - 1) for n, kept in enumerate(layers)]


def _of_stages(schedule: Schedule, shares: Sequence[float]) -> list[float]:
    """Returns the share of each stage: the largest share of its workers."""
    found = [0.0] * schedule.stages
    for worker, held in enumerate(schedule.placement.held):
        for _, stage in held:
            found[stage] = max(found[stage], shares[worker])
    return found
