"""Emulated devices: the stamps add up to the simulator's makespan exactly, the clock comes close, nothing gets stuck.

What load can touch is behind `slow` and `bench`; there a run that others disturb is repeated.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from itertools import product

import pytest

from meshwright import Cluster, Duplex, Link, MeshwrightError, StageCost, lower, schedules
from meshwright.passes.widen import widen
from meshwright.runtime.emulate.emulate import EmulationJob, Measured, emulate
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.tracing.clock import Timing, now, sleep_until
from tests.support.command import meshwright
from tests.support.emulation import Late, Pair, every, named, of

UNEQUAL = [
    StageCost(
        1e-3, 1e-3, 2e-3, recompute_s=i * 3e-4, sync_s=1e-3, output_bytes=2e3 + 500 * i, gradient_bytes=1e3, parameter_bytes=3e3
    )
    for i in range(4)
]
SMALL = {"workers": 4, "microbatches": 4, "forward": 2e-3, "backward": 4e-3}


def model_error(pairs: dict[str, Pair], workers: Workers) -> dict[str, float]:
    """How far the stamps of a run are from the prediction, where they are not equal."""
    found = emulate([job for job, _ in pairs.values()], repeat=1, workers=workers)
    errors = {
        label: abs(measured.runs[0].modelled_s - predicted) / predicted
        for (label, (_, predicted)), measured in zip(pairs.items(), found, strict=True)
    }
    return {label: error for label, error in errors.items() if error > 1e-6}


def test_stamps_of_every_schedule_add_up_to_the_prediction(workers: Workers) -> None:
    pairs = {label: make() for label, make in every(4, 4, forward=2e-3, backward=4e-3, sync=1e-3).items()}
    assert not model_error(pairs, workers)


def test_stamps_follow_links_syncs_cells_recompute_and_steps(workers: Workers) -> None:
    late = Cluster(Link(5e-4))
    pairs = {f"{name} late": named(name, **SMALL, cluster=late, sync=3e-3) for name in ("onef1b", "chimera", "zbv", "cyclic")}
    pairs["cells"] = named("dualpipe", **SMALL | {"microbatches": 8}, overlap=0.5)
    pairs["steps"] = named("chimera", **SMALL, steps=3, sync=5e-3)
    pairs["two steps of 1F1B"] = named("onef1b", **SMALL, steps=2)
    for duplex in Duplex:
        links = Cluster(Link(1e-4, 1e7), {(1, 2): Link(1e-4, 2e6)}, duplex)
        for name in ("onef1b", "chimera", "cyclic"):
            schedule = schedules.build(name, workers=4, microbatches=4, costs=UNEQUAL, cluster=links)
            pairs[f"{name} {duplex}"] = of(schedule, UNEQUAL, links, timing=Timing.STAMPED)
    assert not model_error(pairs, workers)


def test_stamps_follow_teams_that_share_rows(workers: Workers) -> None:
    wide = widen(schedules.build("onef1b", workers=3, microbatches=4), [3, 2, 1])
    links = Cluster(Link(1e-4, 1e7))
    assert not model_error({"width": of(wide, UNEQUAL[:3], links, timing=Timing.STAMPED)}, workers)


@pytest.mark.parametrize("transport", ["torch", "shared", "strict"])
def test_stamps_do_not_depend_on_the_transport(transport: str, workers: Workers) -> None:
    pairs = {name: named(name, **SMALL, transport=transport) for name in ("onef1b", "chimera", "zbv")}
    assert not model_error(pairs, workers)


def assert_within(pair: Pair, workers: Workers, *, bar: float, attempts: int) -> None:
    """The median of five runs comes within the bar of the prediction; others on the machine only ever add to it."""
    job, predicted = pair
    found, quiet = [], 0
    for _ in range(attempts):
        [measured] = emulate([job], repeat=5, workers=workers)
        found.append(measured.makespan_s / predicted - 1)
        quiet += len(measured.quiet) >= 3
        assert found[-1] >= -1e-4, "a run is never shorter than its model"
        if found[-1] <= bar:
            return
    if not quiet:
        pytest.skip(f"others use the machine: off by {min(found):.2%}, none of {attempts} attempts was undisturbed")
    raise AssertionError(f"off by {min(found):.2%}, the bar is {bar:.2%}")


@pytest.mark.parametrize("name", ["gpipe", "onef1b", "shifted"])
def test_stamped_runs_take_what_was_predicted(name: str, workers: Workers) -> None:
    assert_within(named(name), workers, bar=0.002, attempts=4)


@pytest.mark.slow
@pytest.mark.parametrize("label", sorted(every(8, 8)))
def test_every_schedule_within_two_thousandths(label: str, workers: Workers) -> None:
    assert_within(every(8, 8)[label](), workers, bar=0.002, attempts=6)


def quiet_medians(pairs: list[Pair], workers: Workers, rounds: int = 12, enough: int = 5) -> list[float]:
    """Medians over the interleaved runs that nobody disturbed; skips where there were too few."""
    jobs, kept = [job for job, _ in pairs], []
    for _ in range(rounds):
        found: list[Measured] = emulate(jobs, repeat=2, workers=workers)
        together = zip(*(measured.runs for measured in found), strict=True)
        kept += [[run.makespan_s for run in runs] for runs in together if all(run.foreign_ratio < 0.1 for run in runs)]
        if len(kept) >= enough:
            return [statistics.median(times) for times in zip(*kept, strict=True)]
    pytest.skip(f"others use the machine: {len(kept)} of {2 * rounds} rounds of runs were undisturbed")


@pytest.mark.bench
@pytest.mark.parametrize(
    ("name", "bar"), [("gpipe", 0.05), ("onef1b", 0.05), ("chimera", 0.05), ("shifted", 0.05), ("zbv", 0.15)]
)
def test_wall_runs_are_close_to_the_prediction(name: str, bar: float, workers: Workers) -> None:
    pair = named(name, timing=Timing.WALL)
    [found] = quiet_medians([pair], workers)
    assert found / pair[1] - 1 <= bar


@pytest.mark.bench
def test_chimera_beats_1f1b_on_the_wall_clock(workers: Workers) -> None:
    pairs = [
        named(name, timing=Timing.WALL, options=o) for name, o in (("onef1b", {}), ("chimera", {}), ("chimera", {"split": True}))
    ]
    onef1b, chimera, split = quiet_medians(pairs, workers)
    assert onef1b / chimera >= 1.18
    assert onef1b / split >= 1.5


LATE = (Late(1, most_s=1e-3), Late(2, most_s=2e-4, slow_rank=1, slow_s=5e-4))


def soak(steps: int, workers: Workers, names: Sequence[str], transports: Sequence[str], timings: Sequence[Timing]) -> None:
    """Walks with late messages and with one slow rank; a wait of 30 s is an error that names the channel."""
    sizes = {"workers": 4, "microbatches": 4, "forward": 2e-4, "backward": 4e-4}
    for name, late, transport, timing in product(names, LATE, transports, timings):
        how = {"walks": steps, "timeout_s": 30.0, "wrap": late, "transport": transport, "timing": timing}
        [measured] = emulate([named(name, **sizes, **how)[0]], repeat=1, workers=workers)
        assert len(measured.runs) == 1


@pytest.mark.parametrize("name", ["chimera", "zbv"])
def test_late_messages_and_a_slow_rank_for_twenty_steps(name: str, workers: Workers) -> None:
    soak(20, workers, [name], ["shared"], [Timing.WALL])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["onef1b", "chimera", "zbv", "dualpipev", "cyclic"])
def test_late_messages_and_a_slow_rank_for_two_hundred_steps(name: str, workers: Workers) -> None:
    soak(200, workers, [name], ["shared", "torch"], list(Timing))


def test_sleeping_ends_at_its_moment() -> None:
    for ahead in (-1.0, 0.0, 0.002):
        moment = now() + ahead
        sleep_until(moment)
        assert now() >= moment


def test_what_cannot_run_is_refused() -> None:
    job, _ = named("onef1b", workers=2, microbatches=2)
    plain = schedules.build("onef1b", workers=2, microbatches=2)
    with pytest.raises(MeshwrightError, match="no sends and receives"):
        emulate([EmulationJob(plain, job.costs)])
    with pytest.raises(MeshwrightError, match="at least once"):
        emulate([job], repeat=0)
    with pytest.raises(MeshwrightError, match="the same number of workers"):
        emulate([job, named("onef1b", workers=4, microbatches=2)[0]])
    with pytest.raises(MeshwrightError, match="not a transport"):
        emulate([EmulationJob(lower(plain), job.costs, transport="pigeon")])


def test_the_command_line_adds_what_was_measured() -> None:
    times = ("--workers", "2", "--microbatches", "2", "--forward", "0.002", "--backward", "0.004", "--repeat", "3")
    done = meshwright("simulate", "chimera", *times, "--emulate", "stamped", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["measured_makespan_s"] >= found["makespan_s"] * 0.999
    measured = found["measured"]
    assert len(measured["runs"]) == 3 and measured["timing"] == "stamped"
    assert measured["modelled_makespan_s"] == pytest.approx(found["makespan_s"], rel=1e-6)
    assert measured["ratio_to_predicted"] == pytest.approx(found["measured_makespan_s"] / found["makespan_s"])
    assert "measured_makespan_s" not in json.loads(meshwright("simulate", "chimera", "--json").stdout)


def test_the_command_line_refuses_long_runs_and_lonely_flags() -> None:
    long = meshwright("simulate", "onef1b", "--emulate", "wall")
    assert long.returncode == 2 and "more than 60 s" in long.stderr and "--forward 0.01" in long.stderr
    wrong = meshwright("simulate", "onef1b", "--emulate", "wall", "--forward", "0.001", "--backward", "0.001", "--transport", "x")
    assert wrong.returncode == 2 and "not a transport" in wrong.stderr
    alone = meshwright("simulate", "onef1b", "--trace", "x.json")
    assert alone.returncode == 2 and "--emulate" in alone.stderr
