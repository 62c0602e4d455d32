"""The search: never worse than SPP, as good as every plan of small problems, within memory, and an explanation that adds up."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("numpy")

import meshwright as mw
from meshwright import Cluster, Device, Duplex, Host, LayerCost, Link, Parallel, Profile, profile_from_text
from meshwright.planners import NothingFitsError, _wide_search
from meshwright.planners import search as searching
from meshwright.planners._limits import PlanLimits
from meshwright.planners._search import wide_plans
from meshwright.planners._search.problem import Problem
from meshwright.report.progress import SearchBar
from tests.support.command import app
from tests.support.paths import ROOT
from tests.support.plan_oracle import SmallModel, best_step
from tests.support.plans import cluster_of, random_profile, random_rates
from tests.support.thin import thinned

NVLINK = Cluster(hosts=(Host(8, Link(0.0, 25e9), Link(0.0, 3e9)),) * 2)
PCIE = Cluster(hosts=(Host(4, Link(0.0, 12e9), Link(0.0, 1.25e9)),) * 4)
SLOW = pytest.mark.slow


def published(name: str) -> Profile:
    return profile_from_text((ROOT / "tests" / "data" / f"{name}.txt").read_text())


@pytest.mark.parametrize("cluster", [NVLINK, PCIE], ids=["2x8", "4x4"])
@pytest.mark.parametrize(
    "name", ["bert-24-pbs-6", pytest.param("vgg-19-pbs-32", marks=SLOW), pytest.param("xlnet-24-pbs-1", marks=SLOW)]
)
def test_never_slower_than_spp_priced_in_the_same_way(name: str, cluster: Cluster) -> None:
    profile = published(name)
    spp = mw.plan(profile, cluster, microbatches=16, planner="spp")
    assert mw.plan(profile, cluster, microbatches=16, planner="search").step_s <= spp.step_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", thinned(range(20), 10))
def test_never_slower_than_spp_over_any_links(seed: int) -> None:
    profile, cluster = random_profile(seed, 5 + seed % 4), cluster_of(random_rates(seed, 4 + seed % 5))
    steps = [mw.plan(profile, cluster, microbatches=2 + seed, planner=planner).step_s for planner in ("search", "spp")]
    assert steps[0] <= steps[1] * (1 + 1e-9)


def two(costs: tuple[tuple[float, ...], ...], **links: Any) -> tuple[Profile, Cluster]:
    layers = (LayerCost("layer", (f,), (i,), (w,), output_bytes=sent, parameter_bytes=size) for f, i, w, sent, size in costs)
    return Profile(tuple(layers)), Cluster(devices=(Device(),) * 2, **links)


RATES = ((0.0, 1.0), (1.0, 0.0))
BY_LINKS = {
    "half duplex": (two(((2, 2, 2, 3, 100), (2, 2, 1, 4, 100)), duplex=Duplex.HALF, bandwidths=((0.0, 2.0), (1.0, 0.0))), 4),
    "latency": (two(((1, 1, 1, 1, 4),) * 2, link=Link(2.0, 1.0)), 4),
    "long messages": (two(((1, 1, 1, 2, 4),) * 2, link=Link(2.0, 1.0)), 4),
    "slow": (two(((1, 1, 1, 3, 100), (2, 2, 2, 3, 100)), duplex=Duplex.HALF, bandwidths=RATES), 8),
}


@pytest.mark.parametrize("name", BY_LINKS)
def test_no_request_finds_a_better_plan_where_links_order_messages(name: str) -> None:
    """A run places messages without links. A search that placed them by links returned plans that were 8 to 16 % too slow."""
    (profile, cluster), microbatches = BY_LINKS[name]
    best = mw.plan(profile, cluster, microbatches=microbatches, planner="search")
    for asked in ({"schedule": "gpipe"}, {"schedule": "zero_bubble"}, {"schedule": "listed"}, {"schedule": "onef1b"}, {"pp": 1}):
        other = mw.plan(profile, cluster, microbatches=microbatches, planner="search", **asked)
        assert best.step_s <= other.step_s * (1 + 1e-9) and best.lower_bound_s <= other.step_s * (1 + 1e-9), other.name


def blocks(count: int, *, saved: float = 4e6) -> Profile:
    """Equal blocks with all that a profile can know, between a table and a head."""
    block = LayerCost(
        "block", (1e-3, 3e-3), (1e-3, 3e-3), (1e-3, 3e-3), output_bytes=1e6, saved_bytes=saved, parameter_bytes=8e6,
        transient_bytes=5e5, flops=1e10,
    )  # fmt: skip
    table = replace(block, name="table", forward_s=(1e-4, 2e-4), flops=0.0, parameter_bytes=4e7)
    head = replace(block, name="head", transient_bytes=2e7)
    return Profile((table, *(replace(block, name=f"block {n}") for n in range(count)), head), rows=(1, 4), tokens_per_row=128)


def machine(memory: float, devices: int = 8, launch_s: float = 0.0) -> Cluster:
    device = Device("gpu", memory, {"fp32": 1e13}, bytes_per_s=1e12, launch_s=launch_s)
    hosts = (Host(4, Link(1e-6, 1e11), Link(1e-5, 1e10)),) * (devices // 4)
    return Cluster(devices=(device,) * devices, hosts=hosts)


def test_no_step_is_shorter_than_its_bound() -> None:
    """Otherwise best first would stop too early: every enumerated plan, on equal and on unequal devices."""
    fast, slow = Device("a", 1e9, {"fp32": 2.0}, launch_s=1e-5), Device("b", 8e8, {"fp32": 1.0})
    mixed = Cluster(devices=(fast,) * 2 + (slow,) * 2, hosts=(Host(2, Link(0.0, 1e10), Link(1e-5, 1e9)),) * 2)
    seen = set()
    for cluster, batch in ((machine(2.5e8, 4), 16), (mixed, 8)):
        limits = PlanLimits()
        problem = Problem(blocks(14), cluster, limits, microbatches=None, batch=batch)
        search = searching.Search(problem)
        listed = search.enumerator.run()
        for candidate in listed.fit[:: max(1, len(listed.fit) // 150)]:
            priced = search.pricer.quick(candidate)
            if priced is not None:
                assert priced.step_s >= candidate.bound_s * (1 - 1e-9), candidate
                assert max(p - c for p, c in zip(priced.peak_bytes, priced.capacity, strict=True)) >= candidate.over_bytes - 1.0
                seen.add((candidate.family.name, candidate.zero, candidate.recompute))
    assert len({name for name, _, _ in seen}) >= 12 and {zero for _, zero, _ in seen} >= {"replicated", "zero-1", "zero-2"}


@pytest.mark.parametrize("memory", [1e12, 1.6e8, 1.1e8, 8e7])
def test_no_plan_exceeds_the_memory_at_any_event(memory: float) -> None:
    """The engine's own memory curve, with scratch and reserve; classes add up to the peak, causes to the step."""
    profile, cluster = blocks(14), machine(memory)
    try:
        plan = mw.plan(profile, cluster, batch=16, planner="search")
    except NothingFitsError:
        assert memory == 8e7
        return
    assert all(peak <= memory for peak in plan.peak_bytes)
    assert [use.total for use in plan.memory] == pytest.approx(list(plan.peak_bytes))
    assert sum(plan.causes.values()) == pytest.approx(plan.step_s) and min(plan.causes.values()) >= -1e-12
    problem = Problem(profile, cluster, PlanLimits(), microbatches=None, batch=16)
    search = searching.Search(problem)
    *_, _ = search.run()
    best = search.pool.best()
    assert best is not None
    schedule = search.pricer.schedule(best)
    timeline = mw.simulate(schedule, best.costs, best.links, copies=best.copies)
    for worker, levels in enumerate(timeline.memory):
        assert best.added[worker].peak(0.0, max(level.bytes for level in levels)) <= memory
    assert plan.step_s == pytest.approx(timeline.makespan_s + best.update_s)


@pytest.mark.parametrize(("devices", "reads"), [(8, 1e12), (4, 2e9)], ids=["short updates", "long updates"])
def test_tighter_memory_never_gives_a_faster_plan(devices: int, reads: float) -> None:
    """With long updates, divided state is faster than whole state, also where whole state fits."""

    def step(memory: float) -> float:
        cluster = machine(memory, devices)
        kinds = tuple(replace(device, bytes_per_s=reads) for device in cluster.devices)
        return mw.plan(blocks(14), replace(cluster, devices=kinds), batch=16, planner="search").step_s

    steps = [step(memory) for memory in (float("inf"), 1e12, 4e8, 2e8)]
    assert steps == sorted(steps)


@pytest.mark.parametrize("last", [0, 1])
def test_among_equals_no_devices_share_rows(last: int) -> None:
    """Two copies take as long as one stage of two devices. Copies can be compared with one process, with dropout, too."""
    layer = LayerCost("one", (1.0,), (1.0,), (1.0,), saved_bytes=1.0, parameter_bytes=8.0)
    cluster = cluster_of(((0.0, 1e9), (1e9, 0.0)))
    problem = Problem(Profile((layer,) * 2), cluster, PlanLimits(pp=1, dp=2), microbatches=4, batch=None)
    search = searching.Search(problem)
    wide = next(wide_plans.as_plans(problem, (mw.PlanStage(0, 1, (0, 1)),), 4, None, "test"))
    copies = search.enumerator.run().fit[0]
    found = [search.try_plan(plan) for plan in ((copies, wide) if last else (wide, copies))]
    assert found[0] is not None and found[1] is not None and found[0].step_s == pytest.approx(found[1].step_s, rel=1e-14)
    assert search.pool.best() is found[1 - last]


def test_no_state_is_divided_without_zero() -> None:
    for memory, dp_mode in ((4e8, True), (4e8, False)):
        plan = mw.plan(blocks(14), machine(memory), batch=16, planner="search", dp=2, tensor=False, zero=dp_mode)
        assert ("dp_mode" in plan.parallel) == dp_mode


def test_nothing_fits_says_what_would() -> None:
    with pytest.raises(NothingFitsError, match="no plan fits") as error:
        mw.plan(blocks(14), machine(3e7), batch=16, planner="search")
    needed = error.value.needed_bytes
    assert 3e7 < needed < 1e9
    assert max(mw.plan(blocks(14), machine(needed), batch=16, planner="search").peak_bytes) <= needed
    assert mw.plan(blocks(14), machine(3e7), batch=16, planner="search", memory_free=True).step_s > 0


def test_the_keywords_of_a_plan_are_a_plan() -> None:
    for more in ({}, {"schedule": "chimera", "pp": 4}, {"schedule": "onef1b", "dp": 1}, {"tensor": False}):
        found = mw.plan(blocks(14), machine(3e8), batch=16, planner="search", **more)
        given = {key: value for key, value in found.parallel.items() if key != "ranks"}
        parallel = Parallel.of({key: tuple(value) if key in ("width", "stages") else value for key, value in given.items()})
        assert parallel.processes == len(found.ranks) == len(set(found.ranks)) and max(found.ranks) < 8
        for key, value in more.items():
            assert key == "tensor" or getattr(parallel, key) == value
    assert parallel.tp == 1


def test_the_same_input_gives_the_same_plan() -> None:
    one, other = (mw.plan(blocks(10), machine(2e8), batch=16, planner="search").to_dict() for _ in range(2))
    assert json.dumps(one | {"planning_s": 0}) == json.dumps(other | {"planning_s": 0})


def small(seed: int) -> tuple[SmallModel, Profile, Cluster]:
    """Whole numbers that every width up to four divides, so that times are whole."""
    choose = random.Random(seed)
    count = 4
    forward = tuple(12 * choose.randint(1, 6) for _ in range(count))
    backward = tuple(12 * choose.randint(1, 9) for _ in range(count))
    scale = choose.choice((12, 72, 360))
    output = tuple(scale * choose.randint(0, 6) for _ in range(count))
    weights = tuple(scale * choose.randint(0, 12) for _ in range(count))
    rates = [[0] * count for _ in range(count)]
    for a in range(count):
        for b in range(a):
            rates[a][b] = rates[b][a] = choose.choice((1, 2, 3, 6))
    model = SmallModel(forward, backward, output, weights, choose.choice((2, 4, 6)), tuple(map(tuple, rates)))
    layers = tuple(
        LayerCost(str(n), (float(f),), (float(b),), (0.0,), output_bytes=float(o), parameter_bytes=float(p))
        for n, (f, b, o, p) in enumerate(zip(forward, backward, output, weights, strict=True))
    )
    return model, Profile(layers), cluster_of(tuple(tuple(map(float, row)) for row in rates))


def ratios(seeds: range) -> list[float]:
    found = []
    for seed in seeds:
        model, profile, cluster = small(seed)
        plan = mw.plan(profile, cluster, microbatches=model.microbatches, planner="search")
        found.append(plan.step_s / best_step(model, start=round(plan.step_s)))
    return found


def test_the_optimum_of_small_problems() -> None:
    pytest.importorskip("ortools")
    found = ratios(range(6))
    assert max(found) <= 1.01 and sum(found) / len(found) <= 1.001


@SLOW
def test_the_optimum_of_many_small_problems() -> None:
    found = ratios(range(40))
    assert max(found) <= 1.01 and sum(found) / len(found) <= 1.001


def exhaustive(profile: Profile, cluster: Cluster, microbatches: int) -> float:
    """Every plan with stages of any width, under every schedule with one worker per stage."""
    problem = Problem(profile, cluster, PlanLimits(), microbatches=microbatches, batch=None)
    search = searching.Search(problem)
    best = float("inf")
    for stages in wide_plans.every_plan(problem.layers, problem.kinds):
        if max(microbatches * (cost.forward_s + cost.backward_s) for cost in problem.stage_costs(stages, None)) >= best:
            continue  # its busiest stage alone takes longer
        for each in wide_plans.as_plans(problem, stages, microbatches, None, "test"):
            if (priced := search.pricer.quick(each)) is not None:
                best = min(best, priced.step_s)
    return best


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 20), marks=SLOW)], ids=["some", "all"])
def test_unequal_devices_against_every_plan(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a problem this small the search enumerates all plans; in the first cases it may not, and has to find good ones."""
    if seeds[0] == 0:
        monkeypatch.setattr(_wide_search, "EVERY", 0)
    for seed in seeds:
        choose = random.Random(seed)
        speeds = [choose.choice((1.0, 2.0, 3.0)) for _ in range(4)]
        devices = tuple(Device(f"kind {s}", flops_per_s={"fp32": s}) for s in speeds)
        cluster = replace(cluster_of(random_rates(seed, 4)), devices=devices)
        profile = random_profile(seed, 5)
        found = mw.plan(profile, cluster, microbatches=4, planner="search").step_s
        assert found <= 1.02 * exhaustive(profile, cluster, 4), seed


@SLOW
@pytest.mark.parametrize("seed", range(3))
def test_eight_devices_against_restarts(seed: int) -> None:
    """Random plans, improved until no neighbour is better."""
    profile, cluster = random_profile(seed, 12), cluster_of(random_rates(seed, 8))
    problem = Problem(profile, cluster, PlanLimits(), microbatches=8, batch=None)
    search = searching.Search(problem)

    def time(stages: wide_plans.Stages) -> float:
        found = (search.pricer.quick(each) for each in wide_plans.as_plans(problem, stages, 8, None, "test"))
        return min(priced.step_s for priced in found if priced is not None)

    best = float("inf")
    for start in range(50):
        choose = random.Random(1000 * seed + start)
        count = choose.randint(1, 6)
        devices = choose.sample(range(8), 8)
        cuts = [0, *sorted(choose.sample(range(1, 12), count - 1)), 12]
        marks = [0, *sorted(choose.sample(range(1, 8), count - 1)), 8]
        stages = tuple(mw.PlanStage(cuts[k], cuts[k + 1] - 1, tuple(devices[marks[k] : marks[k + 1]])) for k in range(count))
        step = time(stages)
        for _ in range(6):
            near = list(wide_plans.neighbours(stages, range(8), 12))
            better = next((each for each in choose.sample(near, min(12, len(near))) if time(each) < step), None)
            if better is None:
                break
            stages, step = better, time(better)
        best = min(best, step)
    assert mw.plan(profile, cluster, microbatches=8, planner="search").step_s <= 1.02 * best


def test_a_search_says_how_far_it_is() -> None:
    """Anytime: the first plan comes before the rest, each is better than the one before, and progress is reported."""
    said: list[tuple[float, str]] = []
    limits = PlanLimits(progress=lambda done, found: said.append((done, found)))
    problem = Problem(blocks(14), machine(2e8), limits, microbatches=None, batch=16)
    plans = list(searching.Search(problem).run())
    assert len(plans) >= 2 and plans[0].counts["simulated"] < plans[-1].counts["simulated"]
    assert all(a.step_s >= b.step_s for a, b in pairwise(plans))
    shares = [done for done, _ in said]
    assert shares == sorted(shares) and 0 <= shares[0] <= shares[-1] <= 1 and "best step" in said[-1][1]


def test_a_bar_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for quiet, terminal in ((False, False), (True, True), (False, True)):
        monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
        monkeypatch.delenv("NO_COLOR" if terminal else "FORCE_COLOR", raising=False)
        with SearchBar(quiet=quiet) as bar:
            bar.at(0.5, "12 plans bounded")
        out = capsys.readouterr()
        assert not out.out and ("12 plans" in out.err) == (terminal and not quiet)


def test_a_launch_cost_makes_small_stages_dear() -> None:
    free, dear = (mw.plan(blocks(14), machine(1e12, launch_s=s), batch=16, planner="search") for s in (0.0, 5e-3))
    assert dear.step_s > free.step_s and dear.row["microbatches"] * len(dear.stages) < free.row["microbatches"] * len(free.stages)


def test_the_even_planner() -> None:
    found = mw.plan(blocks(14), machine(1e12), batch=16, planner="even")
    assert found.planner == "even" and found.row["schedule"] == "onef1b" and found.row["pp"] == 8
    assert found.step_s >= mw.plan(blocks(14), machine(1e12), batch=16, planner="search").step_s


CLUSTER = """schema = 1
[device.v100]
memory = "{memory}"
[[nodes]]
count = 2
per_node = 4
device = "v100"
inside = {{bytes_per_s = 25e9}}
card = {{bytes_per_s = 3e9}}
"""


def run(tmp_path: Path, memory: str, *more: str) -> tuple[int, str]:
    (tmp_path / "c.toml").write_text(CLUSTER.format(memory=memory))
    flags = ["plan", "--profile", str(ROOT / "tests/data/bert-24-pbs-6.txt"), "--cluster", str(tmp_path / "c.toml")]
    found = CliRunner().invoke(app, [*flags, "-n", "8", "--planner", "search", *more])
    return found.exit_code, found.stdout


def test_the_verb_explains(tmp_path: Path) -> None:
    code, text = run(tmp_path, "16 GB", "-o", str(tmp_path / "plan.json"))
    assert code == 0
    for part in (
        "assumed and measured:",
        "searched:",
        "the best simulated plan of each schedule",
        "<- chosen",
        "slower by",
        "by cause:",
    ):
        assert part in text
    for part in ("memory of the tightest worker", "rank layout:", "each choice against its nearest simulated rival", "next:"):
        assert part in text
    planned = json.loads((tmp_path / "plan.json").read_text())
    assert planned["kind"] == "plan" and planned["predicted"]["step_s"] > 0
    again = CliRunner().invoke(app, ["simulate", str(tmp_path / "plan.json"), "--cluster", str(tmp_path / "c.toml"), "--json"])
    assert json.loads(again.stdout)["plan"]["ratio_to_predicted"] == pytest.approx(1.0), "the file says what the plan costs"
    found = json.loads(run(tmp_path, "16 GB", "--json")[1])
    keys = {"step_s", "paper_step_s", "lower_bound_s", "gap", "stages", "parallel", "peak_bytes", "alternatives", "planning_s"}
    assert keys <= set(found) and found["gap"] >= 0 and found["counts"]["proved"] >= 1


def test_the_verb_says_what_would_fit(tmp_path: Path) -> None:
    code, text = run(tmp_path, "0.3 GB", "--json")
    assert code == 3
    needed = json.loads(text)["needed_bytes"]
    assert run(tmp_path, f"{needed}B", "--no-explain")[0] == 0
    assert run(tmp_path, "0.3 GB", "--memory-free", "--no-explain")[0] == 0


def test_a_fixed_schedule_and_pipeline(tmp_path: Path) -> None:
    code, text = run(tmp_path, "16 GB", "--schedule", "chimera", "--pp", "4", "--json")
    found = json.loads(text)
    assert code == 0 and found["parallel"]["schedule"] == "chimera" and found["parallel"]["pp"] == 4


@pytest.mark.parametrize("seed", range(8))
def test_a_search_without_time_proves_nothing_about_what_it_did_not_try(seed: int) -> None:
    """Its lower bound holds for plans with stages of any width too, and it says that it ended early."""
    profile, cluster = random_profile(seed, 5), cluster_of(random_rates(seed, 4))
    whole = mw.plan(profile, cluster, planner="search", microbatches=6, tensor=False)
    ended = mw.plan(profile, cluster, planner="search", microbatches=6, tensor=False, seconds=0.0)
    assert ended.lower_bound_s <= whole.step_s * (1 + 1e-9) <= ended.step_s * (1 + 1e-6)
    assert any("ended before its work was done" in note for note in ended.notes)
    assert not any("ended before" in note for note in whole.notes)
