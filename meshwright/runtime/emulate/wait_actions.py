"""Emulated actions: timed waits instead of compute, with the real messages, order and executor.

A stage that sleeps leaves the CPU idle, as a GPU would. So many workers run in real time on few cores. Every message carries two
times: when its link is free again, and when the message may be read:

    wall      an action starts when its messages have arrived (and their modelled time on the link has passed)
    stamped   an action starts at max(worker free, times in its messages), all modelled, and sleeps until then

Both follow the rules of the simulator, with the same prices. But each worker computes only its own times while it runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from meshwright.ir.action import Kind, Op
from meshwright.ir.analysis.price import Price
from meshwright.ir.cluster import Duplex
from meshwright.ir.timeline import Lane, Span
from meshwright.runtime.emulate.durations import Work, peer_of, rounds_before_compute, works
from meshwright.runtime.executor.actions import Do, Store
from meshwright.runtime.program import Instruction, Program
from meshwright.runtime.stage.stage import Bundle
from meshwright.runtime.tracing.clock import Clock, Timing
from meshwright.runtime.tracing.trace import Trace
from meshwright.runtime.transport.send_receive import Incoming, Outgoing, Pending

Groups = Mapping[tuple[int, ...], dist.ProcessGroup]
"""Process groups by the workers that hold a unit."""


class Reduction:
    """A sync in progress. Its end is known after the wait, from the latest time of all members."""

    __slots__ = ("_before", "_end_s", "_takes_s", "_word", "_work")

    def __init__(self, ready_s: float, takes_s: float, group: dist.ProcessGroup | None, before: Reduction | None) -> None:
        self._takes_s, self._before = takes_s, before
        self._end_s: float | None = None
        self._word = torch.tensor([ready_s], dtype=torch.float64)
        self._work = None if group is None else dist.all_reduce(self._word, dist.ReduceOp.MAX, group=group, async_op=True)

    def end_s(self) -> float:
        """Returns when the sum is complete."""
        if self._end_s is None:
            if self._work is not None:
                self._work.wait()
            before = self._before.end_s() if self._before is not None else 0.0
            self._end_s = max(self._word.item(), before) + self._takes_s
            self._before = self._work = None
        return self._end_s


class Arrivals(Store):
    """Slots that hold the times at which values may be read, or syncs.

    `turn_s` is the latest time of the turns that the executor has taken. `links[peer, outward]` is the time until which a link is
    busy.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(len(program.values))
        self.turn_s = 0.0
        self.links: dict[tuple[int, bool], float] = {}
        self.peers = {
            instruction.slot: peer_of(instruction)
            for instruction in program.instructions
            if instruction.channel is not None and not instruction.sends
        }

    def take(self, slot: int) -> object:
        """Returns the time of a message, after waiting for it, or anything else that is in the slot."""
        found = self.slots[slot]
        if type(found) is not Pending:
            return found
        free, ready = found.wait().tensors[0][:2].tolist()
        peer = self.peers[slot]
        self.links[peer, False] = free
        self.slots[slot] = ready
        return ready

    def pop(self, slot: int) -> object:
        """Empties a slot. The executor takes turns with this and drops them, so their time is kept in `turn_s`."""
        found = self.take(slot)
        self.slots[slot] = None
        if type(found) is float and found > self.turn_s:
            self.turn_s = found
        return found


class WaitActions:
    """The actions of an emulated worker. Each waits as long as the modelled device would take.

    `free_s` is when the device has finished what it has started, in modelled or in wall time. `stamps` are the actions that take
    time and the messages, at the times of the model.
    """

    def __init__(
        self,
        program: Program,
        price: Price,
        groups: Groups,
        timing: Timing,
        clock: Clock,
        trace: Trace | None = None,
        delays: Mapping[tuple[int, str], float] | None = None,
    ) -> None:
        """`delays` are seconds by which actions take longer than their price, by worker and text of the action."""
        self.program, self.price, self.groups, self.clock, self.trace = program, price, groups, clock, trace
        self.wall = timing is Timing.WALL
        self.half = price.cluster.duplex is Duplex.HALF
        self.arrivals = Arrivals(program)
        self.store: Store = self.arrivals
        self.free_s = self.ended_s = 0.0
        self.stamps: list[Span] = []
        self._works = works(program, price)
        for instruction in program.instructions if delays else ():
            self._works[id(instruction)].takes_s += (delays or {}).get((program.worker, instruction.name), 0.0)
        self._middle = rounds_before_compute(program.schedule)
        self._last: tuple[dist.ProcessGroup | None, Reduction] | None = None
        self.token = Bundle((torch.zeros(2, dtype=torch.float64),), (False,))

    def start(self, moment_s: float) -> None:
        """Sets the start time of the run."""
        self.free_s = self.ended_s = moment_s
        self.stamps.clear()
        self.arrivals.links.clear()
        self._last = None

    def begin(self, first_step: int, batches: Mapping[int, Any]) -> None:
        """Does nothing, because walks follow each other and take no data."""

    def end(self) -> None:
        """Waits until the device has finished."""
        self.clock.sleep_until(self.free_s)
        self.ended_s = self.clock.now()

    # -- actions

    def compile(self, instruction: Instruction, line: Outgoing | Incoming | None) -> Do:
        """Returns the function that waits as long as an instruction takes, or sends or receives a message of its value's size."""
        if isinstance(line, Outgoing):
            return lambda: line.send(self._message(instruction))
        if isinstance(line, Incoming):  # both ends know the size from the prices
            words = self._works[id(instruction)].words
            return line.fill_into(
                self.store.slots, instruction, lambda: Bundle((torch.empty(words, dtype=torch.float64),), (False,))
            )
        match instruction.action.op:
            case Op.S | Op.G if instruction.action.op is Op.G or not self.program.schedule.ring:
                members = self.program.schedule.holders[instruction.action.stage]
                made = Kind.PARAM if instruction.action.op is Op.G else Kind.SUM
                return partial(self._reduce, instruction, self.groups.get(members), made)
            case Op.N if instruction.round not in self._middle:  # at the end of a run no worker waits for it
                return lambda: None
            case Op.N:
                return partial(
                    self._reduce, instruction, dist.group.WORLD if self.program.schedule.workers > 1 else None, Kind.NORM
                )
            case _:
                return partial(self._act, instruction)

    def _act(self, instruction: Instruction) -> None:
        work = self._works[id(instruction)]
        if work.second:  # the first action of the cell has done both
            return
        ready = self._ready(work)
        start = max(self._now(), ready)
        if self.trace is not None or (work.takes_s and not self.wall):
            self.clock.sleep_until(start)
        if self.trace is not None:
            self.trace.begin()
            if instruction.action.op is Op.U:
                self.trace.landed(instruction.action.stage, instruction.round)
        self.free_s = start + work.takes_s
        if work.takes_s:
            self.stamps.append(Span(self.program.worker, Lane.COMPUTE, instruction.entry, start, self.free_s))
        # Stamped times are known in advance, so messages are sent while their action still sleeps.
        if self.wall or self.trace is not None:
            self.clock.sleep_until(self.free_s)

    def _reduce(self, instruction: Instruction, group: dist.ProcessGroup | None, kind: Kind) -> None:
        """Starts a collective. A worker's collectives run one after another.

        In the same group, the wait for a collective includes the one before. For another group, this waits for the one before
        here. That cannot deadlock, because the proved order has all its members before this collective.
        """
        work = self._works[id(instruction)]
        ready = max(self._now(), self._ready(work))
        before: Reduction | None = None
        if self._last is not None:
            if self._last[0] is group:
                before = self._last[1]
            else:
                ready = max(ready, self._last[1].end_s())
        if self.trace is not None:
            self.trace.watch(instruction.action.stage)
        found = Reduction(ready, work.takes_s, group, before)
        self._last = group, found
        for slot in instruction.writes[kind]:
            self.store.slots[slot] = found

    # -- messages

    def _message(self, instruction: Instruction) -> Bundle:
        work, peer, links = self._works[id(instruction)], peer_of(instruction), self.arrivals.links
        start = max(self._now(), links.get((peer, True), 0.0), *[self._stamp(slot) for slot in work.waits])
        if self.half:  # earlier messages of the list, in either direction, keep the link busy
            for slot in work.link_waits:
                self._stamp(slot)
            start = max(start, links.get((peer, False), 0.0))
        links[peer, True] = free = start + work.takes_s
        message = torch.empty(work.words, dtype=torch.float64)
        message[0], message[1] = free, free + work.latency_s
        self.stamps.append(Span(self.program.worker, Lane.SEND, instruction.entry, start, free + work.latency_s))
        return Bundle((message,), (False,))

    def form(self) -> Hashable:
        """Returns None, because sizes are the same in all walks."""
        return None

    def shape(self, instruction: Instruction) -> object:
        """Returns the size of a message. All messages are sent, and both ends know their sizes."""
        return self._works[id(instruction)].shape

    # -- times

    def _now(self) -> float:
        return self.clock.now() if self.wall else self.free_s

    def _ready(self, work: Work) -> float:
        """Waits for everything that an instruction needs. Returns the time at which it may start."""
        ready, self.arrivals.turn_s = self.arrivals.turn_s, 0.0
        for slot in work.waits:
            if (time := self._stamp(slot)) > ready:
                ready = time
        return ready

    def _stamp(self, slot: int) -> float:
        """Returns the time at which the value in a slot may be read."""
        found = self.store.take(slot)
        if type(found) is float:
            return found
        return found.end_s() if isinstance(found, Reduction) else 0.0
