"""Jobs for emulated devices with their predictions, and a transport that is late."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from meshwright import Cluster, Schedule, StageCost, even_costs, lower, schedules, simulate
from meshwright.runtime.emulate.emulate import EmulationJob
from meshwright.runtime.tracing.clock import Timing
from meshwright.runtime.transport.base import Transport

Pair = tuple[EmulationJob, float]
"""A job and its predicted makespan."""


def of(
    schedule: Schedule, costs: Sequence[StageCost], cluster: Cluster | None = None, *, overlap: float = 0.0, **how: Any
) -> Pair:
    """Lower a schedule and predict it."""
    links = cluster or Cluster()
    lowered = lower(schedule, costs=costs, cluster=links)
    predicted = simulate(lowered, costs, links, overlap=overlap)
    return EmulationJob(lowered, tuple(costs), links, overlap, **how), predicted.makespan_s


def named(
    name: str,
    *,
    workers: int = 8,
    microbatches: int = 8,
    forward: float = 0.01,
    backward: float = 0.02,
    sync: float = 0.0,
    cluster: Cluster | None = None,
    steps: int = 1,
    timing: Timing = Timing.STAMPED,
    overlap: float = 0.0,
    options: dict[str, object] | None = None,
    **how: Any,
) -> Pair:
    """A schedule by name at equal work, with its costs where they shape it."""
    sizes: dict[str, Any] = {"workers": workers, "microbatches": microbatches, "steps": steps, **(options or {})}
    plain = schedules.build(name, **sizes)
    costs = even_costs(stages=plain.stages, workers=workers, forward_s=forward, backward_s=backward, sync_s=sync)
    schedule = schedules.build(name, costs=costs, cluster=cluster, **sizes)
    return of(schedule, costs, cluster, overlap=overlap, timing=timing, **how)


def every(workers: int = 8, microbatches: int = 8, **how: Any) -> dict[str, Callable[[], Pair]]:
    """Makers of all schedules with the options worth comparing; those without a flush for four steps."""
    found: dict[str, Callable[[], Pair]] = {}
    for name in schedules.names():
        for options in schedules.compared(name):
            endless = not schedules.build(name, workers=workers, microbatches=microbatches, **options).flush
            steps = 4 if endless else 1
            label = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
            sizes: dict[str, Any] = {"workers": workers, "microbatches": microbatches, "steps": steps}
            found[label] = partial(named, name, options=options, **sizes, **how)
    return found


@dataclass(frozen=True)
class Late:
    """Makes every message late by up to `most_s`, drawn anew for each, and all those of one rank by `slow_s` more."""

    seed: int
    most_s: float = 0.0
    slow_rank: int = -1
    slow_s: float = 0.0

    def __call__(self, transport: Transport) -> Transport:
        """Put the delays around a transport's own methods, so that it stays what it is for the executor."""
        rank = dist.get_rank()
        draw = random.Random(self.seed * 1000 + rank)
        extra = self.slow_s if rank == self.slow_rank else 0.0

        def late() -> None:
            time.sleep(draw.random() * self.most_s + extra)

        send, receive = transport.send, transport.receive

        def sends(*args: Any) -> None:
            late()
            send(*args)

        transport.send = sends  # type: ignore[method-assign]
        transport.receive = lambda *args: _LateReceipt(receive(*args), late)  # type: ignore[method-assign]
        return transport


@dataclass
class _LateReceipt:
    receipt: Any
    late: Callable[[], None]

    def wait(self) -> None:
        """The message, later."""
        self.receipt.wait()
        self.late()
