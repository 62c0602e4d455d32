"""Short ways to build, lower and simulate in tests."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright import Cluster, Link, Schedule, StageCost, Timeline, even_costs, schedules, simulate
from tests.support.cases import usual_steps


def costs_of(schedule: Schedule, forward: float = 1.0, backward: float = 2.0, **more: float) -> Sequence[StageCost]:
    """Equal stages at equal work, from one worker's totals; `input_share` is the share of the backward's input half."""
    half = more.pop("input_share", 0.5)
    names = {"recompute": "recompute_s", "sync": "sync_s"}
    extra = {names[key]: value for key, value in more.items()}
    return even_costs(
        stages=schedule.stages, workers=schedule.workers, forward_s=forward, backward_s=backward, split=(half, 1 - half), **extra
    )


def run(
    name: str,
    workers: int,
    microbatches: int,
    forward: float = 1.0,
    backward: float = 2.0,
    *,
    recompute: float = 0.0,
    sync_cost: float = 0.0,
    input_share: float = 0.5,
    send: float = 0.0,
    policy: str = "eager",
    overlap: float = 0.0,
    steps: int | None = None,
    **options: object,
) -> Timeline:
    """Build a schedule by name, with its costs where they shape it, and simulate it."""
    cluster = Cluster(Link(latency_s=send)) if send else None
    steps = steps or usual_steps(name)
    plain = schedules.build(name, workers=workers, microbatches=microbatches, steps=steps, **options)
    costs = costs_of(plain, forward, backward, recompute=recompute, sync=sync_cost, input_share=input_share)
    schedule = schedules.build(
        name, workers=workers, microbatches=microbatches, steps=steps, costs=costs, cluster=cluster, **options
    )
    return simulate(schedule, costs, cluster, sync=policy, overlap=overlap)


def peaks(timeline: Timeline) -> list[float]:
    """The most activations that each worker holds."""
    return [timeline.peak(worker) for worker in range(timeline.workers)]


def idle(timeline: Timeline) -> list[float]:
    """How long each worker does not compute within the makespan."""
    return [timeline.makespan_s - timeline.busy_s(worker) for worker in range(timeline.workers)]


def texts(schedule: Schedule) -> list[list[str]]:
    """Every list as texts."""
    return [[str(entry) for entry in entries] for entries in schedule.lists]
