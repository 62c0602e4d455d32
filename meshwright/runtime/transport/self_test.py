"""A self-test at start-up: one tiny message over every channel, and the name of the edge that is dead.

It also makes NCCL build its communicators, all in one order, before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.runtime.transport.base import Channel, Transport, own_channels
from meshwright.runtime.transport.faults import label


def ping(
    transport: Transport, channels: Sequence[Channel], rank: int, timeout_s: float, *, device: torch.device | None = None
) -> None:
    """Send a token over every channel, or raise an error that names one that is dead, within the timeout."""
    before = transport.timeout_s
    try:
        (_in_one_order if transport.rendezvous else _all_at_once)(transport, channels, rank, timeout_s, device)
    finally:
        transport.timeout_s = before


def _all_at_once(
    transport: Transport, channels: Sequence[Channel], rank: int, timeout_s: float, device: torch.device | None
) -> None:
    """All sends, then all receives: what is missing at the end is the edge itself, not a rank that waits for another."""
    transport.timeout_s = timeout_s
    tokens = [(channel, _token(channel, device)) for channel in own_channels(channels, rank)]
    for channel, token in tokens:
        if channel.source == rank:
            transport.send(channel, token)
    for channel, token in tokens:
        if channel.target == rank:
            _hear(transport, channel, token)
    transport.flush()


def _in_one_order(
    transport: Transport, channels: Sequence[Channel], rank: int, timeout_s: float, device: torch.device | None
) -> None:
    """Both ends come to a channel at its place in the list, so the first open one always has both ends there."""
    place = {channel: i for i, channel in enumerate(channels)}
    for channel in own_channels(channels, rank):
        # Earlier channels give up earlier: the dead edge is named before those who wait behind it lose patience.
        transport.timeout_s = timeout_s * (1 + (place[channel] + 1) / len(channels)) / 2
        token = _token(channel, device)
        if channel.source == rank:
            transport.send(channel, token)
        else:
            _hear(transport, channel, token)
    transport.flush()


def _token(channel: Channel, device: torch.device | None) -> Tensor:
    return torch.tensor([channel.source, channel.target, *channel.kind.value.encode()], dtype=torch.int64, device=device)


def _hear(transport: Transport, channel: Channel, token: Tensor) -> None:
    heard = torch.empty_like(token)
    transport.receive(channel, heard).wait()
    if not torch.equal(heard, token):
        raise MeshwrightError(f"channel {label(channel)} carried a message of another channel: {heard.tolist()}")
