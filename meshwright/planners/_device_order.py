"""Recursive device ordering (SPP, section "RDO"): devices with fast links between them stand next to each other.

A set of devices is cut in two by its global minimum cut (Stoer and Wagner), where the weight of an edge is its bandwidth. Both
halves are ordered in the same way, and joined at the fastest of the four pairs of ends. A stage of a plan is then a run of
neighbours. Devices of one server look alike from outside, so a server is ordered as one vertex. Minimum cuts of hundreds of
vertices take long; there, parts with the fastest links are joined instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.simulate.quick_kernels import njit

Array = NDArray[np.float64]
MANY = 200
"""Above this number of vertices, minimum cuts are not used: their total time grows with the fourth power."""
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
    if len(vertices) > MANY:
        return _linked(vertices, link)
    between = weight[np.ix_(vertices, vertices)][~np.eye(len(vertices), dtype=bool)]
    if (between == between[0]).all():  # all cuts are alike
        return vertices
    half, rest = minimum_cut(vertices, weight)
    a, c = _ordered(half, weight, link), _ordered(rest, weight, link)
    return _joined(a, c, link)


def _joined(a: list[int], c: list[int], link: Array) -> list[int]:
    """Returns both orders one after the other, with the fastest link at the joint."""
    first, second = max([(a, c), (c, a), (a[::-1], c), (a, c[::-1])], key=lambda pair: link[pair[0][-1], pair[1][0]])
    return first + second


def _linked(vertices: list[int], link: Array) -> list[int]:
    """Returns the order of many vertices: the two parts with the fastest link between them are joined, again and again."""
    graph = link[np.ix_(vertices, vertices)]
    parts = [[n] for n in range(len(vertices))]
    home = np.arange(len(vertices))
    upper = np.triu_indices(len(vertices), 1)
    for at in np.argsort(-graph[upper], kind="stable"):
        a, c = int(home[upper[0][at]]), int(home[upper[1][at]])
        if a == c:
            continue
        parts[a] = _joined(parts[a], parts[c], graph)
        home[parts[c]] = a
        if len(parts[a]) == len(vertices):
            break
    return [vertices[n] for n in parts[a]]


def minimum_cut(vertices: Sequence[int], weight: Bandwidths) -> tuple[list[int], list[int]]:
    """Returns the two sides of the global minimum cut of the graph on these vertices; each side keeps the given order."""
    names = list(vertices)
    table = np.asarray(weight, dtype=np.float64)[np.ix_(names, names)]
    np.fill_diagonal(table, 0.0)
    chosen = _lightest(table)
    return [v for v, here in zip(names, chosen, strict=True) if here], [
        v for v, here in zip(names, chosen, strict=True) if not here
    ]


@njit(cache=True)
def _lightest(table: Any) -> Any:
    """Returns which vertices are on one side of the lightest cut; merges vertices of `table` on the way."""
    count = len(table)
    merged = np.eye(count) > 0.0  # merged[v]: the vertices that were merged into v
    alive = np.arange(count)
    side = merged[0].copy()
    best = np.inf
    attached = np.empty(count)
    while len(alive) > 1:
        for n in range(len(alive)):
            attached[n] = table[alive[0], alive[n]]
        attached[0] = -1.0
        last, before, cut = 0, 0, 0.0
        for _ in range(len(alive) - 1):  # a maximum adjacency search
            at = 0
            for n in range(1, len(alive)):
                if attached[n] > attached[at]:
                    at = n
            before, last, cut = last, at, attached[at]
            for n in range(len(alive)):
                if attached[n] >= 0.0:
                    attached[n] += table[alive[at], alive[n]]
            attached[at] = -1.0
        if cut < best:
            best, side = cut, merged[alive[last]].copy()
        one, other = alive[before], alive[last]
        table[one] += table[other]
        table[:, one] += table[:, other]
        table[one, one] = 0.0
        merged[one] |= merged[other]
        alive = alive[alive != other]
    return side
