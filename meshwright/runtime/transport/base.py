"""The interface of a transport: ordered channels between ranks, sends that overlap compute, receives that are waited for once.

A channel is (source, target, kind). The schedule fixes the order of its messages, the same at both ends, so messages need no
name. They are posted in list order. The checker has proved that this order has no deadlock even if every send blocks.
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
        """Returns when the tensor is filled. Called once, before the first use of the tensor."""


class Transport(Protocol):
    """Sends messages in order on each channel. All ranks create it with the same channels in the same order."""

    timeout_s: float | None
    """The limit of one wait in seconds; None waits as long as the peer exists."""

    rendezvous: bool
    """Whether a send may wait for its receive."""

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Starts to send a contiguous tensor. It must not change until `flush`; the transport keeps it alive until then."""

    def receive(self, channel: Channel, tensor: Tensor) -> Receipt:
        """Posts a receive into a contiguous tensor of the size that the sender will send."""

    def flush(self) -> None:
        """Returns when everything has been sent."""

    def close(self) -> None:
        """Releases all resources. No message may be in flight."""


def own_channels(channels: Sequence[Channel], rank: int) -> list[Channel]:
    """Returns the channels that start or end at a rank."""
    return [channel for channel in channels if rank in (channel.source, channel.target)]
