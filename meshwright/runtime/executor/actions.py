"""The two inputs of an executor: the slots that hold a worker's values, and the actions that compile its instructions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

from meshwright.runtime.program import Instruction
from meshwright.runtime.stage.stage import Bundle
from meshwright.runtime.transport.send_receive import Incoming, Outgoing, Pending


class Store:
    """Holds the values of this worker by slot."""

    def __init__(self, count: int) -> None:
        self.slots: list[Any] = [None] * count

    def take(self, slot: int) -> Any:
        """Returns the value of a slot, and waits for it if it is still being received. The slot keeps the value."""
        found = self.slots[slot]
        if type(found) is Pending:
            found = self.slots[slot] = found.wait()
        return found

    def pop(self, slot: int) -> Any:
        """Returns the value of a slot and empties the slot."""
        found = self.slots[slot]
        self.slots[slot] = None
        return found.wait() if type(found) is Pending else found


Do = Callable[[], None]
"""A compiled instruction. It is called once per walk."""


class Actions(Protocol):
    """Compiles the instructions of a worker. `TrainActions` compute; `WaitActions` wait for as long as computing would take.

    `store` holds the values of this worker. `token` is the message of a turn.
    """

    store: Store
    token: Bundle

    def begin(self, first_step: int, batches: Mapping[int, Any]) -> None:
        """Called before every walk, with the number of its first training step and the batches of its steps."""

    def end(self) -> None:
        """Called after every walk."""

    def compile(self, instruction: Instruction, line: Outgoing | Incoming | None) -> Do:
        """Compiles an instruction once; the returned function runs it on every walk. `line` is the channel end of a message."""

    def form(self) -> Hashable:
        """Returns a key that determines all shapes of the next walk."""

    def shape(self, instruction: Instruction) -> object:
        """Returns a key that determines the shape of a message in the next walk; None if the message has no rows."""
