"""Run an emulated schedule over namespaces with shaped links: compute is a timed wait, messages and sums have their real bytes.

    plan = ExecutedPlan(schedule, costs, order)          worker w runs in namespace order[w]
    plan.predicted_s(cluster)                            what the simulator says
    plan.measured_s(network, repeat=5)                   what the runs took

Nothing about links is modelled in a run: a message takes as long as its bytes take through its link, and a sync is an all-reduce
of the stage's parameters by gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import process_time
from typing import Any

import torch
import torch.distributed as dist

from meshwright import Cluster, Device, Link, Schedule, StageCost, lower, simulate
from meshwright.ir.action import Kind, Op
from meshwright.ir.analysis.price import Price
from meshwright.runtime.emulate.emulate import LEAD_S, REST_S, EmulationJob, EmulationSession
from meshwright.runtime.emulate.wait_actions import Reduction, WaitActions
from meshwright.runtime.engine.rank_runtime import RankRuntime
from meshwright.runtime.program import Instruction
from meshwright.runtime.tracing.clock import Clock, Timing, busy_s, fine_timers
from meshwright.runtime.tracing.clock_offset import common_clock
from tests.support.namespaces import Namespaces, Rates

LATENCY_S = 3e-4
"""From a message that is handed to gloo to its first byte at the other end, with both processes asleep before."""


def cluster_of(rates: Rates) -> Cluster:
    """The cluster that namespaces with these rates are."""
    matrix = tuple(tuple(map(float, row)) for row in rates)
    return Cluster(Link(LATENCY_S), devices=(Device(),) * len(rates), bandwidths=matrix)


@dataclass(frozen=True)
class Runs:
    """How long each run took, and which share of the CPUs other processes used meanwhile."""

    times_s: tuple[float, ...]
    foreign: tuple[float, ...]

    @property
    def quiet(self) -> bool:
        """Whether some run had at least half of the CPUs for itself."""
        return min(self.foreign) < 0.5

    @property
    def best_s(self) -> float:
        """The shortest: others on the machine only ever add to it."""
        return min(self.times_s)


@dataclass(frozen=True)
class ExecutedPlan:
    """A schedule, what its stages cost, and the namespace of each worker. `sync_s` of the costs is not used."""

    schedule: Schedule
    costs: Sequence[StageCost]
    order: tuple[int, ...]

    @cached_property
    def lowered(self) -> Schedule:
        """The same lists for the prediction and for the runs of all mappings."""
        return self.schedule if self.schedule.lowered else lower(self.schedule, costs=self.costs)

    def predicted_s(self, cluster: Cluster) -> float:
        """The step that the simulator predicts on these devices."""
        placed = cluster.placed(self.order)
        holders = self.lowered.holders
        costs = [
            replace(cost, sync_s=placed.all_reduce_s(holders[stage], cost.parameter_bytes))
            for stage, cost in enumerate(self.costs)
        ]
        return simulate(self.lowered, costs, placed).makespan_s

    def measured_s(self, network: Namespaces, *, repeat: int = 5) -> Runs:
        """The steps of so many real runs."""
        costs = tuple(replace(cost, sync_s=0.0) for cost in self.costs)
        reports: list[list[list[float]]] = network.run(_steps, self.lowered, costs, repeat, order=self.order)
        times, foreign = [], []
        for rows in zip(*reports, strict=True):
            start = rows[0][0]
            times.append(max(row[1] for row in rows) - start)
            spent = max(row[3] for row in rows) - sum(row[2] for row in rows)
            foreign.append(max(0.0, spent) / 2 / times[-1])
        return Runs(tuple(times), tuple(foreign))


def _steps(schedule: Schedule, costs: Sequence[StageCost], repeat: int) -> list[list[float]]:
    """One rank's part: start, end, own CPU seconds and CPU seconds of all, for each run."""
    with fine_timers():
        session = _Session(EmulationJob(schedule, costs, timing=Timing.WALL, transport="torch"), common_clock())
        session.timed()  # opens connections
        found = [session.timed() for _ in range(repeat)]
        session.close()
    return found


class _Session(EmulationSession):
    """An emulated rank whose sums are real."""

    def __init__(self, job: EmulationJob, clock: Clock) -> None:
        self.job, self.clock, self.trace = job, clock, None
        self.runtime = RankRuntime(job.schedule, transport=job.transport)
        walked = self.runtime.program(job.schedule)
        price = Price(job.schedule, job.costs, job.cluster)
        self.actions = _RealSums(walked, price, self.runtime.groups, job.timing, clock)
        self.executor = self.runtime.executor(walked, self.actions)

    def timed(self) -> list[float]:
        """One run."""
        moment = torch.tensor([self.clock.now()], dtype=torch.float64)
        dist.all_reduce(moment, dist.ReduceOp.MAX)
        start = moment.item() + LEAD_S
        self.actions.start(start)
        self.clock.sleep_until(start)
        cpu, busy = process_time(), busy_s()
        self.executor.run(0, {})
        self.clock.sleep_until(self.actions.ended_s + REST_S)
        return [start, self.actions.ended_s, process_time() - cpu, busy_s() - busy]


class _Sum(Reduction):
    """A real all-reduce in progress."""

    __slots__ = ("_buffer", "_clock", "_ended_s", "_handle")

    def __init__(self, size: int, group: dist.ProcessGroup, clock: Clock) -> None:
        self._buffer, self._clock = torch.zeros(max(1, size // 4)), clock
        self._ended_s: float | None = None
        self._handle: Any = dist.all_reduce(self._buffer, group=group, async_op=True)

    def end_s(self) -> float:
        """Returns when the sum had arrived here."""
        if self._ended_s is None:
            self._handle.wait()
            self._ended_s, self._handle = self._clock.now(), None
        return self._ended_s


class _RealSums(WaitActions):
    """Emulated actions with sums of real bytes."""

    def _reduce(self, instruction: Instruction, group: dist.ProcessGroup | None, kind: Kind) -> None:
        if group is None or instruction.action.op is not Op.S:
            super()._reduce(instruction, group, kind)
            return
        work = self._works[id(instruction)]
        self.clock.sleep_until(max(self._now(), self._ready(work)))
        size = self.price.whole_bytes(Kind.WGRAD, instruction.action.stage)
        found = _Sum(int(size), group, self.clock)
        for slot in instruction.writes[kind]:
            self.store.slots[slot] = found
