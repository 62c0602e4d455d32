"""Cyclic data parallelism on emulated devices: a late worker, and bytes in flight. Times are those of the stamps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from meshwright import Schedule, StageCost, lower, schedules
from meshwright.ir.action import COMPUTE, Action, Op, Transfer
from meshwright.ir.analysis.effects import rule
from meshwright.ir.analysis.timeline_counts import STAGE_KINDS
from meshwright.ir.timeline import Lane, Timeline
from meshwright.runtime.emulate.emulate import EmulationJob, emulate
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.tracing.clock import Timing
from tests.support.thin import slow

STEP_S, DELAY_S = 0.01, 0.05


def cyclic(n: int, rounds: int, name: str = "v2", stagger: str = "turns") -> Schedule:
    return lower(schedules.build("cyclic", workers=n, microbatches=n, steps=rounds, rule=name, stagger=stagger))


def stages(n: int, size: float = 0.0) -> list[StageCost]:
    return [StageCost(STEP_S, STEP_S / 2, STEP_S / 2, parameter_bytes=size)] * n


def stamped(workers: Workers, *jobs: EmulationJob) -> list[Timeline]:
    found = [measured.modelled for measured in emulate(jobs, repeat=1, workers=workers)]
    assert all(found)
    return [timeline for timeline in found if timeline is not None]


def dependents(schedule: Schedule, worker: int, late: Action) -> set[tuple[int, Action]]:
    """The actions that cannot start before another has ended: they follow it in a list, or need what was sent after it.

    A message is sent at its place in the list, so it depends on the actions before it there.
    """
    effects, after = rule(schedule), {(worker, late)}
    have: set[tuple[int, object]] = set()  # values that a worker has late
    while True:
        before = len(after) + len(have)
        for w, entries in enumerate(schedule.lists):
            held_up = False
            for entry in entries:
                if isinstance(entry, Transfer):
                    if entry.sends and (held_up or (w, entry.value) in have):
                        have.add((entry.peer, entry.value))
                    continue
                assert isinstance(entry, Action)
                held_up |= (w, entry) in after or any((w, value) in have for value in effects(w, entry).reads)
                if held_up:
                    after.add((w, entry))
                    have |= {(w, value) for value in effects(w, entry).writes}
        if len(after) + len(have) == before:
            return after


LATE = [(4, "v2", "turns", 1), (4, "v2", "starts", 1), (4, "v1", "starts", 2), (6, "v2", "starts", 2)]
"""Workers, rule, stagger, and how many actions each other worker still starts without a delay."""


@pytest.mark.parametrize(("n", "name", "stagger", "least"), [LATE[0], *(slow(case, several=True) for case in LATE[1:])])
def test_a_late_worker_holds_up_only_what_needs_its_data(n: int, name: str, stagger: str, least: int, workers: Workers) -> None:
    """With turns, others finish what they have begun; with delayed starts alone, they go on until they need its gradients."""
    schedule, late = cyclic(n, 3, name, stagger), 1
    action = next(e for e in schedule.lists[late] if isinstance(e, Action) and e.op is Op.F and e.mb == n + late and e.stage == 2)
    job = EmulationJob(schedule, stages(n), timing=Timing.STAMPED)
    usual, delayed = stamped(workers, job, replace(job, delays={(late, str(action)): DELAY_S}))
    needs = dependents(schedule, late, action)
    begin = next(s.start_s for s in usual.compute[late] if s.entry == action)
    for worker in range(n):
        pairs = list(zip(usual.compute[worker], delayed.compute[worker], strict=True))
        assert [a.entry for a, _ in pairs] == [b.entry for _, b in pairs]
        moved = {(worker, a.entry) for a, b in pairs if b.start_s > a.start_s + 1e-9}
        assert moved <= needs, "nobody waits for more than the data that it needs"
        assert all(b.start_s <= a.start_s + DELAY_S + 1e-9 for a, b in pairs), "a delay does not add up"
        if worker != late:
            went_on = [a for a, _ in pairs if a.start_s >= begin - 1e-9 and (worker, a.entry) not in moved]
            assert len(went_on) >= least, "others go on, up to what they need"
    slack = 0.0 if stagger == "turns" else DELAY_S  # without turns a delay may be made up for
    assert usual.makespan_s + DELAY_S - slack - 1e-9 <= delayed.makespan_s <= usual.makespan_s + DELAY_S + 1e-9


def peak_bytes(timeline: Timeline, size: float, before: float) -> float:
    """The most bytes of gradients that all workers together start to send in one time step before some step."""
    sent: Counter[int] = Counter()
    for span in timeline.spans:
        if span.lane is Lane.SEND and isinstance(span.entry, Transfer) and span.entry.value.kind in STAGE_KINDS:
            sent[round(span.start_s / STEP_S)] += 1
    return max(count for step, count in sent.items() if step < before) * size


@pytest.mark.parametrize("name", ["v2", slow("v1")])
def test_bytes_in_flight_stay_far_below_the_burst_of_lockstep(name: str, workers: Workers) -> None:
    """Lockstep data parallelism sends 2 (N - 1) times the model at the end of a step: an all-reduce along a ring, all at once."""
    n, size, rounds = 8, 4096.0, 3
    [timeline] = stamped(workers, EmulationJob(cyclic(n, rounds, name), stages(n, size), timing=Timing.STAMPED))
    burst = 2 * (n - 1) * n * size
    assert 0 < peak_bytes(timeline, size, float("inf")) <= burst / 4
    assert peak_bytes(timeline, size, 2 * n * rounds) <= n * size, "at most one stage per worker, until the first one stops"
    computes = [a for spans in timeline.compute for s in spans for a in (s.entry,) if isinstance(a, Action)]
    assert all(a.op in COMPUTE for a in computes) and len(computes) == 2 * n * n * rounds
