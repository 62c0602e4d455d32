"""The executor: one loop over a worker's lowered list.

    receive    posted where it stands in the list, waited for at the first use of its value
    compute    forwards, backwards, syncs and updates, compiled once by `Actions`
    send       started where it stands, overlaps what follows

It obeys the list and decides nothing. Values are numbered slots of a `Store`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

from meshwright.passes.messages import OUTSTANDING
from meshwright.runtime.cpu_scheduling import batch_policy
from meshwright.runtime.program import Instruction, Program
from meshwright.runtime.recent import Recent
from meshwright.runtime.stage.stage import Bundle
from meshwright.runtime.tracing.clock import now
from meshwright.runtime.tracing.trace import Trace
from meshwright.runtime.transport.base import Channel
from meshwright.runtime.transport.edges import Edges, Incoming, Outgoing, Pending
from meshwright.runtime.watchdog.status import current

WINDOW_BYTES = 1 << 16
"""More than the checked number of receives may be posted on a channel where they are small: as many as fit in here ..."""

LARGEST = 64
"""... but not more than this."""

FORMS = 256
"""For how many forms of the data a compiled walk is kept; the one that was not used for the longest time is forgotten."""


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
"""A compiled instruction: runs it on every walk."""


class Actions(Protocol):
    """What the instructions of a worker do. `TrainActions` compute, `WaitActions` wait as long as computing would take.

    `store` holds the values of this worker; `token` is what the reader of a turn waits for.
    """

    store: Store
    token: Bundle

    def begin(self, first_step: int, batches: Mapping[int, Any]) -> None:
        """Called before every walk through the list, with the number of its first training step and its data by step."""

    def end(self) -> None:
        """Called after every walk."""

    def compile(self, instruction: Instruction, line: Outgoing | Incoming | None) -> Do:
        """The function that runs an instruction; `line` is the end of its channel where the instruction is a message."""

    def form(self) -> Hashable:
        """What all shapes of the coming walk follow from."""

    def shape(self, instruction: Instruction) -> object:
        """What the shape of a message of the coming walk follows from; None if it has no rows and is not sent."""


class Executor:
    """Walks through a program. `at` is the current instruction, for the watchdog, which reads it from another thread."""

    def __init__(self, program: Program, edges: Edges, actions: Actions, trace: Trace | None = None) -> None:
        self.program, self.edges, self.actions, self.trace = program, edges, actions, trace
        self.at: Instruction | None = None
        self.walks = 0
        self._compiled = {
            id(instruction): self._compile(instruction, None)
            for instruction in program.instructions
            if instruction.channel is None
        }
        self._walks = Recent[Hashable, list[tuple[Instruction, Do]]](FORMS)

    def run(self, first_step: int, batches: Mapping[int, Any]) -> None:
        """Walk through the list once; its first microbatch is the first of training step `first_step`."""
        status = current()
        seat = None if status is None else status.seated(self)
        self.actions.begin(first_step, batches)
        walk = self._walk()
        ends = None if self.trace is None or not self.trace.on else self.trace.walk([instruction for instruction, _ in walk])
        with batch_policy(self.edges.device):
            for instruction, do in walk:
                self.at = instruction
                if seat is not None:
                    seat.value = instruction.words
                do()
                if ends is not None:
                    ends.append(now())
        self.walks += 1
        self.edges.transport.flush()
        self.actions.end()
        self.at = None

    def _walk(self) -> list[tuple[Instruction, Do]]:
        """The instructions of this walk with their functions. Actions are compiled once, messages once per form of the data."""
        form = self.actions.form()
        found = self._walks.get(form)
        if found is None:
            shapes = {
                id(instruction): self.actions.shape(instruction)
                for instruction in self.program.instructions
                if instruction.channel is not None
            }
            early = self._early(shapes) if self.edges.posts_early else None
            instructions = early or self.program.instructions
            found = [
                (instruction, self._compiled.get(id(instruction)) or self._compile(instruction, shapes[id(instruction)]))
                for instruction in instructions
            ]
            if early is not None or not self.edges.posts_early:
                self._walks[form] = found
        return found

    def _compile(self, instruction: Instruction, shape: object) -> Do:
        """Receive, compute or send: the function that runs an instruction, with everything that stays the same looked up once."""
        if instruction.channel is None:
            do = self.actions.compile(instruction, None)
            return self._in_turn(instruction, do) if instruction.waits or instruction.signals else do
        if shape is None:
            return _nothing
        line = (
            self.edges.outgoing(instruction.channel, shape)
            if instruction.sends
            else self.edges.incoming(instruction.channel, shape)
        )
        return self.actions.compile(instruction, line)

    def _in_turn(self, instruction: Instruction, do: Do) -> Do:
        """An action that waits for turns, or signals them."""
        store, token = self.actions.store, self.actions.token

        def act() -> None:
            for slot in instruction.waits:
                store.pop(slot)
            do()
            for slot in instruction.signals:
                store.slots[slot] = token

        return act

    def _early(self, shapes: Mapping[int, object]) -> tuple[Instruction, ...] | None:
        """The list with receives moved up, for what does not block; None where a shape of this walk is not known yet."""
        depth: dict[Channel, int] = {}
        for instruction in self.program.instructions:
            if instruction.channel is None or instruction.sends:
                continue
            shape = shapes[id(instruction)]
            size = 1 if shape is None else self.edges.incoming(instruction.channel, shape).nbytes
            if size is None:
                return None
            depth[instruction.channel] = min(
                depth.get(instruction.channel, LARGEST), max(OUTSTANDING, WINDOW_BYTES // max(size, 1))
            )
        return self.program.early(depth)


def _nothing() -> None:
    """No row crosses here."""
