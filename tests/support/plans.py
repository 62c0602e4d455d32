"""Random planning problems, and every plan of a small one by brute force, priced without the code of planners."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from meshwright import Cluster, Device, LayerCost, Profile

Rates = tuple[tuple[float, ...], ...]


def random_profile(seed: int, layers: int) -> Profile:
    choose = random.Random(seed)
    return Profile(
        tuple(
            LayerCost(
                f"layer {n}",
                (choose.uniform(0.1, 2),),
                (choose.uniform(0.1, 2),),
                (choose.uniform(0.1, 2),),
                output_bytes=choose.choice([0.0, choose.uniform(0, 8)]),
                parameter_bytes=choose.choice([0.0, choose.uniform(0, 8)]),
            )
            for n in range(layers)
        )
    )


def random_rates(seed: int, devices: int) -> Rates:
    """Bandwidths of every pair, all different, without any structure."""
    choose = random.Random(1000 + seed)
    found = [[0.0] * devices for _ in range(devices)]
    for a in range(devices):
        for b in range(a):
            found[a][b] = found[b][a] = choose.uniform(0.5, 8)
    return tuple(map(tuple, found))


def cluster_of(rates: Rates) -> Cluster:
    return Cluster(devices=(Device(),) * len(rates), bandwidths=rates)


def bottleneck(profile: Profile, rates: Rates, microbatches: int, ends: Sequence[int], widths: Sequence[int]) -> float:
    """The busiest stage or channel of a plan on devices 0, 1, ... in a row, as SPP defines it."""
    worst, first, place, before = 0.0, 0, 0, None
    for end, width in zip(ends, widths, strict=True):
        layers, devices = profile.layers[first:end], range(place, place + width)
        time = sum(layer.forward_s[0] + layer.input_s[0] + layer.weight_s[0] for layer in layers) / width
        inside = [rates[a][b] for a, b in combinations(devices, 2)]
        size = sum(layer.parameter_bytes for layer in layers)
        worst = max(worst, microbatches * time + (2 * (width - 1) / width * size / min(inside) if inside else 0.0))
        if before is not None:
            slowest = min(rates[a][b] for a in before for b in devices)
            carried = 2 * profile.layers[first - 1].output_bytes
            worst = max(worst, microbatches * carried / (len(before) * width * slowest))
        first, place, before = end, place + width, devices
    return worst


def all_plans(layers: int, devices: int, stages: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Ends of stages and widths, with idle devices at the end."""
    for inner in combinations(range(1, layers), stages - 1):
        for used in range(stages, devices + 1):
            for cuts in combinations(range(1, used), stages - 1):
                marks = (0, *cuts, used)
                yield (*inner, layers), tuple(b - a for a, b in pairwise(marks))
