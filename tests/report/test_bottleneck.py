"""The named bottleneck: by counter-examples on predicted timelines, on timelines by hand, emulated and in a real run."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from meshwright import (
    Action,
    Cluster,
    Lane,
    Link,
    MeshwrightError,
    Op,
    Span,
    Timeline,
    even_costs,
    lower,
    measure,
    schedules,
    simulate,
)
from meshwright.report.bottleneck import What, bottleneck
from meshwright.report.measured_text import measured_text
from meshwright.runtime.emulate.emulate import EmulationJob, emulate
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.tracing.clock import Timing
from tests.support.trainers import ours

NAMES = ["onef1b", "gpipe", "chimera", "zbv", "interleaved", "zero_bubble", "dualpipe", "hanayo"]


def plain(name: str, workers: int = 4, microbatches: int = 8):  # type: ignore[no-untyped-def]
    schedule = lower(schedules.build(name, workers=workers, microbatches=microbatches))
    return schedule, even_costs(stages=schedule.stages, workers=workers)


@pytest.mark.parametrize("name", NAMES)
def test_a_slow_stage_is_named_with_what_it_costs(name: str) -> None:
    """What it costs is what a simulation without it gains, about."""
    schedule, even = plain(name)
    slow = tuple(cost.scaled(2.5) if stage == 2 else cost for stage, cost in enumerate(even))
    predicted = simulate(schedule, slow)
    found = bottleneck(schedule, slow, predicted)
    assert (found.what, found.stage) == (What.STAGE, 2)
    assert found.cost_s == pytest.approx(predicted.makespan_s - simulate(schedule, even).makespan_s, rel=0.2)
    assert found.wait is not None and found.wait.source in found.workers and found.wait.worker != found.wait.source
    assert f"stage 2 on worker{'s' if len(found.workers) > 1 else ''}" in found.sentence
    assert f"that costs {found.cost_s:.3g} s of the {found.step_s:.3g} s of a step" in found.sentence


@pytest.mark.parametrize("name", NAMES)
def test_a_slow_link_is_named_with_what_it_costs(name: str) -> None:
    schedule, even = plain(name)
    predicted = simulate(schedule, even, Cluster(Link(), {(1, 2): Link(latency_s=8.0)}))
    found = bottleneck(schedule, even, predicted)
    assert found.what is What.LINK and sorted(found.workers) == [1, 2]
    assert found.cost_s == pytest.approx(predicted.makespan_s - simulate(schedule, even).makespan_s, rel=0.2)
    assert found.wait is not None and {found.wait.worker, found.wait.source} == {1, 2}
    assert "messages between workers" in found.sentence


@pytest.mark.parametrize("name", NAMES)
def test_even_stages_leave_fill_and_drain(name: str) -> None:
    schedule, even = plain(name)
    predicted = simulate(schedule, even)
    found = bottleneck(schedule, even, predicted)
    assert found.what is What.SCHEDULE
    assert found.cost_s == pytest.approx(predicted.bubble_ratio * predicted.makespan_s)


def test_a_slow_sync_is_named() -> None:
    schedule, even = plain("chimera")
    costs = tuple(replace(cost, sync_s=20.0) for cost in even)
    found = bottleneck(schedule, costs, simulate(schedule, costs))
    assert found.what is What.SYNC and found.cost_s >= 20 and found.wait is not None and found.wait.source is None


def test_gaps_without_a_reason_are_the_hosts() -> None:
    """One worker, by hand: 3 s of nothing before every second of computing; syncs and updates take no time."""
    schedule = lower(schedules.build("gpipe", workers=1, microbatches=2))
    actions = [entry for entry in schedule.lists[0] if isinstance(entry, Action)]
    computed = [action for action in actions if action.op in (Op.F, Op.B)]
    spans = [Span(0, Lane.COMPUTE, entry, 4.0 * at + 3.0, 4.0 * at + 4.0) for at, entry in enumerate(computed)]
    spans += [Span(0, Lane.COLLECTIVE, entry, 16.0, 16.0) for entry in actions if entry not in computed]
    found = bottleneck(schedule, even_costs(stages=1, workers=1), Timeline("gpipe", 1, tuple(spans)))
    assert (found.what, found.cost_s, found.step_s, found.wait) == (What.HOST, 12.0, 16.0, None)
    with pytest.raises(MeshwrightError, match="the timeline has no 0F0 of worker 0"):
        bottleneck(schedule, even_costs(stages=1, workers=1), Timeline("gpipe", 1, ()))


def test_of_two_copies_the_slow_one_is_followed() -> None:
    """The second copy ends later, and is held up by one link; the first has even times."""
    schedule, even = plain("onef1b", 2, 4)
    fast, slow = simulate(schedule, even), simulate(schedule, even, Cluster(Link(latency_s=9.0)))
    moved = [span._replace(worker=span.worker + 2) for span in slow.spans]
    found = bottleneck(schedule, even, Timeline("onef1b", 4, (*fast.spans, *moved)))
    assert found.what is What.LINK and found.step_s == slow.makespan_s
    assert found.wait is not None and found.wait.worker in (2, 3)


@pytest.mark.parametrize("case", ["stage", "link"])
def test_emulated_devices_with_one_slow_part(case: str, workers: Workers) -> None:
    schedule = lower(schedules.build("onef1b", workers=4, microbatches=4))
    costs = even_costs(stages=4, workers=4, forward_s=0.004, backward_s=0.008)
    if case == "stage":
        costs = tuple(cost.scaled(4) if stage == 1 else cost for stage, cost in enumerate(costs))
    links = Cluster(Link(), {(2, 3): Link(latency_s=0.05)}) if case == "link" else Cluster()
    [measured] = emulate([EmulationJob(schedule, costs, links, timing=Timing.WALL, trace=True)], repeat=1, workers=workers)
    assert measured.timeline is not None
    found = bottleneck(schedule, costs, measured.timeline)
    if case == "stage":
        assert (found.what, found.stage, found.workers) == (What.STAGE, 1, (1,))
    else:
        assert found.what is What.LINK and sorted(found.workers) == [2, 3]
    assert found.cost_s > 0.3 * found.step_s


class Slow(nn.Linear):
    """A layer that takes its time."""

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, and multiply."""
        time.sleep(0.05)
        return super().forward(x)


def test_a_slow_stage_of_a_real_run_is_named(tmp_path: Path, workers: Workers) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Slow(8, 8))
    rows = [(torch.ones(8), torch.zeros(8)) for _ in range(64)]
    found = measure(ours(model, tmp_path, rows, workers, parallel={"pp": 2, "microbatches": 4}), steps=1)
    named = bottleneck(found.schedule, found.costs, found.timeline)
    assert (named.what, named.stage, named.workers) == (What.STAGE, 1, (1,))
    assert named.cost_s > 0.5 * named.step_s and named.step_s >= 0.2
    text = measured_text(found)
    assert "predicted" in text and "bottleneck: stage 1 on worker 1 takes" in text
