"""A link between two devices: how long a message takes, and whether its two directions share it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshwright.errors import MeshwrightError


class Duplex(StrEnum):
    """Whether the two directions of a link share it.

    `FULL`: each direction has the whole bandwidth. `HALF`: the two directions of a pair take turns.

    Examples:
        >>> from meshwright import Cluster, Duplex, Link
        >>> Cluster(Link(bytes_per_s=1e9), duplex=Duplex.HALF).duplex.value
        'half'
    """

    FULL = "full"
    HALF = "half"


@dataclass(frozen=True, slots=True)
class Link:
    """The latency and bandwidth between two workers.

    A message takes `latency_s + bytes / bytes_per_s`. It occupies the link for the second term only.

    Args:
        latency_s: Seconds before the first byte arrives.
        bytes_per_s: The bandwidth.

    Raises:
        MeshwrightError: The latency is negative or infinite, or the bandwidth is not above zero.

    Examples:
        >>> from meshwright import Link
        >>> Link(latency_s=1e-3, bytes_per_s=1e9).busy_s(5e8)
        0.5
    """

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def __post_init__(self) -> None:
        if not 0.0 <= self.latency_s < float("inf") or not self.bytes_per_s > 0.0:
            raise MeshwrightError(
                f"a link needs a latency of at least 0 and a bandwidth above 0, got {self.latency_s} and {self.bytes_per_s}"
            )

    def busy_s(self, size: float) -> float:
        """Returns how long a message of this size occupies the link."""
        return size / self.bytes_per_s

    def slower(self, other: Link) -> Link:
        """Returns the larger latency and the lower bandwidth of two links."""
        return Link(max(self.latency_s, other.latency_s), min(self.bytes_per_s, other.bytes_per_s))

    def divided(self, flows: int) -> Link:
        """Returns the share of this link that one of several equal flows gets."""
        return self if flows <= 1 else Link(self.latency_s, self.bytes_per_s / flows)
