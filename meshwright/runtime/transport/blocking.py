"""A transport with the strictest rules of NCCL, to test every schedule under them on a laptop.

There are no tags: messages from one rank to another match in the order in which they are issued, whatever their kind. A send
returns after the receiver has received the data. A receive returns with the tensor filled. A schedule that runs here also runs on
any transport whose sends and receives all block in list order.

    sender:    header(kind, bytes)  payload             wait for the answer
    receiver:  header               payload -> tensor   answer(kind, bytes that it expected)
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.transport.base import Channel, own_channels
from meshwright.runtime.transport.faults import from_torch, other, wrong_message
from meshwright.runtime.transport.torch_distributed import KINDS
from meshwright.torch_internals import post_receive, post_send

_MESSAGE, _ANSWER = 0, 1  # two tags for this protocol, none for kinds


class Received:
    """The receipt of a receive that is already complete."""

    def wait(self) -> None:
        """Returns at once."""


class StrictTransport:
    """Rendezvous without tags, over gloo. Both ends raise if a message is not the expected one."""

    rendezvous = True

    def __init__(
        self,
        channels: Sequence[Channel],
        rank: int,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        world = dist.group.WORLD if group is None else group
        assert world is not None, "call init_process_group first"
        self.rank, self.timeout_s = rank, timeout_s
        self._group = world
        self._peers = {c: dist.get_group_rank(world, other(c, rank)) for c in own_channels(channels, rank)}

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Sends, and returns when the receiver has the data."""
        sent = _describe(channel, tensor)
        answer = torch.empty_like(sent)
        self._send(channel, sent, _MESSAGE)
        if tensor.numel():
            self._send(channel, tensor, _MESSAGE)
        self._receive(channel, answer, _ANSWER)
        _compare(channel, sent, answer)

    def receive(self, channel: Channel, tensor: Tensor) -> Received:
        """Receives at once, and returns when the tensor is filled."""
        expected = _describe(channel, tensor)
        sent = torch.empty_like(expected)
        self._receive(channel, sent, _MESSAGE)
        matches = torch.equal(sent, expected)
        # The payload is received even if it is the wrong one, because the sender waits for the answer.
        into = tensor if matches else torch.empty(int(sent[1]), dtype=torch.uint8)
        if into.numel():
            self._receive(channel, into, _MESSAGE)
        self._send(channel, expected, _ANSWER)
        _compare(channel, sent, expected)
        return Received()

    def flush(self) -> None:
        """Does nothing, because every send has already waited."""

    def close(self) -> None:
        """Does nothing, because the transport holds no resources."""

    def _send(self, channel: Channel, tensor: Tensor, tag: int) -> None:
        self._complete(channel, tensor, tag, sends=True)

    def _receive(self, channel: Channel, tensor: Tensor, tag: int) -> None:
        self._complete(channel, tensor, tag, sends=False)

    def _complete(self, channel: Channel, tensor: Tensor, tag: int, *, sends: bool) -> None:
        post = post_send if sends else post_receive
        span = timedelta(0) if self.timeout_s is None else timedelta(seconds=max(self.timeout_s, 1e-3))
        try:
            post(self._group, [tensor], self._peers[channel], tag).wait(span)
        except RuntimeError as error:
            raise from_torch(error, channel, self.rank, self.timeout_s) from error


def _describe(channel: Channel, tensor: Tensor) -> Tensor:
    return torch.tensor([KINDS.index(channel.kind), tensor.nbytes], dtype=torch.int64)


def _compare(channel: Channel, sent: Tensor, expected: Tensor) -> None:
    if not torch.equal(sent, expected):
        texts = [f"{KINDS[int(one[0])].value} of {int(one[1])} bytes" for one in (sent, expected)]
        raise wrong_message(channel, *texts)
