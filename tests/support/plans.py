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


def stage_time(profile: Profile, rates: Rates, microbatches: int, layers: range, devices: range) -> float:
    """The work of a stage in a step, with its sums."""
    own = [profile.layers[n] for n in layers]
    time = sum(layer.forward_s[0] + layer.input_s[0] + layer.weight_s[0] for layer in own) / len(devices)
    inside = [rates[a][b] for a, b in combinations(devices, 2)]
    size = sum(layer.parameter_bytes for layer in own)
    return microbatches * time + (2 * (len(devices) - 1) / len(devices) * size / min(inside) if inside else 0.0)


def channel_time(profile: Profile, rates: Rates, microbatches: int, cut: int, before: range, devices: range) -> float:
    """The work of a channel in a step, both ways."""
    slowest = min(rates[a][b] for a in before for b in devices)
    return microbatches * 2 * profile.layers[cut - 1].output_bytes / (len(before) * len(devices) * slowest)


def bottleneck(profile: Profile, rates: Rates, microbatches: int, ends: Sequence[int], widths: Sequence[int]) -> float:
    """The busiest stage or channel of a plan on devices 0, 1, ... in a row, as SPP defines it."""
    worst, first, place, before = 0.0, 0, 0, None
    for end, width in zip(ends, widths, strict=True):
        devices = range(place, place + width)
        worst = max(worst, stage_time(profile, rates, microbatches, range(first, end), devices))
        if before is not None:
            worst = max(worst, channel_time(profile, rates, microbatches, first, before, devices))
        first, place, before = end, place + width, devices
    return worst


def solved_bottleneck(profile: Profile, rates: Rates, microbatches: int, stages: int) -> float:
    """The least bottleneck of so many stages by a mixed integer program: a path through (stage, layers, devices, width)."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    layers, devices = len(profile.layers), len(rates)
    states = [
        (k, l, i, r) for k in range(1, stages + 1) for l in range(k, layers + 1) for i in range(k, devices + 1)
        for r in range(1, i + 1)
    ]  # fmt: skip
    start, end = "start", "end"
    arcs: list[tuple[object, object, float]] = []
    for k, l, i, r in states:
        mine = range(i - r, i)
        if k == stages and l == layers:
            arcs.append(((k, l, i, r), end, 0.0))
        if k == 1 and i == r:
            arcs.append((start, (k, l, i, r), stage_time(profile, rates, microbatches, range(l), mine)))
        for before in states:
            if before[0] == k - 1 and before[1] < l and before[2] == i - r:
                cut, others = before[1], range(before[2] - before[3], before[2])
                stage = stage_time(profile, rates, microbatches, range(cut, l), mine)
                cost = max(stage, channel_time(profile, rates, microbatches, cut, others, mine))
                arcs.append((before, (k, l, i, r), cost))
    nodes = {node: n for n, node in enumerate([start, end, *states])}
    flow = np.zeros((len(nodes), len(arcs) + 1))
    least = np.zeros((len(arcs), len(arcs) + 1))
    for n, (a, b, cost) in enumerate(arcs):
        flow[nodes[a], n], flow[nodes[b], n] = -1, 1
        least[n, n], least[n, -1] = cost, -1
    wanted = np.zeros(len(nodes))
    wanted[nodes[start]], wanted[nodes[end]] = -1, 1
    goal = np.array([0.0] * len(arcs) + [1.0])
    found = milp(
        goal,
        constraints=[LinearConstraint(flow, wanted, wanted), LinearConstraint(least, -np.inf, 0.0)],
        integrality=np.array([1] * len(arcs) + [0]),
        bounds=Bounds(0, np.array([1.0] * len(arcs) + [np.inf])),
    )
    assert found.success, found.message
    return float(found.fun)


def all_plans(layers: int, devices: int, stages: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Ends of stages and widths, with idle devices at the end."""
    for inner in combinations(range(1, layers), stages - 1):
        for used in range(stages, devices + 1):
            for cuts in combinations(range(1, used), stages - 1):
                marks = (0, *cuts, used)
                yield (*inner, layers), tuple(b - a for a, b in pairwise(marks))
