"""Run lowered schedules on emulated devices: local workers are started once, jobs alternate, and messages are real.

    [measured] = emulate([EmulationJob(schedule, costs, timing=Timing.STAMPED)], repeat=5)
    measured.makespan_s        median over the runs, from the common start to the last end

The timed part contains no global operation except those of the schedule itself. All ranks agree beforehand on the start of a run,
which is a time in the near future.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import cpu_count
from statistics import median
from time import process_time

import torch
import torch.distributed as dist

from meshwright.errors import MeshwrightError
from meshwright.ir.analysis.price import Price
from meshwright.ir.cluster import Cluster
from meshwright.ir.plan.plan import parse_name
from meshwright.ir.plan.plan_ranks import checked_ranks, refuse_count
from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost
from meshwright.ir.timeline import Span, Timeline
from meshwright.passes.check import refuse_unproved
from meshwright.runtime.emulate.wait_actions import WaitActions
from meshwright.runtime.engine.rank_runtime import RankRuntime
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.tracing.clock import Clock, Timing, busy_s, fine_timers
from meshwright.runtime.tracing.clock_offset import common_clock
from meshwright.runtime.tracing.trace import Trace, assemble
from meshwright.runtime.transport.base import Transport

LEAD_S = 0.1
"""How far ahead the common start is."""

REST_S = 0.01
"""How long a worker sleeps after its end, so that it does not disturb the others."""

QUIET = 0.1
"""A run counts as undisturbed if other processes use less than this share of the host's CPUs."""


@dataclass(frozen=True)
class EmulationJob:
    """A schedule with its costs, to be run with waits instead of compute. `wrap` may wrap the transport in another one.

    `delays` are seconds by which single actions take longer than their price, by worker and text of the action: `(2, "1F5")`.
    `ranks` are the ranks of the workers; empty if worker i is rank i.
    """

    schedule: Schedule
    costs: Sequence[StageCost]
    cluster: Cluster = field(default_factory=Cluster)
    overlap: float = 0.0
    timing: Timing = Timing.WALL
    transport: str = "auto"
    walks: int = 1
    trace: bool = False
    timeout_s: float | None = None
    wrap: Callable[[Transport], Transport] | None = None
    delays: Mapping[tuple[int, str], float] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part, in ascending order."""
        return tuple(sorted(self.ranks)) or tuple(range(self.schedule.workers))


@dataclass(frozen=True)
class EmulatedRun:
    """One run. `modelled_s` is its end according to the stamps. `foreign_ratio` is the CPU share of other processes."""

    makespan_s: float
    modelled_s: float
    late_s: float
    cpu_s: float
    foreign_ratio: float


@dataclass(frozen=True)
class Measured:
    """The runs of a job. `timeline` is that of the median run, if it was traced.

    `modelled` are the actions and messages of the last run at the times in its messages. With stamped messages these do not
    depend on the load of the machine.
    """

    runs: tuple[EmulatedRun, ...]
    timeline: Timeline | None = None
    modelled: Timeline | None = None

    @property
    def makespan_s(self) -> float:
        """The median over the runs."""
        return median(run.makespan_s for run in self.runs)

    @property
    def quiet(self) -> tuple[EmulatedRun, ...]:
        """The runs that were not disturbed."""
        return tuple(run for run in self.runs if run.foreign_ratio < QUIET and not run.late_s)


@dataclass(frozen=True)
class Report:
    """The report of one rank about one run, on the common clock."""

    start_s: float
    begun_s: float
    ended_s: float
    modelled_s: float
    cpu_s: float
    busy_s: float
    spans: tuple[Span, ...]
    stamps: tuple[Span, ...]


def emulate(jobs: Sequence[EmulationJob], *, repeat: int = 5, workers: Workers | None = None) -> list[Measured]:
    """Runs every job `repeat` times, in alternation (A B A B ...), and returns their times."""
    for job in jobs:
        _refuse(job, repeat)
    needed = {job.schedule.workers for job in jobs}
    if len(needed) != 1:
        raise MeshwrightError(f"jobs that alternate must have the same number of workers, got {sorted(needed)}")
    if len(members := {job.members for job in jobs}) != 1:
        raise MeshwrightError(f"jobs that alternate must run on the same ranks, got {sorted(members)}")
    (ranks,) = members
    pool = workers or Workers(ranks[-1] + 1)
    try:
        reports: list[list[list[Report]]] = pool.run(serve, tuple(jobs), repeat, ranks=ranks)
    finally:
        if workers is None:
            pool.close()
    return [_measured(job, [rank[number] for rank in reports]) for number, job in enumerate(jobs)]


def serve(jobs: Sequence[EmulationJob], repeat: int) -> list[list[Report]]:
    """Runs one rank's part, inside a process group with as many ranks as the schedules have workers."""
    with fine_timers():
        clock = common_clock()
        sessions = [EmulationSession(job, clock) for job in jobs]
        found: list[list[Report]] = [[] for _ in jobs]
        for _ in range(repeat):
            for session, reports in zip(sessions, found, strict=True):
                reports.append(session.run())
        dist.barrier()  # no rank closes a channel that another still reads
        for session in sessions:
            session.close()
    return found


class EmulationSession:
    """One rank of a job: a runtime whose actions wait instead of computing."""

    def __init__(self, job: EmulationJob, clock: Clock) -> None:
        self.job, self.clock = job, clock
        self.runtime = RankRuntime(job.schedule, ranks=job.ranks, transport=job.transport, timeout_s=job.timeout_s, wrap=job.wrap)
        self.trace = Trace() if job.trace else None
        if self.trace is not None:
            self.trace.clock = clock
        walked = self.runtime.program(job.schedule)
        price = Price(job.schedule, job.costs, job.cluster, overlap=job.overlap)
        groups = self.runtime.holder_groups(job.schedule)
        self.actions = WaitActions(walked, price, groups, job.timing, clock, self.trace, job.delays)
        self.executor = self.runtime.executor(walked, self.actions, self.trace)

    def run(self) -> Report:
        """Agrees on a start, waits for it, and walks the schedule."""
        if self.trace is not None:
            self.trace.clear()
        moment = torch.tensor([self.clock.now()], dtype=torch.float64)
        dist.all_reduce(moment, dist.ReduceOp.MAX)
        start = moment.item() + LEAD_S
        self.actions.start(start)
        self.clock.sleep_until(start - LEAD_S / 10)
        cpu, busy = process_time(), busy_s()
        self.clock.sleep_until(start)
        begun = self.clock.now()
        for walk in range(self.job.walks):
            self.executor.run(walk, {})
        # Workers often end at the same time. The work below must not take the cores from workers that still have to wake up.
        self.clock.sleep_until(self.actions.ended_s + REST_S)
        spent, busy = process_time() - cpu, busy_s() - busy
        spans = () if self.trace is None else tuple(self.trace.spans(self.job.schedule, self.runtime.mesh))
        return Report(start, begun, self.actions.ended_s, self.actions.free_s, spent, busy, spans, tuple(self.actions.stamps))

    def close(self) -> None:
        """Releases channels and process groups."""
        self.runtime.close()


def _measured(job: EmulationJob, reports: Sequence[Sequence[Report]]) -> Measured:
    """Returns the runs of a job from the reports of its ranks."""
    by_run = list(zip(*reports, strict=True))
    runs = tuple(map(_run, by_run))
    last = by_run[-1]
    modelled = assemble([report.stamps for report in last], job.schedule, start_s=last[0].start_s)
    if not job.trace:
        return Measured(runs, modelled=modelled)
    middle = sorted(range(len(runs)), key=lambda k: runs[k].makespan_s)[(len(runs) - 1) // 2]
    chosen = by_run[middle]
    timeline = assemble([report.spans for report in chosen], job.schedule, start_s=chosen[0].start_s)
    return Measured(runs, timeline, modelled)


def _run(ranks: Sequence[Report]) -> EmulatedRun:
    start = ranks[0].start_s
    makespan = max(report.ended_s for report in ranks) - start
    own = sum(report.cpu_s for report in ranks)
    busy = max(report.busy_s for report in ranks)
    late = max(report.begun_s for report in ranks) - start
    return EmulatedRun(
        makespan_s=makespan,
        modelled_s=max(report.modelled_s for report in ranks) - start,
        late_s=late if late > LEAD_S / 10 else 0.0,
        cpu_s=own,
        foreign_ratio=max(0.0, busy - own) / ((makespan + LEAD_S / 10 + REST_S) * (cpu_count() or 1)),
    )


def _refuse(job: EmulationJob, repeat: int) -> None:
    """Raises before workers start if a job cannot run."""
    parse_name(job.transport)
    refuse_count(checked_ranks(job.ranks), job.schedule.workers, (f"{job.schedule.name} of {job.schedule.workers} workers",))
    if not job.schedule.lowered:
        raise MeshwrightError(f"{job.schedule.name} has no sends and receives yet", fix="meshwright.lower(schedule)")
    refuse_unproved(job.schedule)
    if repeat < 1 or job.walks < 1:
        raise MeshwrightError(f"an emulation must run at least once, got repeat={repeat}, walks={job.walks}")
