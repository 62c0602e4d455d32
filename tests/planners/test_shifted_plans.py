"""Plans under the shifted critical path: they recompute by actions of their own, on all stages but the last."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("numpy")

import meshwright as mw
from meshwright import Cluster, Device, Host, LayerCost, Link, MeshwrightError, Profile
from meshwright.planners._planned_text import planned_text
from tests.support.command import meshwright

BLOCK = LayerCost(
    "block", (1e-3, 2e-3, 4e-3), (1e-3, 2e-3, 4e-3), (1e-3, 2e-3, 4e-3), output_bytes=1e5, saved_bytes=1e7, parameter_bytes=1e6
)
PROFILE = Profile(tuple(replace(BLOCK, name=f"block {n}") for n in range(12)), rows=(1, 2, 4))
STEP = {"microbatches": 16, "rows": 4, "planner": "search", "tensor": False}


def machine(memory: float, speeds: tuple[float, ...] = (1e13,) * 4) -> Cluster:
    devices = tuple(Device(f"kind {speed:g}", memory, {"fp32": speed}, bytes_per_s=1e12) for speed in speeds)
    return Cluster(devices=devices, hosts=(Host(len(devices), Link(1e-6, 1e10), Link(1e-5, 1e10)),))


def test_it_is_chosen_where_activations_do_not_fit(tmp_path: Path) -> None:
    """A file says what is recomputed, and its simulation gives the prediction and the memory back."""
    cluster = machine(1.5e8)
    plan = mw.plan(PROFILE, cluster, pp=4, dp=1, **STEP)
    assert plan.parallel["schedule"] == "shifted" and "recompute" not in plan.parallel
    assert [stage.recompute for stage in plan.stages] == [1.0, 1.0, 1.0, 0.0]
    assert max(plan.peak_bytes) <= 1.5e8 and plan.lower_bound_s <= plan.step_s
    others = {each.row["schedule"]: each.step_s for each in plan.alternatives if each.row and each.row["recompute"]}
    assert others["onef1b"] > plan.step_s
    path, machine_file = tmp_path / "plan.json", tmp_path / "cluster.toml"
    path.write_text(planned_text(plan, PROFILE, cluster, batch=None))
    machine_file.write_text(mw.cluster_to_toml(cluster))
    done = meshwright("simulate", str(path), "--cluster", str(machine_file), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["ratio_to_predicted"] == pytest.approx(1.0, rel=1e-9)


def test_a_file_with_other_shares_is_refused() -> None:
    cluster = machine(1.5e8)
    plan = mw.plan(PROFILE, cluster, pp=4, dp=1, **STEP)
    data = json.loads(planned_text(plan, PROFILE, cluster, batch=None))
    data["stages"][1]["recompute"] = 0.0
    with pytest.raises(MeshwrightError, match="stage 1 of a plan file recomputes a share of 0"):
        mw.plan_from_json(json.dumps(data))


@pytest.mark.parametrize("memory", [float("inf"), 2e8])
def test_stages_with_several_devices(memory: float) -> None:
    """Five devices of two speeds: the best plan gives a stage more than one of them, and its engine agrees with the search."""
    cluster = machine(memory, (1e13, 1e13, 5e12, 5e12, 5e12))
    plan = mw.plan(PROFILE, cluster, schedule="shifted", **STEP)
    shares = [stage.recompute for stage in plan.stages]
    assert shares == [1.0] * (len(shares) - 1) + [0.0]
    assert max(plan.peak_bytes) <= memory
    lines = [mw.plan(PROFILE, cluster, schedule="shifted", pp=pp, dp=1, **STEP).step_s for pp in (2, 3, 4, 5)]
    assert plan.step_s == pytest.approx(min(lines), rel=1e-9)


def test_one_device_recomputes_nothing_early() -> None:
    with pytest.raises(MeshwrightError, match="shifted does not run with"):
        mw.plan(PROFILE, machine(float("inf")), schedule="shifted", pp=1, **STEP)
