"""What a transport is: ordered channels between ranks, sends that overlap compute, receives that are waited for once.

A channel is (source, target, kind). The schedule fixes the order of the messages on it, the same at both ends, so no
message needs a name. What is posted is posted in list order, which the checker proved safe even if every send blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from meshwright.ir.action import Kind


class Channel(NamedTuple):
    """One direction between two ranks, for one kind of value."""

    source: int
    target: int
    kind: Kind


class Receipt(Protocol):
    """A receive that was posted."""

    def wait(self) -> None:
        """Return when the tensor is filled; called once, before its first use."""


class Transport(Protocol):
    """Messages in order, channel by channel. Made on all ranks with the same channels in the same order."""

    timeout_s: float | None
    """How long one wait may take; None waits as long as the peer lives."""

    rendezvous: bool
    """Whether a send may wait for its receive."""

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Start to send a contiguous tensor; it must not change until `flush`, and it is kept alive so long."""

    def receive(self, channel: Channel, tensor: Tensor) -> Receipt:
        """Post a receive into a contiguous tensor of the size that the sender will send."""

    def flush(self) -> None:
        """Return when everything sent has left."""

    def close(self) -> None:
        """Give back what the transport holds; nothing may be on its way."""


def own_channels(channels: Sequence[Channel], rank: int) -> list[Channel]:
    """The channels that start or end at a rank."""
    return [channel for channel in channels if rank in (channel.source, channel.target)]
