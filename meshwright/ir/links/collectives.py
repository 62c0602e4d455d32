"""Times of collectives. A reduce-scatter takes as long as a gather, and an all-reduce is a reduce-scatter and a gather.

n bytes on p devices, with latency a and bandwidth b of the slowest link:

    ring           (p - 1) a + (p - 1) / p n / b                     neighbours only: one flow leaves each host
    doubling       log2(p) a + (p - 1) / p n / b'                    p a power of two; b' of the busiest card
    hierarchical   gather(h, n / k) over hosts, then gather(k, n) inside; h hosts with k devices each

The fastest is used, because libraries choose the algorithm by size.
"""

from __future__ import annotations

from meshwright.ir.links.link import Link


def ring_s(count: int, size: float, link: Link) -> float:
    """Returns the time of a ring gather, in which each device sends to the next one."""
    return (count - 1) * link.latency_s + (count - 1) / count * size / link.bytes_per_s


def doubling_s(count: int, size: float, link: Link) -> float:
    """Returns the time of a gather by recursive doubling; infinite if the count is not a power of two."""
    if count & (count - 1):
        return float("inf")
    return (count.bit_length() - 1) * link.latency_s + (count - 1) / count * size / link.bytes_per_s


def flat_s(count: int, size: float, neighbours: Link, busiest: Link | None = None) -> float:
    """Returns the shorter of both times. `busiest` is the slowest link if all devices send at once."""
    if count < 2 or size <= 0:
        return 0.0
    return min(ring_s(count, size, neighbours), doubling_s(count, size, busiest or neighbours))


def hierarchical_s(hosts: int, per_host: int, size: float, *, inside: Link, between: Link) -> float:
    """Returns the time of a gather over hosts, then inside each of them. `between` is the share of a card that one flow gets."""
    return flat_s(hosts, size / per_host, between) + flat_s(per_host, size, inside)
