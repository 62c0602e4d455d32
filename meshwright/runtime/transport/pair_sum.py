"""Sum tensors of two CPU processes of one host through shared memory. Each has a window that the other can read:

    start    copy own tensors to own window, and write a byte to the other: the data is ready
    wait     read a byte from the other; own tensors += its window; write a byte back: the window is free again

a + b equals b + a, so both get the same bits, and the same as from a collective. A process sleeps while it reads a byte, and the
closed pipe tells it at once if the other died. `pair_for` checks whether this is possible.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.ir.action import Kind, Op, walk
from meshwright.ir.schedule import Schedule
from meshwright.runtime.transport.base import Channel
from meshwright.runtime.transport.faults import PeerLost, label
from meshwright.runtime.transport.handshake import give, meet, take
from meshwright.runtime.transport.shared_memory import SharedTransport, close_in_forked_children

MEET_TIMEOUT_S = 60.0
_BYTE = b"!"
_ALIGNED = 64


class PairSum:
    """One end of a pair that sums tensors of these shapes repeatedly. Both ends create it and use it in the same order."""

    def __init__(self, like: Sequence[Tensor], rank: int, peer: int, run_id: str) -> None:
        self._heard, self._told = Channel(peer, rank, Kind.SUM), Channel(rank, peer, Kind.SUM)
        memory, (reads, theirs) = os.memfd_create(label(self._told)), os.pipe()
        lines = meet(run_id, rank, {peer}, MEET_TIMEOUT_S)
        with lines[peer] as line:
            size = sum(map(_room, like))
            os.ftruncate(memory, size)
            give(line, label(self._told), [memory, theirs])
            os.close(theirs)
            their_memory, self._writes = take(line, label(self._heard), 2, peer)
        self._reads = reads
        self._window, self._others = _views(memory, like), _views(their_memory, like)
        self._tensors: Sequence[Tensor] = ()
        self._free = True  # the other has read the window
        close_in_forked_children(self)

    def start(self, tensors: Sequence[Tensor]) -> list[PairSum]:
        """Writes the tensors to the window. They are in use until `wait`."""
        if not self._free:
            self._hear()
        for place, tensor in zip(self._window, tensors, strict=True):
            place.copy_(tensor)
        self._tensors, self._free = tensors, False
        self._tell()
        return [self]

    def wait(self) -> None:
        """Adds the other's tensors."""
        self._hear()
        for tensor, place in zip(self._tensors, self._others, strict=True):
            tensor.add_(place)
        self._tensors = ()
        with contextlib.suppress(PeerLost):  # the other may have closed after its last sum, which is complete
            self._tell()

    def close(self) -> None:
        """Closes the pipes. If the other end still waits, it sees that this one is gone. The last view frees the memory."""
        for file in (self._reads, self._writes):
            if file >= 0:
                os.close(file)
        self._reads = self._writes = -1

    def _hear(self) -> None:
        if not os.read(self._reads, 1):
            raise PeerLost(self._heard, self._heard.target)

    def _tell(self) -> None:
        try:
            os.write(self._writes, _BYTE)
        except BrokenPipeError:
            raise PeerLost(self._told, self._told.source) from None


def pair_for(
    flats: Sequence[Tensor], transport: object, ranks: tuple[int, ...], rank: int, schedule: Schedule, unit: int
) -> PairSum | None:
    """Returns a sum for two ranks that share memory; None if a collective must do it."""
    if len(ranks) != 2 or not isinstance(transport, SharedTransport) or not _one_sum_at_a_time(schedule, unit):
        return None
    (peer,) = set(ranks) - {rank}
    return PairSum(flats, rank, peer, f"{transport.run_id}-{unit}")


def _one_sum_at_a_time(schedule: Schedule, unit: int) -> bool:
    """Returns whether every worker uses the sum of a unit's gradients before it starts the next one: a pair has room for one."""
    for actions in schedule.lists if schedule.flush else ():
        under_way = False
        for action in walk(actions):
            if action.stage == unit and action.op is Op.S and under_way:
                return False
            if action.stage == unit and action.op in (Op.S, Op.N, Op.U):
                under_way = action.op is Op.S
    return schedule.flush


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


def _views(memory: int, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors in a window. They keep the mapping alive; the file is closed."""
    window = mmap.mmap(memory, sum(map(_room, like)))
    os.close(memory)
    found, start = [], 0
    for tensor in like:
        size = tensor.numel()
        # torch.frombuffer rejects empty tensors
        found.append(torch.frombuffer(window, dtype=tensor.dtype, count=size, offset=start) if size else tensor)
        start += _room(tensor)
    return found
