"""What joins the workers: the time of a message between two of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Duplex(StrEnum):
    """Whether the two directions of a link share it."""

    FULL = "full"
    HALF = "half"


@dataclass(frozen=True, slots=True)
class Link:
    """A message takes `latency_s + bytes / bandwidth`; it occupies the link for the second term only."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def busy_s(self, size: float) -> float:
        """How long a message of this size occupies the link."""
        return size / self.bytes_per_s


@dataclass(frozen=True)
class Cluster:
    """One link between any two workers, and others for the pairs that `links` names as (source, target)."""

    link: Link = Link()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    duplex: Duplex = Duplex.FULL

    def between(self, source: int, target: int) -> Link:
        """The link from one worker to another; a pair given in one direction only holds for both."""
        return self.links.get((source, target)) or self.links.get((target, source)) or self.link

    def hop_s(self, sizes: Iterable[float]) -> float:
        """The longest way of any of these messages between neighbours, link by link where they differ."""
        links = [self.link, *self.links.values()]
        return max((link.latency_s + link.busy_s(size) for size in sizes for link in links), default=0.0)
