"""What an executor is given: the slots that hold a worker's values, and the actions that compile its instructions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

from meshwright.runtime.program import Instruction
from meshwright.runtime.stage.stage import Bundle
from meshwright.runtime.transport.edges import Incoming, Outgoing, Pending


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
