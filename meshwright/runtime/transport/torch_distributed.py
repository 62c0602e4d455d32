"""Messages over torch.distributed: gloo between CPUs, NCCL between GPUs, on any number of hosts.

gloo keeps the messages of one (pair, tag) in order. So the tag is the kind, and two groups, one per direction, carry all
channels. NCCL has no tags. So each channel gets its own process group, and kinds and directions do not wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.ir.action import Kind
from meshwright.runtime.cpu_scheduling import batch_policy
from meshwright.runtime.transport.base import Channel, own_channels
from meshwright.runtime.transport.faults import from_torch, other
from meshwright.torch_internals import post_receive, post_send

KINDS = list(Kind)
"""The index of a kind is its tag."""

DEPTH = 4
"""How many sends of a channel may be in flight before the transport waits for the oldest."""


class _Line:
    """One end of a channel: group, peer and tag, and the sends that were not waited for yet."""

    __slots__ = ("group", "peer", "sent", "tag")

    def __init__(self, group: dist.ProcessGroup, peer: int, tag: int) -> None:
        self.group, self.peer, self.tag = group, peer, tag
        self.sent: deque[tuple[dist.Work, Tensor]] = deque()


class TorchReceipt:
    """A posted `recv`. `wait` deletes its work, because gloo hangs if it is waited for twice."""

    __slots__ = ("_channel", "_owner", "_work")

    def __init__(self, owner: TorchTransport, channel: Channel, work: dist.Work) -> None:
        self._owner, self._channel, self._work = owner, channel, work

    def wait(self) -> None:
        """Returns when the tensor is filled."""
        work = self._work
        del self._work
        self._owner.settle(self._channel, work)


class TorchTransport:
    """Channels over torch.distributed. Ranks are global, and every rank of the world creates it with the same channels."""

    def __init__(
        self,
        channels: Sequence[Channel],
        rank: int,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | None = None,
        tagged: bool | None = None,
        timeout_s: float | None = None,
    ) -> None:
        world = dist.group.WORLD if group is None else group
        assert world is not None, "call init_process_group first"
        where = torch.device("cpu") if device is None else device
        tagged = where.type == "cpu" if tagged is None else tagged
        # NCCL creates a communicator at the first message. Both ends must reach it at the same point of their lists.
        self.rendezvous = not tagged
        self.rank = rank
        self.timeout_s = timeout_s
        self._lines: dict[Channel, _Line] = {}
        self._pad = torch.zeros(1, dtype=torch.uint8, device=where)
        mine = set(own_channels(channels, rank))
        # With one gloo group, a send and the notice of a posted receive would wait for each other's lock. So: one per direction.
        members = dist.get_process_group_ranks(world)
        ways = world, world
        if tagged and channels:
            with batch_policy(where):
                ways = dist.new_group(members), dist.new_group(members)
        for channel in channels:
            line = ways[channel.source < channel.target] if tagged else dist.new_group([channel.source, channel.target])
            if channel in mine:
                peer = dist.get_group_rank(line, other(channel, rank))
                self._lines[channel] = _Line(line, peer, KINDS.index(channel.kind) if tagged else 0)

    @property
    def timeout_s(self) -> float | None:
        """The limit of a wait; None leaves it to the process group. With a limit, NCCL blocks the host in each wait."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float | None) -> None:
        self._timeout_s = value
        self._span = timedelta(0) if value is None else timedelta(seconds=max(value, 1e-3))  # for torch 0 means no limit

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Starts a send. The tensor is kept alive until its send has been waited for."""
        line = self._lines[channel]
        sent = line.sent
        if len(sent) >= DEPTH:
            self.settle(channel, sent.popleft()[0])
        if not tensor.numel():
            tensor = self._pad  # NCCL drops empty messages, but they are needed for the order of later ones
        try:
            sent.append((post_send(line.group, [tensor], line.peer, line.tag), tensor))
        except RuntimeError as error:
            raise from_torch(error, channel, self.rank, self._timeout_s) from error

    def receive(self, channel: Channel, tensor: Tensor) -> TorchReceipt:
        """Posts a receive."""
        line = self._lines[channel]
        if not tensor.numel():
            tensor = self._pad
        try:
            return TorchReceipt(self, channel, post_receive(line.group, [tensor], line.peer, line.tag))
        except RuntimeError as error:
            raise from_torch(error, channel, self.rank, self._timeout_s) from error

    def settle(self, channel: Channel, work: dist.Work) -> None:
        """Waits for one work, once. Raises an error that names the channel if it fails."""
        try:
            work.wait(self._span)
        except RuntimeError as error:
            raise from_torch(error, channel, self.rank, self._timeout_s) from error

    def flush(self) -> None:
        """Returns when everything has been sent."""
        for channel, line in self._lines.items():
            sent = line.sent
            while sent:
                self.settle(channel, sent.popleft()[0])

    def close(self) -> None:
        """Waits for all sends. The process groups end with torch.distributed, which all ranks leave together."""
        self.flush()
        self._lines.clear()
