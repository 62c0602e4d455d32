"""Bundles over channels: a typed contract per edge, agreed once per shape, and receives that are waited for at first use.

Sender and receiver both know from the batch when a shape is new on an edge; then a small header goes first. All later
messages of that shape are bare data. A channel keeps the contracts of its latest `CONTRACTS` headers. Both ends see the same
headers in the same order, so both forget the same contract at the same message, and the next message of its shape brings a
header again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.ir.analysis.carried_values import ROWS
from meshwright.runtime.stage.stage import Bundle
from meshwright.runtime.transport.base import Channel, Receipt, Transport
from meshwright.runtime.transport.torch_distributed import TorchTransport

HEADER = 128
"""Numbers in a header: how many tensors, then for each dtype, flag, dimensions and sizes."""

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip

CONTRACTS = 1024
"""How many contracts a channel keeps."""

PATTERN_BYTES = 1 << 16
"""Up to this size a tensor is kept as a pattern for those that are received."""

_form = attrgetter("shape", "dtype")


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


Arrived = Callable[[], None] | None
"""What to call when a message has been waited for."""


class Slotted(Protocol):
    """An instruction that receives: which slot its message goes to."""

    @property
    def slot(self) -> int:
        """The number of the slot."""
        ...


class Pending(tuple["Edges", Channel, Bundle, list[Receipt], Arrived]):
    """A bundle on its way."""

    __slots__ = ()

    def wait(self) -> Bundle:
        """The bundle, when all of it is here."""
        edges, channel, bundle, receipts, arrived = self
        edges.waiting = channel
        for receipt in receipts:
            receipt.wait()
        edges.waiting = None
        if arrived is not None:
            arrived()
        return bundle


class Outgoing:
    """Sends messages of one shape on a channel; before the first goes a header that says what they are, unless both ends know."""

    __slots__ = ("__weakref__", "_channel", "_contract", "_edges", "_told")

    def __init__(self, edges: Edges, channel: Channel, shape: object) -> None:
        self._edges, self._channel, self._told = edges, channel, _told(channel, shape)
        self._contract: Contract | None = None

    def forget(self) -> None:
        """Forget the contract; the next message brings a header again."""
        self._contract = None

    def send_from(self, slots: list[Any], slot: int) -> Callable[[], None]:
        """What sends the bundle that is in a slot, if there is one, and empties the slot."""
        edges, channel = self._edges, self._channel

        def send() -> None:
            bundle, slots[slot] = slots[slot], None
            if bundle is None:
                return
            tensors, flags = bundle
            contract = self._contract
            if contract is None or flags != contract.flags or tuple(map(_form, tensors)) != contract.forms:
                self._agree(bundle)
            for tensor in tensors:
                edges.transport.send(channel, tensor)

        return send

    def send(self, bundle: Bundle) -> None:
        """Start to send a bundle."""
        self.send_from([bundle], 0)()

    def _agree(self, bundle: Bundle) -> None:
        """Before the first message of a shape goes what it is like, unless both ends know; later ones must be like it."""
        if self._contract is not None:
            raise _changed(self._channel, self._contract, Contract.of(bundle))
        if self._told:
            self._contract = Contract.of(bundle)
            self._edges.transport.send(self._channel, _header(self._contract, self._channel).to(self._edges.device))
            self._edges.keep(self._channel, self)


class Incoming:
    """Receives messages of one shape from a channel."""

    __slots__ = ("__weakref__", "_channel", "_contract", "_edges", "_makers", "_shape", "_told")

    def __init__(self, edges: Edges, channel: Channel, shape: object) -> None:
        self._edges, self._channel, self._shape, self._told = edges, channel, shape, _told(channel, shape)
        self.forget()

    def forget(self) -> None:
        """Forget the contract; the next message brings a header again."""
        self._contract: Contract | None = None
        self._makers: list[Callable[[], Tensor]] = []

    @property
    def agreed(self) -> bool:
        """Is it known what the next message is like? If not, posting its receive waits for a header."""
        return self._contract is not None or not self._told

    def post_into(self, slots: list[Any], instruction: Slotted) -> Callable[[], None]:
        """What posts the receives of a bundle and puts it into an instruction's slot; the first of all waits for the header."""
        edges, channel, slot, arrived = self._edges, self._channel, instruction.slot, self._edges.arrival(instruction)

        def post() -> None:
            contract = self._contract or self._agree()
            tensors, receipts = [], []
            for make in self._makers:
                tensor = make()
                tensors.append(tensor)
                receipts.append(edges.transport.receive(channel, tensor))
            slots[slot] = Pending((edges, channel, Bundle(tuple(tensors), contract.flags), receipts, arrived))

        return post

    def fill_into(self, slots: list[Any], instruction: Slotted, room: Callable[[], Bundle]) -> Callable[[], None]:
        """The same, with tensors whose shapes both ends know beforehand (gradient sums, turns)."""
        edges, channel, slot, arrived = self._edges, self._channel, instruction.slot, self._edges.arrival(instruction)

        def fill() -> None:
            bundle = room()
            receipts = [edges.transport.receive(channel, tensor) for tensor in bundle.tensors]
            slots[slot] = Pending((edges, channel, bundle, receipts, arrived))

        return fill

    @property
    def nbytes(self) -> int:
        """How large an `agreed` message is."""
        if self._contract is not None:
            return sum(prod(size) * dtype.itemsize for size, dtype in self._contract.forms)
        return self._shape.nbytes if isinstance(self._shape, Bare) else 1

    def _agree(self) -> Contract:
        """Receive the header of a new shape."""
        edges, channel = self._edges, self._channel
        header = torch.empty(HEADER, dtype=torch.int64, device=edges.device)
        edges.waiting = channel
        edges.transport.receive(channel, header).wait()
        edges.waiting = None
        self._contract = found = _read(header.tolist())
        self._makers = [_maker(size, dtype, edges.device) for size, dtype in found.forms]
        edges.keep(channel, self)
        return found


class Edges:
    """The sending and receiving ends of this rank's channels.

    `waiting` is the channel that a receive is waited for on, and stays after one that failed: whoever watches reads it.
    """

    def __init__(self, transport: Transport, device: torch.device, arrived: Callable[[Any], None] | None = None) -> None:
        self.transport, self.device, self.arrived = transport, device, arrived
        self.waiting: Channel | None = None
        self.posts_early = isinstance(transport, TorchTransport) and not transport.rendezvous
        # One object per channel and shape, as long as a compiled walk or `_kept` holds it.
        self._out = WeakValueDictionary[tuple[Channel, object], Outgoing]()
        self._in = WeakValueDictionary[tuple[Channel, object], Incoming]()
        self._kept: dict[Channel, deque[Outgoing | Incoming]] = defaultdict(deque)

    def arrival(self, instruction: Slotted) -> Arrived:
        """What notes that the message of an instruction has arrived; None where nothing is traced."""
        return None if self.arrived is None else partial(self.arrived, instruction)

    def outgoing(self, channel: Channel, shape: object) -> Outgoing:
        """What sends messages of a shape."""
        return self._out.setdefault((channel, shape), Outgoing(self, channel, shape))

    def incoming(self, channel: Channel, shape: object) -> Incoming:
        """What receives messages of a shape."""
        return self._in.setdefault((channel, shape), Incoming(self, channel, shape))

    def keep(self, channel: Channel, line: Outgoing | Incoming) -> None:
        """Keep the contract of a header that was just sent or received; the oldest of its channel is forgotten for it."""
        kept = self._kept[channel]
        kept.append(line)
        if len(kept) > CONTRACTS:
            kept.popleft().forget()


def _maker(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """What makes room for a tensor: after a pattern, which takes half the time, where the pattern is small."""
    make = partial(torch.empty, size, dtype=dtype, device=device)
    return make if prod(size) * dtype.itemsize > PATTERN_BYTES else partial(torch.empty_like, make())


def _told(channel: Channel, shape: object) -> bool:
    """Does only the sender know what such messages are like?"""
    return channel.kind in ROWS and not isinstance(shape, Bare)


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
