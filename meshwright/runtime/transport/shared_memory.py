"""Messages through shared memory between the CPU ranks of one host.

A channel is a ring of slots in an anonymous file that both ends map, and two pipes:

    sender   copy into slot i mod K   -- header: number of bytes -->   copy out of slot i mod K   receiver
             (K messages ahead at most)        <-- one byte: free --

A small message goes through the pipe itself, after its header, in one write that the kernel does not split. It needs no slot.
If a pipe is short, only headers go through it: the kernel shortens the pipes of a user who has very many.

A reader sleeps in `read`, so there is no busy waiting, and a closed pipe tells it at once that the peer died. Nothing has a
name in the file system. A send blocks while the ring is full. A receiver that posts more than K receives completes the oldest
first. So send i waits at most until its own receive is posted, which is never longer than if every send and receive blocked.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import socket
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from meshwright.runtime.transport.base import Channel, own_channels
from meshwright.runtime.transport.faults import PeerLost, PeerSilent, label, other, wrong_message
from meshwright.runtime.transport.handshake import give, meet, take

SLOTS = 6
"""How many messages of a channel may be in flight."""

ACKS_TOGETHER = 2
"""How many received messages one write acknowledges. This halves the wake-ups of a sender, which has enough slots for it."""

_HEADER = 8
_SMALL = select.PIPE_BUF - _HEADER  # a pipe writes this much atomically
_ACKS = 64  # read up to this many acknowledgements at once
_SMALLEST = 1 << 16
_copy = ctypes.memmove


class _Ring:
    """The slots of a channel. Both ends see the same sizes in the same order, so both compute the same layout."""

    __slots__ = ("_address", "_count", "_end", "_file", "_grows", "_map", "_offsets", "_sizes", "_slots")

    def __init__(self, file: int, slots: int, *, grows: bool) -> None:
        self._file, self._slots, self._grows = file, slots, grows
        self._count = 0
        self._offsets, self._sizes = [0] * slots, [0] * slots
        self._end, self._address = 0, 0
        self._map: mmap.mmap | None = None

    def next(self, nbytes: int) -> int:
        """Returns the address for the next message. A slot that is too small moves to the end of the file."""
        slot = self._count % self._slots
        self._count += 1
        if nbytes > self._sizes[slot]:
            self._enlarge(slot, nbytes)
        return self._address + self._offsets[slot]

    def _enlarge(self, slot: int, nbytes: int) -> None:
        old_offset, old_size = self._offsets[slot], self._sizes[slot]
        self._offsets[slot], self._sizes[slot] = self._end, max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        self._end += self._sizes[slot]
        if self._grows:
            if self._map is not None and old_size:
                self._map.madvise(mmap.MADV_REMOVE, old_offset, old_size)  # frees the memory, at both ends
            os.ftruncate(self._file, self._end)
        self.unmap()
        self._map = mmap.mmap(self._file, self._end)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def unmap(self) -> None:
        """Removes the mapping. The file stays open."""
        if self._map is not None:
            self._map.close()
            self._map = None

    def close(self) -> None:
        """Removes the mapping and closes the file."""
        self.unmap()
        os.close(self._file)


class _End:
    """One rank's end of a channel: the ring, the pipe that it reads and the pipe that it writes."""

    __slots__ = ("channel", "done", "free", "owed", "posted", "reads", "ring", "small", "writes")

    def __init__(self, channel: Channel, ring: _Ring, reads: int, writes: int, free: int, small: int) -> None:
        self.channel, self.ring, self.reads, self.writes = channel, ring, reads, writes
        self.small = small  # messages up to this size go through the pipe
        self.free = free  # slots that a sender may fill
        self.posted: deque[Tensor] = deque()
        self.done = 0  # messages that a receiver has copied out
        self.owed = 0  # ... and not yet acknowledged

    def close(self) -> None:
        os.close(self.reads)
        os.close(self.writes)
        self.ring.close()


class SharedReceipt(tuple["SharedTransport", _End, int]):
    """A posted receive: its transport, end and number. Waiting for it copies all messages up to this one out of the ring."""

    __slots__ = ()

    def wait(self) -> None:
        """Returns when the tensor is filled."""
        transport, end, number = self
        while end.done < number:
            transport.fill(end)


class SharedTransport:
    """Channels through shared memory. `run_id` is a text that only the ranks of this run know."""

    rendezvous = False

    def __init__(
        self,
        channels: Sequence[Channel],
        rank: int,
        run_id: str,
        *,
        slots: int = SLOTS,
        timeout_s: float | None = None,
        meet_timeout_s: float = 60.0,
    ) -> None:
        self.rank, self.run_id, self.timeout_s = rank, run_id, timeout_s
        self._slots, self._most = slots, max(0, slots - 1 - ACKS_TOGETHER)
        self._ends: dict[Channel, _End] = {}
        mine = own_channels(channels, rank)
        lines = meet(run_id, rank, {other(channel, rank) for channel in mine}, meet_timeout_s)
        try:
            for channel in mine:
                if channel.source == rank:
                    self._ends[channel] = _offer(channel, lines[channel.target], slots)
            for channel in mine:
                if channel.target == rank:
                    self._ends[channel] = _accept(channel, lines[channel.source], slots)
        except BaseException:
            self.close()
            raise
        finally:
            for line in lines.values():
                line.close()
        close_in_forked_children(self)

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Copies the tensor into the ring. Blocks only if the receiver is a whole ring late."""
        assert tensor.is_contiguous(), "the bytes of a contiguous tensor are copied"
        end, nbytes = self._ends[channel], tensor.nbytes
        word = nbytes.to_bytes(_HEADER, "little")
        if nbytes <= end.small:
            word += ctypes.string_at(tensor.data_ptr(), nbytes)
        else:
            if not end.free:
                end.free = len(self._read(end, _ACKS))
            _copy(end.ring.next(nbytes), tensor.data_ptr(), nbytes)
            end.free -= 1
        try:
            os.write(end.writes, word)
        except BrokenPipeError:
            raise PeerLost(channel, self.rank) from None

    def receive(self, channel: Channel, tensor: Tensor) -> SharedReceipt:
        """Stores where the message goes. It is copied out when it is waited for."""
        end = self._ends[channel]
        posted = end.posted
        # With this limit, a full ring never blocks a sender for longer than if every send and receive blocked.
        if len(posted) > self._most:
            self.fill(end)
        posted.append(tensor)
        return SharedReceipt((self, end, end.done + len(posted)))

    def fill(self, end: _End) -> None:
        """Copies the next message of a channel into the tensor that was posted first."""
        tensor = end.posted.popleft()
        nbytes = tensor.nbytes
        small = nbytes <= end.small
        wanted = _HEADER + nbytes if small else _HEADER
        heard = os.read(end.reads, wanted) if self.timeout_s is None else self._read(end, wanted)
        if not heard:
            raise PeerLost(end.channel, self.rank)
        if (sent := int.from_bytes(heard[:_HEADER], "little")) != nbytes:
            raise wrong_message(end.channel, f"{sent} bytes", f"{nbytes} bytes")
        end.done += 1
        if small:
            _copy(tensor.data_ptr(), heard[_HEADER:], nbytes)
            return
        _copy(tensor.data_ptr(), end.ring.next(nbytes), nbytes)
        end.owed += 1
        if end.owed >= ACKS_TOGETHER or end.owed >= self._slots:
            owed, end.owed = end.owed, 0
            try:
                os.write(end.writes, bytes(owed))
            except BrokenPipeError:
                return  # the sender closed after its last message, which is complete; a later message would raise

    def flush(self) -> None:
        """Does nothing, because everything sent is already copied."""

    def close(self) -> None:
        """Unmaps the memory and closes the pipes. A peer that still waits for this rank sees that it is gone."""
        for end in self._ends.values():
            end.close()
        self._ends.clear()

    def _read(self, end: _End, most: int) -> bytes:
        """Sleeps until the peer writes, and reads it. An empty read means that the peer is gone."""
        timeout_s = self.timeout_s
        if timeout_s is not None and not _readable(end.reads, timeout_s):
            raise PeerSilent(end.channel, self.rank, timeout_s)
        if heard := os.read(end.reads, most):
            return heard
        raise PeerLost(end.channel, self.rank)


def _readable(file: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))


def _offer(channel: Channel, line: socket.socket, slots: int) -> _End:
    """Creates the memory and the pipes of an outgoing channel and sends the other ends to the peer. They are closed here."""
    memory = os.memfd_create(label(channel))
    data_reads, data_writes = os.pipe()
    ack_reads, ack_writes = os.pipe()
    give(line, label(channel), [data_reads, ack_writes, memory])
    os.close(data_reads)
    os.close(ack_writes)
    return _End(channel, _Ring(memory, slots, grows=True), ack_reads, data_writes, slots, _small(data_writes, slots))


def _accept(channel: Channel, line: socket.socket, slots: int) -> _End:
    data_reads, ack_writes, memory = take(line, label(channel), 3, channel.source)
    return _End(channel, _Ring(memory, slots, grows=False), data_reads, ack_writes, 0, _small(data_reads, slots))


def _small(pipe: int, slots: int) -> int:
    """Returns the size up to which messages go through a pipe, the same at both ends.

    Each message may take a page, and as many messages as there are slots must fit.
    """
    return _SMALL if fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) >= slots * mmap.PAGESIZE else 0


class Closed(Protocol):
    """An object that can be closed."""

    def close(self) -> None:
        """Releases its resources."""


def close_in_forked_children(transport: Closed) -> None:
    """Closes the copies in a forked child (data loaders fork). They would hide the death of this process from its peers."""
    held = weakref.ref(transport)

    def close_copy() -> None:
        if (mine := held()) is not None:
            mine.close()

    os.register_at_fork(after_in_child=close_copy)
