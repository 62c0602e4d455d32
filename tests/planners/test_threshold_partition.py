"""The tables of stages under a limit against every plan there is, and their size."""

from __future__ import annotations

from itertools import accumulate

import pytest

pytest.importorskip("numpy")

import numpy as np

from meshwright.planners._search.cuts.threshold_partition import ThresholdTable, _windows
from tests.support.plans import all_plans, random_profile, random_rates

M = 4


@pytest.mark.parametrize(
    ("count", "widths"), [(1, [1]), (2, [1, 2]), (7, [1, 2, 3, 4, 5, 6, 7]), (12, [2, 3, 7]), (20, [1, 8, 20])]
)
def test_the_slowest_link_of_neighbours(count: int, widths: list[int]) -> None:
    rates = np.array(random_rates(count, count))
    inside, between = _windows(rates, np.array(widths))
    for i in range(count + 1):
        for k, r in enumerate(widths):
            own = [rates[a, b] for a in range(i - r, i) for b in range(i - r, i) if a != b and i >= r]
            assert inside[i, k] == min(own, default=np.inf)
            for j, before in enumerate(widths):
                pairs = [rates[a, b] for a in range(i - r - before, i - r) for b in range(i - r, i) if i >= r + before]
                assert between[i, k, j] == min(pairs, default=np.inf)


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_under_the_limit_has_a_shorter_round_trip(seed: int) -> None:
    """Every cut and every width, for several limits; under the least limit there is none."""
    layers, devices = 3 + seed % 4, 2 + seed % 3
    profile, rates = random_profile(seed, layers), np.array(random_rates(seed, devices))
    work = np.array([layer.forward_s[0] + layer.input_s[0] + layer.weight_s[0] for layer in profile.layers])
    sizes = np.array([layer.parameter_bytes for layer in profile.layers])
    outputs = np.array([layer.output_bytes for layer in profile.layers])
    table = ThresholdTable({r: work / r for r in range(1, devices + 1)}, sizes, outputs, rates, M)

    def trip_and_busiest(ends: tuple[int, ...], used: tuple[int, ...]) -> tuple[float, float]:
        trip = busiest = 0.0
        for n, (first, end, start, stop) in enumerate(zip((0, *ends), ends, (0, *used), used, strict=False)):
            width = stop - start
            slowest = min((rates[a, b] for a in range(start, stop) for b in range(start, a)), default=np.inf)
            own = work[first:end].sum() / width
            busiest = max(busiest, M * own + 2 * (width - 1) / width * sizes[first:end].sum() / slowest)
            trip += own
            if n:
                before = start - (used[n - 2] if n > 1 else 0)
                link = min(rates[a, b] for a in range(start - before, start) for b in range(start, stop))
                hop = outputs[first - 1] / (max(width, before) * link)
                trip, busiest = trip + 2 * hop, max(busiest, M * hop)
        return trip, busiest

    plans = [
        (ends, tuple(accumulate(wide))) for count in range(1, devices + 1) for ends, wide in all_plans(layers, devices, count)
    ]
    known = [trip_and_busiest(*plan) for plan in plans]
    least = min(busiest for _, busiest in known)
    assert table.solve(least * (1 - 1e-6)) is None
    for factor in (1 + 1e-9, 1.1, 1.5, 4.0):
        found = table.solve(least * factor)
        assert found is not None
        trip, busiest = trip_and_busiest(*found)
        assert busiest <= least * factor * (1 + 1e-12)
        assert trip == pytest.approx(min(trip for trip, busiest in known if busiest <= least * factor), rel=1e-9)


def test_tables_of_a_thousand_layers_and_devices_are_small() -> None:
    """The search may use 1 GB in all."""
    widths = [*(2**k for k in range(10)), 1000]
    table = ThresholdTable({r: np.full(1000, 1.0 / r) for r in widths}, np.ones(1000), np.ones(1000), np.ones((1000, 1000)), 256)
    arrays = (table.table, table.layer_of, table.width_of, table.works, table.inside, table.between)
    assert sum(array.nbytes for array in arrays) < 150e6
