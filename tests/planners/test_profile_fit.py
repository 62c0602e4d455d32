"""Profiles that do not fit a request are refused, or the plan says so: another device or precision, too few rows.

A batch of too many microbatches is refused too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("numpy")

import meshwright as mw
from meshwright import Cluster, Device, Host, LayerCost, Link, Profile
from meshwright.costs.stages import device_slowness
from meshwright.ir.links.machines import same_kind
from meshwright.ir.profile import ProfileSource
from meshwright.planners._limits import MOST_MICROBATCHES, PlanLimits
from meshwright.planners._search.problem import Problem
from meshwright.planners._search.wide_plans import steps_of

A100 = Device("a100", flops_per_s={"bf16": 250e12, "fp32": 17e12})
V100 = Device("v100", flops_per_s={"fp16": 90e12, "fp32": 13.5e12})


def cluster_of(*devices: Device) -> Cluster:
    link = Link(1e-6, 1e10)
    return Cluster(devices=devices, hosts=(Host(len(devices), link, link),))


def profile_of(**fields: Any) -> Profile:
    """Four layers whose weights dominate: four rows take little longer than one."""
    times = (1.0e-3, 1.1e-3, 1.3e-3)
    layers = tuple(LayerCost(f"layer {n}", times, times, times, output_bytes=1e3, flops=1e9) for n in range(4))
    return Profile(layers, **{"rows": (1, 2, 4), **fields})


def planned(profile: Profile, *devices: Device, **asked: Any) -> mw.Plan:
    return mw.plan(profile, cluster_of(*devices), **{"planner": "search", "batch": 8, **asked})


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a100", "NVIDIA A100-SXM4-80GB", True),
        ("a100-sxm4-80gb", "NVIDIA A100-SXM4-80GB", True),
        ("rtx3090", "NVIDIA GeForce RTX 3090", True),
        ("core", "core of x86_64", True),
        ("cpu", "core of aarch64", True),
        ("a10", "NVIDIA A100-SXM4-80GB", False),
        ("h100", "a100", False),
        ("core", "a100", False),
        ("c", "core of x86_64", False),
        ("a100", "a100sxm", False),
        ("", "a100", False),
    ],
)
def test_names_of_one_kind_of_device(one: str, other: str, same: bool) -> None:
    assert same_kind(one, other) is same and same_kind(other, one) is same


def test_times_of_another_device_are_refused() -> None:
    profile = profile_of(device="a100", precision="bf16", source=ProfileSource.ESTIMATED)
    with pytest.raises(mw.MeshwrightError, match="the times of a100, but the devices of the cluster are h100") as caught:
        planned(profile, Device("h100", flops_per_s={"bf16": 700e12}))
    assert caught.value.fix is not None and "meshwright profile MODEL --precision bf16 --cluster CLUSTER" in caught.value.fix
    with pytest.raises(
        mw.MeshwrightError, match=r"a100, .* are v100, for which the cluster has no speed in bf16, only in fp16, fp32"
    ):
        planned(profile, V100)


def test_times_of_a_device_that_may_be_this_one_are_taken() -> None:
    bf16 = profile_of(device="NVIDIA A100-SXM4-80GB", precision="bf16", source=ProfileSource.MEASURED)
    assert planned(bf16, A100).step_s > 0
    assert planned(bf16, Device("h100")).step_s > 0, "nothing is known about its speed"
    assert planned(profile_of(), V100).step_s > 0, "a published profile does not name its device"


def test_devices_of_several_kinds_are_scaled_by_speed() -> None:
    profile = profile_of(device="NVIDIA A100-SXM4-80GB", precision="fp32")
    assert device_slowness(profile, cluster_of(V100, A100)) == pytest.approx([17 / 13.5, 1.0])
    assert planned(profile, A100, V100).step_s > 0
    noted = planned(replace(profile, precision="bf16"), A100, V100).notes
    assert "the cluster does not tell what v100 achieves in bf16: its best speed is assumed" in noted


def test_a_precision_that_no_device_has_is_refused() -> None:
    estimated = profile_of(device="v100", precision="bf16", source=ProfileSource.ESTIMATED)
    with pytest.raises(mw.MeshwrightError, match=r"the profile is in bf16, .* v100, .* only in fp16, fp32") as caught:
        planned(estimated, V100)
    assert caught.value.fix is not None and "--precision fp16" in caught.value.fix
    assert planned(replace(estimated, source=ProfileSource.MEASURED), V100).step_s > 0, "it ran there"


def test_only_rows_of_the_profile_are_searched() -> None:
    problem = Problem(profile_of(), cluster_of(A100, A100), PlanLimits(), microbatches=None, batch=64)
    assert problem.row_choices == [1, 2, 4]
    plan = planned(profile_of(), A100, A100, batch=64)
    assert plan.row["rows"] <= 4
    (note,) = [note for note in plan.notes if "the profile has times" in note]
    assert note == (
        "the profile has times for 1, 2, 4 rows, so microbatches of more rows are not searched "
        "(meshwright profile MODEL --rows 1,2,4,8,16,32,64 -o profile.json)"
    ), "one copy may run them all"
    assert not any("the profile has times" in note for note in planned(profile_of(), A100, A100, batch=4).notes)


def test_stages_of_any_width_are_tried_with_long_and_short_microbatches() -> None:
    """For a pipeline of all devices, for 16 microbatches, and for 4: the most rows for each. On few devices all rows."""
    times = (1e-3,) * 8
    layers = tuple(replace(x, forward_s=times, input_s=times, weight_s=times) for x in profile_of().layers)
    many = Profile(layers, rows=(1, 2, 4, 8, 16, 32, 64, 128))
    problem, few = (Problem(many, cluster_of(*[A100] * n), PlanLimits(), microbatches=None, batch=256) for n in (12, 8))
    assert steps_of(problem) == [(64, 4), (16, 16), (4, 64)]
    assert [rows for _, rows in steps_of(few)] == list(many.rows)


@pytest.mark.parametrize("asked", [{"planner": "spp", "batch": None, "microbatches": 4}, {"batch": 48}])
def test_extrapolated_times_are_noted(asked: dict[str, Any]) -> None:
    plan = planned(profile_of(), A100, A100, rows=12, **asked)
    (note,) = [note for note in plan.notes if "the profile has times" in note]
    assert note == (
        "the profile has times for 1, 2, 4 rows: times for up to 12 rows are extrapolated and may be too short "
        "(meshwright profile MODEL --rows 1,2,4,8,12 -o profile.json)"
    )


def test_a_batch_has_no_more_microbatches_than_can_be_simulated() -> None:
    most = MOST_MICROBATCHES * 4 * 2
    for planner in mw.planners.names():
        with pytest.raises(mw.MeshwrightError, match=f"{most + 8} rows is too long .* it has 16385 of them") as caught:
            planned(profile_of(), A100, A100, batch=most + 8, planner=planner)
        assert caught.value.fix is not None and caught.value.fix.startswith(f"--batch {most},")
        with pytest.raises(mw.MeshwrightError, match="99991 rows cannot be cut into at most 16384 equal microbatches") as caught:
            planned(profile_of(), A100, A100, batch=99991, planner=planner)
        assert caught.value.fix == "--batch 99984"
    problem = Problem(profile_of(), cluster_of(A100, A100), PlanLimits(), microbatches=None, batch=most)
    assert problem.splits(2) == [(4, 1, MOST_MICROBATCHES)] and problem.splits(1) == []


def test_spp_chooses_the_rows_of_a_batch() -> None:
    plan = planned(profile_of(), A100, A100, planner="spp", batch=32)
    others = [planned(profile_of(), A100, A100, planner="spp", batch=32, rows=rows).step_s for rows in (1, 2, 4)]
    assert plan.step_s == min(others) and plan.name.endswith("8 x 4 rows")
    assert planned(profile_of(), A100, A100, planner="spp", batch=7).microbatches == 7


def test_spp_says_if_no_rows_of_a_batch_fit() -> None:
    small = replace(A100, memory_bytes=1e3)
    heavy = profile_of()
    heavy = replace(heavy, layers=tuple(replace(layer, parameter_bytes=1e6) for layer in heavy.layers))
    with pytest.raises(mw.planners.NothingFitsError, match="plans of spp fits"):
        planned(heavy, small, small, planner="spp", batch=8)


@pytest.mark.parametrize(
    ("asked", "fix"),
    [
        ({"batch": None, "microbatches": 4}, "--rows 8, or --batch 64"),
        ({"batch": 0}, "--batch 16"),
        ({"batch": None}, "--microbatches 16, or --batch 64"),
        ({"rows": 0}, "--rows 16"),
    ],
)
def test_fixes_can_be_typed(asked: dict[str, Any], fix: str) -> None:
    with pytest.raises(mw.MeshwrightError) as caught:
        planned(profile_of(), A100, **asked)
    assert caught.value.fix == fix
