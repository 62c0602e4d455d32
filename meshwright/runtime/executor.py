"""The executor: one loop over a worker's lowered list, one match.

It obeys the list and decides nothing. Values are slots; a receive is posted where it stands and waited for at the first
use of its value; sends and syncs overlap what follows. What an action does is up to the hands: real ones compute on
stages and parameters, emulated ones wait.
"""

from __future__ import annotations

from typing import Any, Protocol

from meshwright.ir.action import Op
from meshwright.passes.comm import OUTSTANDING
from meshwright.runtime.clock import now
from meshwright.runtime.edges import SHAPED, Edges, Pending
from meshwright.runtime.program import Program, Step
from meshwright.runtime.stage import Bundle
from meshwright.runtime.status import current
from meshwright.runtime.trace import Trace
from meshwright.runtime.transport.base import Channel

WINDOW_BYTES = 1 << 16
"""More than the checked number of receives may be posted on a channel where they are small: as many as fit in here ..."""

LARGEST = 64
"""... but not more than this."""


class Store:
    """The values that live on this worker, by slot."""

    def __init__(self, count: int) -> None:
        self.slots: list[Any] = [None] * count

    def take(self, slot: int) -> Any:
        """What is in a slot, waited for if it is still on its way; the slot stays filled."""
        found = self.slots[slot]
        if type(found) is Pending:
            found = self.slots[slot] = found.wait()
        return found

    def pop(self, slot: int) -> Any:
        """What is in a slot, which is empty afterwards."""
        found = self.slots[slot]
        self.slots[slot] = None
        return found.wait() if type(found) is Pending else found


class Hands(Protocol):
    """What actions do. `store` is the executor's; each method reads and writes the slots of its step."""

    store: Store

    def begin(self, first_step: int) -> None:
        """A walk through the list starts, with this step of the data."""

    def end(self) -> None:
        """It is over."""

    def forward(self, step: Step) -> None:
        """F."""

    def backward(self, step: Step, *, weights: bool) -> None:
        """B, or I where the weights come later."""

    def finish(self, step: Step) -> None:
        """W."""

    def recompute(self, step: Step) -> None:
        """R."""

    def sync(self, step: Step) -> None:
        """S."""

    def norm(self, step: Step) -> None:
        """N."""

    def update(self, step: Step) -> None:
        """U."""

    def turn(self, step: Step) -> Bundle:
        """What makes the reader of a turn wait for this step."""

    def outgoing(self, step: Step) -> Bundle | None:
        """What a send sends; None where no row crosses."""

    def incoming(self, step: Step) -> Bundle | None:
        """What a receive fills where both ends know its shape beforehand."""

    def shape(self, step: Step) -> object:
        """What the contract of a message depends on; None where no row crosses."""


class Executor:
    """Walks a program with a pair of hands. `at` is the step it is in, for whoever watches from another thread."""

    def __init__(self, program: Program, edges: Edges, hands: Hands, trace: Trace | None = None) -> None:
        self.program, self.edges, self.hands, self.trace = program, edges, hands, trace
        self.at: Step | None = None
        self.done = 0
        self._early: dict[object, tuple[Step, ...]] = {}

    def run(self, first_step: int = 0) -> None:
        """Walk the list once; its first microbatch is the first of step `first_step`."""
        status = current()
        seat, names = (None, {}) if status is None else status.seated(self)
        self.hands.begin(first_step)
        steps = self._steps()
        ends = None if self.trace is None else self.trace.walk(steps)
        for step in steps:
            self.at = step
            if seat is not None:
                seat.value = names[id(step)]
            if step.channel is None:
                self._act(step)
            elif step.sends:
                self._send(step)
            else:
                self._receive(step)
            if ends is not None:
                ends.append(now())
            self.done += 1
        self.edges.transport.flush()
        self.hands.end()
        self.at = None

    def _act(self, step: Step) -> None:
        hands = self.hands
        for slot in step.waits:
            hands.store.pop(slot)
        match step.action.op:
            case Op.F:
                hands.forward(step)
            case Op.B:
                hands.backward(step, weights=True)
            case Op.I:
                hands.backward(step, weights=False)
            case Op.W:
                hands.finish(step)
            case Op.R:
                hands.recompute(step)
            case Op.S:
                hands.sync(step)
            case Op.N:
                hands.norm(step)
            case Op.U:
                hands.update(step)
            case Op.G:
                raise AssertionError("parameters are whole, nothing gathers them")
        for slot in step.signals:
            hands.store.slots[slot] = hands.turn(step)

    def _steps(self) -> tuple[Step, ...]:
        """The list, with receives moved up where they do not block and every shape of this walk is known."""
        if not self.edges.posts_early:
            return self.program.steps
        shapes = tuple([self.hands.shape(step) if step.receives else None for step in self.program.steps])
        if shapes not in self._early:
            depth: dict[Channel, int] = {}
            for step, shape in zip(self.program.steps, shapes, strict=True):
                if step.channel is None or not step.receives:
                    continue
                size = self.edges.message_bytes(step.channel, shape) if step.channel.kind in SHAPED and shape else 1
                if size is None:
                    return self.program.steps
                depth[step.channel] = min(depth.get(step.channel, LARGEST), max(OUTSTANDING, WINDOW_BYTES // max(size, 1)))
            self._early = {shapes: self.program.early(depth)}
        return self._early[shapes]

    def _send(self, step: Step) -> None:
        assert step.channel is not None
        shape = self.hands.shape(step)
        if shape is not None and (bundle := self.hands.outgoing(step)) is not None:
            self.edges.send(step.channel, bundle, shape)

    def _receive(self, step: Step) -> None:
        assert step.channel is not None
        shape = self.hands.shape(step)
        if shape is None:
            return
        known = self.hands.incoming(step)
        posted = self.edges.receive(step.channel, shape) if known is None else self.edges.fill(step.channel, known)
        if self.trace is not None:
            posted.arrived = self.trace.arrived, step
        self.hands.store.slots[step.slot] = posted
