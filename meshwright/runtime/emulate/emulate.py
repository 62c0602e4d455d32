"""Run lowered schedules on emulated devices: local workers started once, any number of jobs by turns, real messages.

    [measured] = emulate([Job(schedule, costs, timing=Timing.STAMPED)], repeat=5)
    measured.makespan_s        median over the runs, from the common start to the last end

Nothing is global inside the timed part but what the schedule itself says. The start of a run is a moment in the near future
that all ranks have agreed on before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from meshwright.ir.profile import StageCost
from meshwright.ir.schedule import Schedule
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
"""How long a worker stays out of the others' way after its end."""

QUIET = 0.1
"""A run counts as undisturbed while others use less than this share of the host's CPUs."""


@dataclass(frozen=True)
class EmulationJob:
    """A schedule with its costs, to be run with waits in place of compute; `wrap` may put itself around the transport."""

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


@dataclass(frozen=True)
class EmulatedRun:
    """One run. `modelled_s` is when the stamps say that it ended; `foreign_ratio` what others used of the host's CPUs."""

    makespan_s: float
    modelled_s: float
    late_s: float
    cpu_s: float
    foreign_ratio: float


@dataclass(frozen=True)
class Measured:
    """What the runs of a job gave; `timeline` is that of the run in the middle, if it was traced."""

    runs: tuple[EmulatedRun, ...]
    timeline: Timeline | None = None

    @property
    def makespan_s(self) -> float:
        """The median."""
        return median(run.makespan_s for run in self.runs)

    @property
    def quiet(self) -> tuple[EmulatedRun, ...]:
        """The runs that nobody disturbed."""
        return tuple(run for run in self.runs if run.foreign_ratio < QUIET and not run.late_s)


@dataclass(frozen=True)
class Report:
    """What one rank says about one run, on the common clock."""

    start_s: float
    begun_s: float
    ended_s: float
    modelled_s: float
    cpu_s: float
    busy_s: float
    spans: tuple[Span, ...]


def emulate(jobs: Sequence[EmulationJob], *, repeat: int = 5, workers: Workers | None = None) -> list[Measured]:
    """Run every job `repeat` times, by turns (A B A B ...), and say how long they took."""
    for job in jobs:
        _refuse(job, repeat)
    needed = {job.schedule.workers for job in jobs}
    if len(needed) != 1:
        raise MeshwrightError(f"jobs that run by turns need equally many workers, got {sorted(needed)}")
    (ranks,) = needed
    pool = workers or Workers(ranks)
    try:
        reports: list[list[list[Report]]] = pool.run(serve, tuple(jobs), repeat, ranks=ranks)
    finally:
        if workers is None:
            pool.close()
    return [_measured(job, [rank[number] for rank in reports]) for number, job in enumerate(jobs)]


def serve(jobs: Sequence[EmulationJob], repeat: int) -> list[list[Report]]:
    """One rank's part, inside a process group of as many ranks as the schedules have workers."""
    with fine_timers():
        clock = common_clock()
        sessions = [EmulationSession(job, clock) for job in jobs]
        found: list[list[Report]] = [[] for _ in jobs]
        for _ in range(repeat):
            for session, reports in zip(sessions, found, strict=True):
                reports.append(session.run())
        dist.barrier()  # no one closes a channel that another still reads
        for session in sessions:
            session.close()
    return found


class EmulationSession:
    """One rank of a job: a runtime whose actions wait instead of computing."""

    def __init__(self, job: EmulationJob, clock: Clock) -> None:
        self.job, self.clock = job, clock
        self.runtime = RankRuntime(job.schedule, transport=job.transport, timeout_s=job.timeout_s, wrap=job.wrap)
        self.trace = Trace() if job.trace else None
        if self.trace is not None:
            self.trace.clock = clock
        walked = self.runtime.program(job.schedule)
        price = Price(job.schedule, job.costs, job.cluster, overlap=job.overlap)
        self.actions = WaitActions(walked, price, self.runtime.groups, job.timing, clock, self.trace)
        self.executor = self.runtime.executor(walked, self.actions, self.trace)

    def run(self) -> Report:
        """Agree on a start, wait for it, walk."""
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
        # Workers often end at one moment: what comes after it must not take the cores from those who still have to wake.
        self.clock.sleep_until(self.actions.ended_s + REST_S)
        spent, busy = process_time() - cpu, busy_s() - busy
        spans = () if self.trace is None else tuple(self.trace.spans(self.job.schedule, self.runtime.mesh))
        return Report(start, begun, self.actions.ended_s, self.actions.free_s, spent, busy, spans)

    def close(self) -> None:
        """Release channels and process groups."""
        self.runtime.close()


def _measured(job: EmulationJob, reports: Sequence[Sequence[Report]]) -> Measured:
    """The runs of a job from what its ranks reported, rank by rank."""
    by_run = list(zip(*reports, strict=True))
    runs = tuple(map(_run, by_run))
    if not job.trace:
        return Measured(runs)
    middle = sorted(range(len(runs)), key=lambda k: runs[k].makespan_s)[(len(runs) - 1) // 2]
    chosen = by_run[middle]
    return Measured(runs, assemble([report.spans for report in chosen], job.schedule, start_s=chosen[0].start_s))


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
    """What cannot run is said before workers start."""
    parse_name(job.transport)
    if not job.schedule.lowered:
        raise MeshwrightError(f"{job.schedule.name} has no sends and receives yet", fix="meshwright.lower(schedule)")
    refuse_unproved(job.schedule)
    if repeat < 1 or job.walks < 1:
        raise MeshwrightError(f"an emulation runs at least once, got repeat={repeat}, walks={job.walks}")
