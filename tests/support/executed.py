"""Run a plan over namespaces with shaped links: compute is a timed wait, messages and sums have their real bytes.

    plan = ExecutedPlan(parallel)                        what a planner chose: its lists, costs and ranks; rank r is namespace r
    plan.on((3, 1, 0, 2))                                the same plan on other ranks
    plan.predicted_s(cluster)                            what the simulator says
    plan.measured_s(network, repeat=5)                   what the runs took

Nothing about links is modelled in a run: a message takes as long as its bytes take through its link, and a sync is an all-reduce
of the stage's parameters by gloo. Idle ranks do not take part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import cpu_count
from time import process_time
from typing import Any

import torch
import torch.distributed as dist

from meshwright import Cluster, Device, Link, Parallel, Schedule, simulate
from meshwright.costs.placed_plan import placed_costs, placed_links
from meshwright.ir.action import Kind, Op
from meshwright.ir.analysis.price import Price
from meshwright.runtime.emulate.emulate import LEAD_S, REST_S, EmulationJob, EmulationSession
from meshwright.runtime.emulate.wait_actions import Reduction, WaitActions
from meshwright.runtime.engine.rank_runtime import RankRuntime
from meshwright.runtime.program import Instruction
from meshwright.runtime.tracing.clock import Clock, Timing, busy_s, fine_timers
from meshwright.runtime.tracing.clock_offset import common_clock
from meshwright.train.setup.build_schedule import lists_for
from meshwright.train.setup.settled_plan import settled
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
    """A plan with the costs of its stages. Their `sync_s` is not used."""

    parallel: Parallel

    @cached_property
    def lowered(self) -> Schedule:
        """The lists that training would run; the same for all ranks."""
        return lists_for(settled(self.parallel))

    def on(self, ranks: Sequence[int]) -> ExecutedPlan:
        """The same plan on other ranks: as many of these as it needs."""
        return ExecutedPlan(replace(self.parallel, ranks=tuple(ranks[: self.parallel.processes])))

    def predicted_s(self, cluster: Cluster) -> float:
        """The step that the simulator predicts on these devices."""
        costs = placed_costs(self.parallel, self.lowered, self.parallel.costs, cluster)
        return simulate(self.lowered, costs, placed_links(self.parallel, self.lowered, cluster)).makespan_s

    def measured_s(self, network: Namespaces, *, repeat: int = 5) -> Runs:
        """The steps of so many real runs."""
        job = EmulationJob(
            self.lowered,
            tuple(replace(cost, sync_s=0.0) for cost in self.parallel.costs),
            timing=Timing.WALL,
            transport="torch",
            ranks=self.parallel.ranks,
        )
        reports: list[list[list[float]]] = network.run(_steps, job, self.parallel.copies, repeat, order=self.parallel.members)
        times, foreign = [], []
        for rows in zip(*reports, strict=True):
            start = rows[0][0]
            times.append(max(row[1] for row in rows) - start)
            spent = max(row[3] for row in rows) - sum(row[2] for row in rows)
            foreign.append(max(0.0, spent) / (cpu_count() or 1) / times[-1])
        return Runs(tuple(times), tuple(foreign))


def _steps(job: EmulationJob, copies: int, repeat: int) -> list[list[float]]:
    """One rank's part: start, end, own CPU seconds and CPU seconds of all, for each run."""
    with fine_timers():
        session = _Session(job, copies, common_clock())
        session.timed()  # opens connections
        found = [session.timed() for _ in range(repeat)]
        session.close()
    return found


class _Session(EmulationSession):
    """An emulated rank of one of several data-parallel copies, whose sums are real."""

    def __init__(self, job: EmulationJob, copies: int, clock: Clock) -> None:
        self.job, self.clock, self.trace = job, clock, None
        self.runtime = RankRuntime(job.schedule, copies=copies, ranks=job.ranks, transport=job.transport)
        walked = self.runtime.program(job.schedule)
        price = Price(job.schedule, job.costs, job.cluster)
        self.actions = _RealSums(walked, price, self.runtime.holder_groups(job.schedule), job.timing, clock)
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
