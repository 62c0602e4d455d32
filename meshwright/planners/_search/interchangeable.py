"""Which devices of a cluster are alike, so that plans that differ only in these devices are equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from meshwright.planners._search.problem import Floats, Problem


def interchangeable(problem: Problem) -> list[int]:
    """Returns for each device the first one with which it can trade places without any effect on any plan.

    Both have equal speed and memory, and equal links in both directions to each other and to all other devices. Devices that
    share a host or a network card share it with the same others.
    """
    links, every = problem.links, np.arange(problem.devices)
    own = np.stack([problem.slowness, problem.memory, problem.launch, problem.memory_rate])
    pairs = [*links.between(*np.meshgrid(every, every, indexing="ij"))]
    pairs += [np.equal.outer(shared, shared) for shared in links.shared_parts()]
    found: list[int] = []
    for device in range(problem.devices):
        equal = (earlier for earlier in sorted(set(found)) if _can_trade(device, earlier, own, pairs))
        found.append(next(equal, device))
    return found


def _can_trade(one: int, other: int, own: Floats, pairs: Sequence[Floats]) -> bool:
    """Whether two devices, and their rows and columns in tables of all pairs, are equal."""
    rest = np.delete(np.arange(own.shape[1]), [one, other])
    return bool((own[:, one] == own[:, other]).all()) and all(
        table[one, other] == table[other, one]
        and (table[one, rest] == table[other, rest]).all()
        and (table[rest, one] == table[rest, other]).all()
        for table in pairs
    )


def arrangements(kinds: Sequence[int], first: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yields every order of one or more devices that begins with `first`; of equal ones the order with the lowest numbers."""
    for kind in sorted(set(kinds)):
        free = (device for device, own in enumerate(kinds) if own == kind and device not in first)
        if (device := next(free, None)) is not None:
            yield (*first, device)
            yield from arrangements(kinds, (*first, device))


def count_of_arrangements(kinds: Sequence[int]) -> list[int]:
    """Returns how many arrangements have n devices, for n = 0, 1, ..."""
    counts = [1]
    for size in (kinds.count(kind) for kind in set(kinds)):
        longest = len(counts) - 1 + size
        counts = [
            sum(comb(n, ours) * counts[n - ours] for ours in range(min(size, n) + 1) if n - ours < len(counts))
            for n in range(longest + 1)
        ]
    return counts
