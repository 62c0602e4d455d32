"""Self-test at start: send one small message over every channel, and name the channel that fails.

It also makes NCCL build its communicators in one order before the first step.
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
    """Sends a token over every channel. Raises an error that names a failed channel within the timeout."""
    before = transport.timeout_s
    try:
        (_in_one_order if transport.rendezvous else _all_at_once)(transport, channels, rank, timeout_s, device)
    finally:
        transport.timeout_s = before


def _all_at_once(
    transport: Transport, channels: Sequence[Channel], rank: int, timeout_s: float, device: torch.device | None
) -> None:
    """All sends, then all receives. A missing message means that the channel itself failed, not that a rank waits for another."""
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
    """Both ends reach a channel at its place in the list, so both ends of the first open channel are always present."""
    place = {channel: i for i, channel in enumerate(channels)}
    for channel in own_channels(channels, rank):
        # Earlier channels time out earlier, so the failed channel is named before the ranks that wait for it time out.
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
