"""Recursive device ordering (SPP, section "RDO"): devices with fast links between them stand next to each other.

A set of devices is cut in two by its global minimum cut (Stoer and Wagner), where the weight of an edge is its bandwidth. Both
halves are ordered in the same way, and joined at the fastest of the four pairs of ends. A stage of a plan is then a run of
neighbours. Devices of one server look alike from outside, so a server is ordered as one vertex.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Bandwidths = Sequence[Sequence[float]]
"""Bytes per second from one device to another; the diagonal is not used."""


def device_order(bandwidths: Bandwidths) -> list[int]:
    """Returns the devices in an order in which neighbours have fast links."""
    groups = _alike(bandwidths)
    count = len(groups)
    weight = [[0.0] * count for _ in range(count)]
    for a in range(count):
        for b in range(count):
            if a != b:
                weight[a][b] = _symmetric(bandwidths, groups[a][0], groups[b][0]) * len(groups[a]) * len(groups[b])
    ordered = _ordered(list(range(count)), weight, lambda a, b: _symmetric(bandwidths, groups[a][0], groups[b][0]))
    return [device for group in ordered for device in groups[group]]


def _symmetric(bandwidths: Bandwidths, a: int, b: int) -> float:
    return min(bandwidths[a][b], bandwidths[b][a])


def _alike(bandwidths: Bandwidths) -> list[list[int]]:
    """Returns groups of devices that have equal links to all others, and no faster links to others than to each other."""
    groups: list[list[int]] = []
    count = len(bandwidths)
    fastest = [max((_symmetric(bandwidths, a, b) for b in range(count) if b != a), default=0.0) for a in range(count)]
    for device in range(count):
        near = [group for group in groups if _symmetric(bandwidths, group[0], device) >= fastest[device]]
        home = next((group for group in near if _exchangeable(bandwidths, group, device)), None)
        if home is None:
            groups.append([device])
        else:
            home.append(device)
    return groups


def _exchangeable(bandwidths: Bandwidths, group: Sequence[int], device: int) -> bool:
    first = group[0]
    inside = _symmetric(bandwidths, first, device)
    if len(group) > 1 and inside != _symmetric(bandwidths, first, group[1]):
        return False
    for other in range(len(bandwidths)):
        if other in (first, device):
            continue
        if _symmetric(bandwidths, device, other) != _symmetric(bandwidths, first, other):
            return False
    return True


def _ordered(vertices: list[int], weight: Bandwidths, link: Callable[[int, int], float]) -> list[int]:
    if len(vertices) <= 2:
        return vertices
    half, rest = minimum_cut(vertices, weight)
    a, c = _ordered(half, weight, link), _ordered(rest, weight, link)
    joined = [(a, c), (c, a), (a[::-1], c), (a, c[::-1])]
    first, second = max(joined, key=lambda pair: link(pair[0][-1], pair[1][0]))
    return first + second


def minimum_cut(vertices: Sequence[int], weight: Bandwidths) -> tuple[list[int], list[int]]:
    """Returns the two sides of the global minimum cut of the graph on these vertices; each side keeps the given order."""
    merged = {vertex: [vertex] for vertex in vertices}
    between = {a: {b: weight[a][b] for b in vertices if b != a} for a in vertices}
    best, side = float("inf"), [vertices[0]]
    while len(merged) > 1:
        last, before, cut = _phase(between)
        if cut < best:
            best, side = cut, merged[last]
        for other, value in between.pop(last).items():
            del between[other][last]
            if other != before:
                between[before][other] += value
                between[other][before] += value
        merged[before] = merged[before] + merged.pop(last)
    chosen = set(side)
    return [v for v in vertices if v in chosen], [v for v in vertices if v not in chosen]


def _phase(between: dict[int, dict[int, float]]) -> tuple[int, int, float]:
    """One maximum-adjacency search: the last two vertices, and the weight of the cut around the last."""
    start = next(iter(between))
    attached = dict.fromkeys((v for v in between if v != start), 0.0)
    last, before = start, start
    cut = 0.0
    while True:
        for other, value in between[last].items():
            if other in attached:
                attached[other] += value
        if not attached:
            return last, before, cut
        before, last = last, max(attached, key=attached.__getitem__)
        cut = attached.pop(last)
