"""Send and receive bundles of tensors over channels. Each shape has a contract, which a header announces once.

Both ends know from the batch when a shape is new on a channel. The sender then sends a small header first. Later messages of that
shape are data only. A channel keeps the contracts of its last `CONTRACTS` headers. Both ends see the same headers in the same
order, so both drop the same contract at the same message, and the next message of that shape has a header again. A receive is
waited for at the first use of its value.
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
from meshwright.runtime.started_ranks import started
from meshwright.runtime.transport.base import Channel, Receipt, Transport
from meshwright.runtime.transport.faults import label
from meshwright.runtime.transport.torch_distributed import TorchTransport

HEADER = 128
"""Numbers in a header: the number of tensors, then the dtype, flag, dimensions and sizes of each."""

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip

CONTRACTS = 1024
"""The number of contracts that a channel keeps."""

PATTERN_BYTES = 1 << 16
"""Up to this size, a tensor is kept as a pattern for `empty_like`."""

_form = attrgetter("shape", "dtype")


class Contract(NamedTuple):
    """Shape and dtype of each tensor of a bundle, and which of them require a gradient."""

    forms: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    flags: tuple[bool, ...]

    @classmethod
    def of(cls, bundle: Bundle) -> Contract:
        """Returns the contract of a bundle."""
        return cls(tuple((tuple(t.shape), t.dtype) for t in bundle.tensors), bundle.flags)


@dataclass(frozen=True, slots=True)
class Bare:
    """The shape of a message that both ends know in advance, so it needs no header."""

    nbytes: int


Arrived = Callable[[], None] | None
"""Called when the wait for a message has ended."""


class Slotted(Protocol):
    """A receiving instruction, with the slot of its message."""

    @property
    def slot(self) -> int:
        """The slot number."""
        ...


class Pending(tuple["Edges", Channel, Bundle, list[Receipt], Arrived]):
    """A bundle that is being received."""

    __slots__ = ()

    def wait(self) -> Bundle:
        """Waits until all tensors have arrived, and returns the bundle."""
        edges, channel, bundle, receipts, arrived = self
        edges.waiting = channel
        for receipt in receipts:
            receipt.wait()
        edges.waiting = None
        if arrived is not None:
            arrived()
        return bundle


class Outgoing:
    """Sends messages of one shape on a channel. A header describes them before the first one, unless both ends know the shape."""

    __slots__ = ("__weakref__", "_channel", "_contract", "_edges", "_told")

    def __init__(self, edges: Edges, channel: Channel, shape: object) -> None:
        self._edges, self._channel, self._told = edges, channel, _told(channel, shape)
        self._contract: Contract | None = None

    def forget(self) -> None:
        """Drops the contract; the next message has a header again."""
        self._contract = None

    def send_from(self, slots: list[Any], slot: int) -> Callable[[], None]:
        """Returns a function that sends the bundle of a slot, if there is one, and empties the slot."""
        edges, channel, sent = self._edges, self._channel, self._edges.sent

        def send() -> None:
            bundle, slots[slot] = slots[slot], None
            if bundle is None:
                return
            if sent is not None:
                sent(channel, bundle)
            tensors, flags = bundle
            contract = self._contract
            if contract is None or flags != contract.flags or tuple(map(_form, tensors)) != contract.forms:
                self._agree(bundle)
            for tensor in tensors:
                edges.transport.send(channel, tensor)

        return send

    def send(self, bundle: Bundle) -> None:
        """Starts to send a bundle."""
        self.send_from([bundle], 0)()

    def _agree(self, bundle: Bundle) -> None:
        """Sends the header of a new shape, unless both ends know it. Raises if a later message has another form."""
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
        """Drops the contract; the next message has a header again."""
        self._contract: Contract | None = None
        self._makers: list[Callable[[], Tensor]] = []

    @property
    def agreed(self) -> bool:
        """True if the form of the next message is known. If not, posting its receive waits for a header."""
        return self._contract is not None or not self._told

    def post_into(self, slots: list[Any], instruction: Slotted) -> Callable[[], None]:
        """Returns a function that posts receives into an instruction's slot. The first call waits for the header."""
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
        """The same for tensors whose shapes both ends know in advance (gradient sums, turns)."""
        edges, channel, slot, arrived = self._edges, self._channel, instruction.slot, self._edges.arrival(instruction)

        def fill() -> None:
            bundle = room()
            receipts = [edges.transport.receive(channel, tensor) for tensor in bundle.tensors]
            slots[slot] = Pending((edges, channel, bundle, receipts, arrived))

        return fill

    @property
    def nbytes(self) -> int:
        """The size of a message whose form is known."""
        if self._contract is not None:
            return sum(prod(size) * dtype.itemsize for size, dtype in self._contract.forms)
        return self._shape.nbytes if isinstance(self._shape, Bare) else 1

    def _agree(self) -> Contract:
        """Receives the header of a new shape."""
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

    `waiting` is the channel of the current wait. It stays set after a failed wait, and the watchdog reads it. `sent` is called
    with the channel and the content of each message.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        arrived: Callable[[Any], None] | None = None,
        sent: Callable[[Channel, Bundle], None] | None = None,
    ) -> None:
        self.transport, self.device, self.arrived, self.sent = transport, device, arrived, sent
        self.waiting: Channel | None = None
        self.posts_early = isinstance(transport, TorchTransport) and not transport.rendezvous
        # One object per channel and shape, for as long as a compiled walk or `_kept` refers to it.
        self._out = WeakValueDictionary[tuple[Channel, object], Outgoing]()
        self._in = WeakValueDictionary[tuple[Channel, object], Incoming]()
        self._kept: dict[Channel, deque[Outgoing | Incoming]] = defaultdict(deque)

    def arrival(self, instruction: Slotted) -> Arrived:
        """Returns a function that records the arrival of an instruction's message; None without a trace."""
        return None if self.arrived is None else partial(self.arrived, instruction)

    def outgoing(self, channel: Channel, shape: object) -> Outgoing:
        """Returns the sender for messages of a shape."""
        return self._out.setdefault((channel, shape), Outgoing(self, channel, shape))

    def incoming(self, channel: Channel, shape: object) -> Incoming:
        """Returns the receiver for messages of a shape."""
        return self._in.setdefault((channel, shape), Incoming(self, channel, shape))

    def keep(self, channel: Channel, line: Outgoing | Incoming) -> None:
        """Keeps the contract of a header that was just sent or received, and drops the oldest one of a full channel."""
        kept = self._kept[channel]
        kept.append(line)
        if len(kept) > CONTRACTS:
            kept.popleft().forget()


def _maker(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Returns a function that allocates a tensor. For small tensors it uses `empty_like`, which takes half the time."""
    make = partial(torch.empty, size, dtype=dtype, device=device)
    return make if prod(size) * dtype.itemsize > PATTERN_BYTES else partial(torch.empty_like, make())


def _told(channel: Channel, shape: object) -> bool:
    """True if only the sender knows the form of such messages."""
    return channel.kind in ROWS and not isinstance(shape, Bare)


def _changed(channel: Channel, before: Contract, now: Contract) -> MeshwrightError:
    """Returns the error for a message that breaks the contract of its channel."""
    where = f"what rank {started(channel.source)} sends to {started(channel.target)} ({channel.kind.value})"
    if before.forms == now.forms:
        return MeshwrightError(
            f"{where} takes a gradient in one microbatch and none in another",
            fix="make the choice of layers depend only on the shapes of the batch",
        )
    return MeshwrightError(
        f"{where} has other shapes than before, for a batch of the same shape: "
        f"{[size for size, _ in now.forms]} after {[size for size, _ in before.forms]}",
        fix="make these shapes depend only on the shapes of the batch",
    )


def _header(contract: Contract, channel: Channel) -> Tensor:
    words = [len(contract.forms)]
    for (size, dtype), flag in zip(contract.forms, contract.flags, strict=True):
        if dtype not in DTYPES:
            raise MeshwrightError(f"{dtype} cannot be sent on channel {label(channel)}")
        words += [DTYPES.index(dtype), int(flag), len(size), *size]
    if len(words) > HEADER:
        raise MeshwrightError(
            f"channel {label(channel)} has a message of {len(contract.forms)} tensors, more than fit into a header",
            fix="pass fewer tensors between stages",
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
