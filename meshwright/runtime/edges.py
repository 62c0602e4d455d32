"""Bundles over channels: a typed contract per edge, agreed once per shape, and receives that are waited for at first use.

Sender and receiver both know from the batch when a shape is new on an edge; then a small header goes first. All later
messages of that shape are bare data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Kind
from meshwright.runtime.stage import Bundle
from meshwright.runtime.transport.base import Channel, Receipt, Transport
from meshwright.runtime.transport.wire import TorchTransport

HEADER = 128
"""Numbers in a header: how many tensors, then for each dtype, flag, dimensions and sizes."""

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip

SHAPED = (Kind.ACT, Kind.GRAD)
"""Kinds whose shape only the sender knows."""


class Contract(NamedTuple):
    """Shape and dtype of each tensor of a bundle, and which of them take a gradient."""

    forms: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    flags: tuple[bool, ...]

    @classmethod
    def of(cls, bundle: Bundle) -> Contract:
        """What a bundle is like."""
        return cls(tuple((tuple(t.shape), t.dtype) for t in bundle.tensors), bundle.flags)


@dataclass(frozen=True, slots=True)
class Bare:
    """The shape of a message that both ends know beforehand, whatever its kind: it needs no header."""

    nbytes: int


@dataclass(slots=True)
class Pending:
    """A bundle on its way; `arrived` is a function to call, and with what, when it has been waited for."""

    bundle: Bundle
    receipts: list[Receipt]
    channel: Channel
    edges: Edges
    arrived: tuple[Callable[[Any], None], Any] | None = None

    def wait(self) -> Bundle:
        """The bundle, when all of it is here."""
        self.edges.waiting = self.channel
        for receipt in self.receipts:
            receipt.wait()
        self.edges.waiting = None
        if self.arrived is not None:
            note, what = self.arrived
            note(what)
        return self.bundle


class Edges:
    """The sending and receiving ends of this rank's channels.

    `waiting` is the channel that a wait is for, and stays after one that failed: whoever watches reads it.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.transport, self.device = transport, device
        self.waiting: Channel | None = None
        self.posts_early = isinstance(transport, TorchTransport) and not transport.rendezvous
        self.sent: dict[tuple[Channel, object], Contract] = {}
        self.agreed: dict[tuple[Channel, object], Contract] = {}

    def send(self, channel: Channel, bundle: Bundle, shape: object) -> None:
        """Start to send; `shape` names what the contract depends on."""
        self.waiting = channel
        contract = self.sent.get((channel, shape))
        if contract is not None:
            if contract.flags != bundle.flags:
                raise _changed(channel, contract, Contract.of(bundle))
            for tensor, (size, dtype) in zip(bundle.tensors, contract.forms, strict=True):
                if tensor.shape != size or tensor.dtype is not dtype:
                    raise _changed(channel, contract, Contract.of(bundle))
        elif channel.kind in SHAPED and not isinstance(shape, Bare):
            contract = self.sent[channel, shape] = Contract.of(bundle)
            self.transport.send(channel, _header(contract, channel).to(self.device))
        for tensor in bundle.tensors:
            self.transport.send(channel, tensor)
        self.waiting = None

    def receive(self, channel: Channel, shape: object) -> Pending:
        """Post the receives of a bundle."""
        key = (channel, shape)
        contract = self.agreed.get(key)
        if contract is None:
            header = torch.empty(HEADER, dtype=torch.int64, device=self.device)
            self.waiting = channel
            self.transport.receive(channel, header).wait()
            self.waiting = None
            contract = self.agreed[key] = _read(header.tolist())
        tensors: list[Tensor] = []
        receipts: list[Receipt] = []
        for size, dtype in contract.forms:
            tensor = torch.empty(size, dtype=dtype, device=self.device)
            tensors.append(tensor)
            receipts.append(self.transport.receive(channel, tensor))
        return Pending(Bundle(tuple(tensors), contract.flags), receipts, channel, self)

    def message_bytes(self, channel: Channel, shape: object) -> int | None:
        """How large a message of this shape is; None where no contract was agreed yet."""
        if isinstance(shape, Bare):
            return shape.nbytes
        contract = self.agreed.get((channel, shape))
        return None if contract is None else sum(prod(size) * dtype.itemsize for size, dtype in contract.forms)

    def fill(self, channel: Channel, room: Bundle) -> Pending:
        """Post receives into tensors whose shapes both ends know beforehand (gradient sums, turns)."""
        receipts = [self.transport.receive(channel, tensor) for tensor in room.tensors]
        return Pending(room, receipts, channel, self)


def _changed(channel: Channel, before: Contract, now: Contract) -> MeshwrightError:
    """What to say where a message breaks the contract of its edge."""
    where = f"what rank {channel.source} sends to {channel.target} ({channel.kind.value})"
    if before.forms == now.forms:
        return MeshwrightError(
            f"{where} takes a gradient in one microbatch and none in another",
            fix="let it follow from the shapes of the batch alone which layers run",
        )
    return MeshwrightError(
        f"{where} has other shapes than before, for a batch of the same shape: "
        f"{[size for size, _ in now.forms]} after {[size for size, _ in before.forms]}",
        fix="let shapes follow from the shapes of the batch alone",
    )


def _header(contract: Contract, channel: Channel) -> Tensor:
    words = [len(contract.forms)]
    for (size, dtype), flag in zip(contract.forms, contract.flags, strict=True):
        if dtype not in DTYPES:
            raise MeshwrightError(f"{dtype} cannot cross from rank {channel.source} to {channel.target}")
        words += [DTYPES.index(dtype), int(flag), len(size), *size]
    if len(words) > HEADER:
        raise MeshwrightError(
            f"rank {channel.source} sends {len(contract.forms)} tensors to {channel.target}, more than a header describes",
            fix="pack what crosses stages into fewer tensors",
        )
    return torch.tensor(words + [0] * (HEADER - len(words)))


def _read(words: list[int]) -> Contract:
    forms, flags, at = [], [], 1
    for _ in range(words[0]):
        dtype, flag, dims = words[at : at + 3]
        forms.append((tuple(words[at + 3 : at + 3 + dims]), DTYPES[dtype]))
        flags.append(bool(flag))
        at += 3 + dims
    return Contract(tuple(forms), tuple(flags))
