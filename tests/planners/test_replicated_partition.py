"""The dynamic programme of SPP against every plan there is, and its laws."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import Profile
from meshwright.planners._replicated_partition import Cutting, cuttings
from tests.support.plans import Rates, all_plans, bottleneck, random_profile, random_rates, solved_bottleneck

SIZES = [(2, 2), (3, 2), (4, 3), (5, 4), (7, 5), (6, 4), (1, 3), (4, 1)]
M = 4


def found(profile: Profile, rates: Rates, microbatches: int = M, **more: bool) -> list[Cutting]:
    shares = {width: profile.shared(None, width) for width in range(1, len(rates) + 1)}
    return cuttings(shares, rates, microbatches, **more)


def widths(cutting: Cutting) -> list[int]:
    return [len(places) for places in cutting.places]


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize(("layers", "devices"), SIZES)
def test_no_plan_has_a_smaller_bottleneck(layers: int, devices: int, seed: int) -> None:
    """Over 500 pairs of a problem and a number of stages; each plan found costs what the table says."""
    profile, rates, count = random_profile(seed, layers), random_rates(seed, devices), 1 + seed % 9
    cuts = found(profile, rates, count)
    assert len(cuts) == min(layers, devices)
    for stages, cutting in enumerate(cuts, start=1):
        assert len(cutting.ends) == stages and cutting.ends[-1] == layers and cutting.used[-1] <= devices
        own = bottleneck(profile, rates, count, cutting.ends, widths(cutting))
        best = min(bottleneck(profile, rates, count, ends, wide) for ends, wide in all_plans(layers, devices, stages))
        assert own == pytest.approx(cutting.bottleneck_s, rel=1e-12) and own == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_a_mixed_integer_program_finds_the_same(seed: int) -> None:
    """36 pairs of a problem and a number of stages."""
    pytest.importorskip("scipy")
    profile, rates = random_profile(seed, 4), random_rates(seed, 3)
    for stages, cutting in enumerate(found(profile, rates), start=1):
        assert cutting.bottleneck_s == pytest.approx(solved_bottleneck(profile, rates, M, stages), rel=1e-6)


def test_all_devices_can_be_asked_for() -> None:
    profile, rates = random_profile(3, 6), random_rates(3, 5)
    assert all(cutting.used[-1] == 5 for cutting in found(profile, rates, all_devices=True))


@pytest.mark.parametrize("seed", range(20))
def test_faster_links_and_smaller_layers_never_hurt(seed: int) -> None:
    profile, rates = random_profile(seed, 6), random_rates(seed, 4)
    faster = tuple(
        tuple(rate * (2 if {a, b} == {seed % 4, (seed + 1) % 4} else 1) for b, rate in enumerate(row))
        for a, row in enumerate(rates)
    )
    first, *rest = profile.layers
    smaller = [replace(first, forward_s=(first.forward_s[0] / 2,))]
    smaller += [replace(first, output_bytes=first.output_bytes / 2), replace(first, parameter_bytes=first.parameter_bytes / 2)]
    others = [(profile, faster), *((replace(profile, layers=(each, *rest)), rates) for each in smaller)]
    for other in others:
        for before, after in zip(found(profile, rates), found(*other), strict=True):
            assert after.bottleneck_s <= before.bottleneck_s * (1 + 1e-12)


def test_times_and_sizes_scale() -> None:
    profile, rates = random_profile(5, 6), random_rates(5, 4)
    three = [
        replace(
            layer,
            forward_s=(3 * layer.forward_s[0],),
            input_s=(3 * layer.input_s[0],),
            weight_s=(3 * layer.weight_s[0],),
            output_bytes=3 * layer.output_bytes,
            parameter_bytes=3 * layer.parameter_bytes,
        )
        for layer in profile.layers
    ]
    for one, other in zip(found(profile, rates), found(Profile(tuple(three)), rates), strict=True):
        assert other.bottleneck_s == pytest.approx(3 * one.bottleneck_s) and other.ends == one.ends


def test_free_links_and_no_parameters_make_data_parallelism_optimal() -> None:
    layers = tuple(replace(layer, parameter_bytes=0.0) for layer in random_profile(1, 5).layers)
    free = tuple(tuple(float("inf") for _ in range(4)) for _ in range(4))
    work = sum(layer.forward_s[0] + layer.input_s[0] + layer.weight_s[0] for layer in layers)
    assert found(Profile(layers), free)[0].bottleneck_s == pytest.approx(M * work / 4)


def test_only_some_widths() -> None:
    profile, rates = random_profile(2, 6), random_rates(2, 5)
    shares = {width: profile.shared(None, width) for width in (1, 3)}
    assert {width for cutting in cuttings(shares, rates, M) for width in widths(cutting)} <= {1, 3}
