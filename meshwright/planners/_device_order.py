"""Recursive device ordering (SPP, section "RDO"): devices with fast links between them stand next to each other.

A set of devices is cut in two by its global minimum cut (Stoer and Wagner), where the weight of an edge is its bandwidth. Both
halves are ordered in the same way, and joined at the fastest of the four pairs of ends. A stage of a plan is then a run of
neighbours. Devices of one server look alike from outside, so a server is ordered as one vertex.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Bandwidths = Sequence[Sequence[float]] | Array
"""Bytes per second from one device to another; the diagonal is not used."""


def device_order(bandwidths: Bandwidths, *, kinds: Sequence[float] | None = None) -> list[int]:
    """Returns the devices in an order in which neighbours have fast links. Only devices of one kind are taken as alike."""
    rates = np.asarray(bandwidths, dtype=np.float64)
    rates = np.minimum(rates, rates.T)
    groups = alike(rates, list(kinds) if kinds is not None else [0.0] * len(rates))
    heads = [group[0] for group in groups]
    link = rates[np.ix_(heads, heads)]
    sizes = np.array([len(group) for group in groups], dtype=np.float64)
    weight = link * sizes[:, None] * sizes[None, :]
    np.fill_diagonal(weight, 0.0)
    return [device for group in _ordered(list(range(len(groups))), weight, link) for device in groups[group]]


def alike(rates: Array, kinds: Sequence[float]) -> list[list[int]]:
    """Returns groups of devices that have equal links to all others, and no faster links to others than to each other."""
    count = len(rates)
    groups: list[list[int]] = []
    inner = rates.copy()
    np.fill_diagonal(inner, 0.0)
    fastest = inner.max(axis=1) if count > 1 else np.zeros(count)
    grouped = np.full(count, -1)
    for device in range(count):
        if grouped[device] >= 0:
            continue
        rest = np.flatnonzero((grouped < 0) & (np.arange(count) > device))
        members = [device]
        near = rest[(rates[device, rest] >= fastest[device]) & (rates[device, rest] >= fastest[rest])]
        for other in near.tolist():
            if kinds[other] == kinds[device] and _exchangeable(rates, members, other):
                members.append(other)
        grouped[members] = len(groups)
        groups.append(members)
    return groups


def _exchangeable(rates: Array, group: Sequence[int], device: int) -> bool:
    first = group[0]
    if len(group) > 1 and rates[first, device] != rates[first, group[1]]:
        return False
    same = rates[device] == rates[first]
    same[[first, device]] = True
    return bool(same.all())


def _ordered(vertices: list[int], weight: Array, link: Array) -> list[int]:
    if len(vertices) <= 2:
        return vertices
    between = weight[np.ix_(vertices, vertices)][~np.eye(len(vertices), dtype=bool)]
    if (between == between[0]).all():  # all cuts are alike
        return vertices
    half, rest = minimum_cut(vertices, weight)
    a, c = _ordered(half, weight, link), _ordered(rest, weight, link)
    joined = [(a, c), (c, a), (a[::-1], c), (a, c[::-1])]
    first, second = max(joined, key=lambda pair: link[pair[0][-1]][pair[1][0]])
    return first + second


def minimum_cut(vertices: Sequence[int], weight: Bandwidths) -> tuple[list[int], list[int]]:
    """Returns the two sides of the global minimum cut of the graph on these vertices; each side keeps the given order."""
    names = list(vertices)
    table = np.array([[0.0 if a == b else weight[a][b] for b in names] for a in names])
    merged = [[n] for n in range(len(names))]
    alive = list(range(len(names)))
    best, side = float("inf"), [0]
    while len(alive) > 1:
        last, before, cut = _phase(table, alive)
        if cut < best:
            best, side = cut, list(merged[last])
        table[before] += table[last]
        table[:, before] += table[:, last]
        table[before, before] = 0.0
        alive.remove(last)
        merged[before] += merged[last]
    chosen = set(side)
    return [v for n, v in enumerate(names) if n in chosen], [v for n, v in enumerate(names) if n not in chosen]


def _phase(table: Array, alive: Sequence[int]) -> tuple[int, int, float]:
    """One maximum-adjacency search: the last two vertices, and the weight of the cut around the last."""
    index = np.array(alive)
    attached = table[alive[0], index].copy()
    attached[0] = -1.0
    last, before, cut = alive[0], alive[0], 0.0
    for _ in range(len(alive) - 1):
        at = int(attached.argmax())
        before, last, cut = last, int(index[at]), float(attached[at])
        attached = np.where(attached < 0.0, -1.0, attached + table[last, index])
        attached[at] = -1.0
    return last, before, cut
