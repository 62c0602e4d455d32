"""`plan.json` of a planner: what is written is read back, what does not belong there is refused, and it is what runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import (
    Cluster,
    MeshwrightError,
    Parallel,
    Plan,
    PlanStage,
    StageCost,
    plan_file_json,
    plan_from_json,
    plan_to_json,
    planned_file,
    runnable,
    schedules,
)
from meshwright.ir.cluster import Link
from meshwright.ir.plan.plan_file import asked
from meshwright.ir.plan.planned_file import PlannedFile, changed_inputs, digest_of, is_plan_file, parallel_input

COSTS = tuple(StageCost(f, i, w) for f, i, w in ((1.0, 2.0, 0.5), (0.3, 1.4, 1.1), (2.0, 0.7, 0.9), (0.4, 0.4, 2.0)))
STAGES = (
    {"layers": [0, 3], "devices": [2, 0], "width": 2, "recompute": 0.5},
    {"layers": [4, 5], "devices": [3], "width": 1, "recompute": 0.0},
)
PLAN = Parallel(pp=2, width=(2, 1), stages=(4,), ranks=(2, 0, 3), recompute=(0.5, 0.0))
"""What these stages describe."""
PREDICTED = {"step_s": 0.5, "lower_bound_s": 0.4, "peak_bytes": [1e9, 2e9, 3e9], "bubble_ratio": 0.1}
MADE_FOR = {"profile": {"digest": "ab"}, "cluster": {"digest": "cd"}, "batch": 64, "precision": "bf16"}


def test_a_planned_file_keeps_everything(tmp_path: Path) -> None:
    plan = replace(PLAN, schedule="listed", microbatches=4, costs=COSTS[:2])
    path = tmp_path / "plan.json"
    path.write_text(plan_file_json(plan, stages=STAGES, predicted=PREDICTED, made_for=MADE_FOR))
    found = planned_file(path)
    assert (found.parallel, found.stages, found.predicted, found.made_for) == (plan, STAGES, PREDICTED, MADE_FOR)
    data = json.loads(path.read_text())
    assert (data["schema"], data["kind"]) == (2, "plan")
    assert Parallel.of(asked(str(path))) == plan == plan_from_json(path.read_text()), "whatever takes a plan file takes this one"
    assert is_plan_file(path.read_text()) and is_plan_file(plan_to_json(plan))


def test_a_file_of_schema_1_is_still_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(Parallel(pp=2, ranks=(1, 0))))
    found = planned_file(path)
    assert json.loads(path.read_text())["schema"] == 1
    assert found.parallel == Parallel(pp=2, ranks=(1, 0)) and not found.stages and found.predicted is None


@pytest.mark.parametrize("name", ["zero_bubble", "listed", "onef1b"])
def test_an_order_that_costs_have_shaped_is_kept(name: str) -> None:
    """Built again without its costs, the order would be another one: this test would fail without `order` in the file."""
    options: dict[str, Any] = {"zero_bubble": {"variant": "auto", "memory": 6}, "listed": {"strict": False}, "onef1b": {}}[name]
    plan = Parallel(pp=4, schedule=name, options=options, microbatches=6, costs=COSTS)
    kept = schedules.with_order(plan, Cluster(Link(0.3)))
    if name == "onef1b" and "costs" not in schedules.parameters(name):
        assert kept is plan
        return
    built = schedules.build(name, workers=4, microbatches=6, costs=COSTS, cluster=Cluster(Link(0.3)), **options)
    assert kept.order is not None and kept.order.lists == built.lists
    assert (kept.schedule, dict(kept.options), kept.costs, kept.pp, kept.microbatches) == (name, options, COSTS, 4, 6)
    read = plan_from_json(plan_file_json(kept))
    assert read == kept and read.order is not None and read.order.lists == built.lists
    if name == "zero_bubble":
        assert built.lists != schedules.build(name, workers=4, microbatches=6, **options).lists, "the costs matter"


def test_schedules_that_take_no_costs_and_orders_are_left_alone() -> None:
    plain = Parallel(pp=2, schedule="gpipe", microbatches=4)
    cyclic = Parallel(dp=3, dp_mode="cyclic")
    own = Parallel(order=schedules.build("zero_bubble", workers=2, microbatches=2))
    assert all(schedules.with_order(plan) is plan for plan in (plain, cyclic, own))


# -- refusals

BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"kind": "timeline"}, "its kind is 'timeline'"),
    "no kind": ({"kind": None}, "its kind is None"),
    "schema": ({"schema": 3}, "schema 3, this version reads up to 2"),
    "unknown": ({"more": 1}, "unknown keys: more"),
    "stages": ({"stages": {}}, "is not a list"),
    "layers": ({"stages": [{"layers": [4, 3], "devices": [0]}]}, "begins with layer 4 and ends with layer 3"),
    "one layer": ({"stages": [{"layers": [4], "devices": [0]}]}, "'stages' of a plan file is malformed"),
    "no devices": ({"stages": [{"layers": [0, 3], "devices": []}]}, "runs on the devices"),
    "twice": ({"stages": [{"layers": [0, 3], "devices": [1, 1]}]}, "runs on the devices"),
    "width": ({"stages": [{"layers": [0, 3], "devices": [1], "width": 2}]}, "has the width 2"),
    "share": ({"stages": [{"layers": [0, 3], "devices": [1], "recompute": 2}]}, "recomputes a share of 2"),
    "stage key": ({"stages": [{"layers": [0, 3], "devices": [1], "color": 2}]}, "a stage has no 'color'"),
    "step": ({"predicted": {"step_s": -1}}, "-1 is not a number"),
    "peak": ({"predicted": {"peak_bytes": ["many"]}}, "'many' is not a number"),
    "error": ({"predicted": {"error": -2.0}}, "-2.0 is not a number"),
    "made for": ({"made_for": []}, "is not a table"),
    "ranks": ({"parallel": {"pp": 2, "ranks": [0, 1, 2]}}, "ranks names 3 ranks, but the plan needs pp 2 x dp 1 = 2"),
    "ranks twice": ({"parallel": {"pp": 2, "ranks": [1, 1]}}, "ranks names rank 1 2 times"),
}


@pytest.mark.parametrize(("change", "text"), BROKEN.values(), ids=BROKEN)
def test_what_is_no_plan_is_refused(change: dict[str, Any], text: str) -> None:
    data = json.loads(plan_file_json(PLAN, stages=STAGES, predicted=PREDICTED, made_for=MADE_FOR))
    with pytest.raises(MeshwrightError, match=text):
        plan_from_json(json.dumps({**data, **change}))


CONTRADICTIONS: dict[str, tuple[list[list[int]], list[list[int]], str]] = {
    "late": ([[1, 3], [4, 5]], [[2, 0], [3]], "begins with layer 1, not with layer 0"),
    "overlap": ([[0, 4], [4, 5]], [[2, 0], [3]], "ends with layer 4, and the next one begins with layer 4"),
    "gap": ([[0, 2], [4, 5]], [[2, 0], [3]], "ends with layer 2, and the next one begins with layer 4"),
    "cuts": ([[0, 2], [3, 5]], [[2, 0], [3]], r"begin with the layers \[3\], but its 'parallel' has stages \[4\]"),
    "fewer": ([[0, 5]], [[2, 0, 3]], r"begin with the layers \[\], but its 'parallel' has stages \[4\]"),
    "devices": ([[0, 3], [4, 5]], [[2, 0], [7]], r"run on the devices \[0, 2, 7\], but its ranks are \[0, 2, 3\]"),
    "a team": ([[0, 3], [4, 5]], [[2], [0, 3]], r"stage 0 .* on the devices \[2\], which are not whole workers"),
}


@pytest.mark.parametrize(("layers", "devices", "text"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_stages_that_contradict_the_plan_are_refused(
    tmp_path: Path, layers: list[list[int]], devices: list[list[int]], text: str
) -> None:
    data = json.loads(plan_file_json(PLAN, stages=STAGES))
    data["stages"] = [{"layers": a, "devices": b} for a, b in zip(layers, devices, strict=True)]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    for read in (planned_file, asked, lambda path: plan_from_json(path.read_text())):
        with pytest.raises(MeshwrightError, match=text):
            read(path)


@pytest.mark.parametrize(("shares", "mode"), [((1.0, 0.0), None), ((0.0, 0.0), "inline"), ((1.0, 1.0), "none")])
def test_a_recompute_that_the_plan_does_not_have_is_refused(shares: tuple[float, float], mode: str | None) -> None:
    stages = [{**stage, "recompute": share} for stage, share in zip(STAGES, shares, strict=True)]
    with pytest.raises(MeshwrightError, match="stage 0 of a plan file recomputes a share of"):
        plan_from_json(plan_file_json(replace(PLAN, recompute=mode), stages=stages))
    plain = [{key: value for key, value in stage.items() if key != "recompute"} for stage in STAGES]
    assert plan_from_json(plan_file_json(replace(PLAN, recompute="inline"), stages=plain)).recompute == "inline"


def test_ranks_that_were_changed_without_the_stages_are_refused() -> None:
    """Also where a worker has several stages, as in a V. Stages that several workers hold name all of them."""
    stages = [{"layers": [k, k], "devices": [device]} for k, device in enumerate((5, 3, 3, 5))]
    data = json.loads(plan_file_json(Parallel(pp=2, schedule="zbv", stages=(1, 2, 3), ranks=(5, 3)), stages=stages))
    data["parallel"]["ranks"] = [3, 5]
    with pytest.raises(MeshwrightError, match=r"stage 0 of a plan file runs on the devices \[5\], but by its ranks on \[3\]"):
        plan_from_json(json.dumps(data))
    both = [{"layers": [k, k], "devices": [0, 1]} for k in range(2)]
    plan_file_json(Parallel(pp=2, schedule="chimera", stages=(1,)), stages=both)
    copies = [{"layers": [0, 1], "devices": [3, 2]}, {"layers": [2, 3], "devices": [0, 4]}]
    plan_file_json(Parallel(pp=2, dp=2, stages=("a.b",), ranks=(3, 0, 2, 4)), stages=copies)


def test_what_json_does_not_have_is_not_written() -> None:
    for bad in ({"step_s": float("nan")}, {"step_s": -1.0}, {"more": {1, 2}}):
        with pytest.raises(MeshwrightError):
            plan_file_json(Parallel(pp=2), predicted=bad)


# -- from a planner to what runs


@st.composite
def chosen(draw: st.DrawFn) -> Plan:
    widths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    layers = draw(st.lists(st.integers(1, 4), min_size=len(widths), max_size=len(widths)))
    devices = draw(st.permutations(range(sum(widths) + 2)))
    stages, layer, used = [], 0, 0
    for width, count in zip(widths, layers, strict=True):
        stages.append(PlanStage(layer, layer + count - 1, tuple(devices[used : used + width])))
        layer, used = layer + count, used + width
    return Plan("spp", tuple(stages), 4, step_s=1.0, lower_bound_s=1.0, peak_bytes=(0.0,) * used)


@settings(deadline=None, max_examples=40)
@given(chosen())
def test_a_chosen_plan_runs_its_stages_on_its_devices(plan: Plan) -> None:
    found = runnable(plan)
    assert found.ranks == tuple(device for stage in plan.stages for device in stage.devices)
    assert found.stages == tuple(stage.first for stage in plan.stages[1:]) and found.microbatches == plan.microbatches
    assert found.workers == len(found.ranks) and (found.width or (1,) * len(plan.stages)) == plan.widths
    order = schedules.with_order(found).order
    assert order is not None and order.stages == len(plan.stages)
    again = runnable(plan, order=order, costs=[StageCost(1.0, 1.0, 1.0)] * len(plan.stages))
    assert again.order == order and again.ranks == found.ranks and again.schedule == "listed"
    assert plan_from_json(plan_file_json(again)) == again


def test_stages_that_leave_out_layers_do_not_run() -> None:
    for first, second in (((0, 1), (3, 4)), ((1, 1), (2, 4))):
        stages = (PlanStage(*first, (0,)), PlanStage(*second, (1,)))
        with pytest.raises(MeshwrightError, match="layer"):
            runnable(Plan("spp", stages, 4, step_s=1.0, lower_bound_s=1.0, peak_bytes=(0.0, 0.0)))


def test_a_plan_that_was_edited_says_so() -> None:
    """Other microbatches, cuts, costs or options than the planner wrote; another form of the same file is no edit."""
    text = plan_file_json(PLAN, stages=STAGES, predicted=PREDICTED, made_for={**MADE_FOR, "parallel": parallel_input(PLAN)})
    assert PlannedFile.of(json.loads(text)).changes({}) == ()
    data = json.loads(json.dumps(json.loads(text), indent=4, sort_keys=True))
    assert PlannedFile.of(data).changes({"batch": 32}) == ("batch was 64, is 32",)
    data["parallel"]["microbatches"] = 7
    assert PlannedFile.of(data).changes({}) == ("parallel was 'as planned', is 'edited'",)


def test_inputs_that_changed_are_named() -> None:
    now = {"profile": {"digest": "ab"}, "cluster": {"digest": "xy"}, "batch": 32, "length": 5}
    assert changed_inputs(MADE_FOR, now) == ("batch was 64, is 32", "cluster was 'cd', is 'xy'")
    same = [{"cluster": {"digest": digest, "text": "2 devices"}} for digest in ("ab", "cd")]
    assert changed_inputs(*same) == ("cluster is another one, although both are described as '2 devices'",)
    assert digest_of({"a": 1, "b": [2.5]}) == digest_of('{"b": [2.5], "a": 1}') != digest_of({"a": 1, "b": [2.6]})
