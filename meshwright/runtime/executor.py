"""The executor: one loop over a worker's lowered list, one match.

It obeys the list and decides nothing. Values are slots; a receive is posted where it stands and waited for at the first
use of its value; sends and syncs overlap what follows. What an action does is up to the hands: real ones compute on
stages and parameters, emulated ones wait.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Protocol

from meshwright.ir.action import Op
from meshwright.passes.comm import OUTSTANDING
from meshwright.runtime.clock import now
from meshwright.runtime.device import patience
from meshwright.runtime.edges import Edges, Outgoing, Pending
from meshwright.runtime.program import Program, Step
from meshwright.runtime.stage import Bundle
from meshwright.runtime.status import current
from meshwright.runtime.trace import Trace
from meshwright.runtime.transport.base import Channel

WINDOW_BYTES = 1 << 16
"""More than the checked number of receives may be posted on a channel where they are small: as many as fit in here ..."""

LARGEST = 64
"""... but not more than this."""

FORMS = 16
"""For how many forms of its data a walk is kept ready."""


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


Do = Callable[[], None]
"""What does a step."""


class Hands(Protocol):
    """What actions do. `store` is the executor's; each method makes a step ready, once, and returns what does it each time."""

    store: Store

    def begin(self, first_step: int) -> None:
        """A walk through the list starts, with this step of the data."""

    def end(self) -> None:
        """It is over."""

    def forward(self, step: Step) -> Do:
        """F."""

    def backward(self, step: Step, *, weights: bool) -> Do:
        """B, or I where the weights come later."""

    def finish(self, step: Step) -> Do:
        """W."""

    def recompute(self, step: Step) -> Do:
        """R."""

    def sync(self, step: Step) -> Do:
        """S."""

    def norm(self, step: Step) -> Do:
        """N."""

    def update(self, step: Step) -> Do:
        """U."""

    def turn(self, step: Step) -> Bundle:
        """What makes the reader of a turn wait for this step."""

    def outgoing(self, step: Step, line: Outgoing) -> Do:
        """Send what a message carries."""

    def incoming(self, step: Step) -> Callable[[], Bundle] | None:
        """What a receive fills where both ends know its shape beforehand."""

    def form(self) -> Hashable:
        """What all shapes of this walk follow from."""

    def shape(self, step: Step) -> object:
        """What the contract of a message of this walk depends on; None where no row crosses."""


class Executor:
    """Walks a program with a pair of hands. `at` is the step it is in, for whoever watches from another thread."""

    def __init__(self, program: Program, edges: Edges, hands: Hands, trace: Trace | None = None) -> None:
        self.program, self.edges, self.hands, self.trace = program, edges, hands, trace
        self.at: Step | None = None
        self.walks = 0
        self._actions = {id(step): self._action(step) for step in program.steps if step.channel is None}
        self._walks: dict[Hashable, list[tuple[Step, Do]]] = {}

    def run(self, first_step: int = 0) -> None:
        """Walk the list once; its first microbatch is the first of step `first_step`."""
        status = current()
        seat = None if status is None else status.seated(self)
        self.hands.begin(first_step)
        walk = self._walk()
        ends = None if self.trace is None or not self.trace.on else self.trace.walk([step for step, _ in walk])
        with patience(self.edges.device):
            for step, do in walk:
                self.at = step
                if seat is not None:
                    seat.value = step.words
                do()
                if ends is not None:
                    ends.append(now())
        self.walks += 1
        self.edges.transport.flush()
        self.hands.end()
        self.at = None

    def _walk(self) -> list[tuple[Step, Do]]:
        """The steps of this walk, each with what does it: actions made ready once, messages once per form of the data."""
        form = self.hands.form()
        found = self._walks.get(form)
        if found is None:
            shapes = {id(step): self.hands.shape(step) for step in self.program.steps if step.channel is not None}
            early = self._early(shapes) if self.edges.posts_early else None
            steps = early or self.program.steps
            found = [(step, self._actions.get(id(step)) or self._message(step, shapes[id(step)])) for step in steps]
            if early is not None or not self.edges.posts_early:
                if len(self._walks) >= FORMS:
                    self._walks.clear()
                self._walks[form] = found
        return found

    def _action(self, step: Step) -> Do:
        """The one match: what does an action, with all that does not change from walk to walk looked up."""
        hands = self.hands
        match step.action.op:
            case Op.F:
                do = hands.forward(step)
            case Op.B:
                do = hands.backward(step, weights=True)
            case Op.I:
                do = hands.backward(step, weights=False)
            case Op.W:
                do = hands.finish(step)
            case Op.R:
                do = hands.recompute(step)
            case Op.S:
                do = hands.sync(step)
            case Op.N:
                do = hands.norm(step)
            case Op.U:
                do = hands.update(step)
            case Op.G:
                raise AssertionError("parameters are whole, nothing gathers them")
        return self._in_turn(step, do) if step.waits or step.signals else do

    def _in_turn(self, step: Step, do: Do) -> Do:
        """An action that waits for turns, or signals them."""
        hands, store = self.hands, self.hands.store

        def act() -> None:
            for slot in step.waits:
                store.pop(slot)
            do()
            for slot in step.signals:
                store.slots[slot] = hands.turn(step)

        return act

    def _message(self, step: Step, shape: object) -> Do:
        """What does one end of a message of this shape."""
        assert step.channel is not None
        if shape is None:
            return _nothing
        if step.sends:
            return self.hands.outgoing(step, self.edges.outgoing(step.channel, shape))
        line, room = self.edges.incoming(step.channel, shape), self.hands.incoming(step)
        slots, slot = self.hands.store.slots, step.slot
        arrived = None if self.trace is None else partial(self.trace.arrived, step)
        return line.post_into(slots, slot, arrived) if room is None else line.fill_into(slots, slot, arrived, room)

    def _early(self, shapes: Mapping[int, object]) -> tuple[Step, ...] | None:
        """The list with receives moved up, for what does not block; None where a shape of this walk is not known yet."""
        depth: dict[Channel, int] = {}
        for step in self.program.steps:
            if step.channel is None or step.sends:
                continue
            shape = shapes[id(step)]
            size = 1 if shape is None else self.edges.incoming(step.channel, shape).nbytes
            if size is None:
                return None
            depth[step.channel] = min(depth.get(step.channel, LARGEST), max(OUTSTANDING, WINDOW_BYTES // max(size, 1)))
        return self.program.early(depth)


def _nothing() -> None:
    """No row crosses here."""
