"""The executor: one loop over a worker's lowered list.

    receive    posted at its place in the list; the first use of its value waits for it
    compute    forwards, backwards, syncs and updates, compiled once by `Actions`
    send       started at its place in the list; it overlaps the instructions after it

The executor follows the list and makes no decisions. Values are numbered slots of a `Store`. A walk is the list with a function
for each instruction. It is compiled once per form of the data (sizes and dtypes of the batches), because messages depend on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from meshwright.passes.messages import OUTSTANDING
from meshwright.runtime.cpu_scheduling import batch_policy
from meshwright.runtime.executor.actions import Actions, Do
from meshwright.runtime.program import Instruction, Program
from meshwright.runtime.recent import Recent
from meshwright.runtime.tracing.clock import now
from meshwright.runtime.tracing.trace import Trace
from meshwright.runtime.transport.base import Channel
from meshwright.runtime.transport.send_receive import Edges, Incoming, Outgoing
from meshwright.runtime.watchdog.status import current

WINDOW_BYTES = 1 << 16
"""Small receives may be posted beyond the number that the proof has checked, up to this total size per channel."""

LARGEST = 64
"""The maximum number of posted receives per channel."""

FORMS = 256
"""The number of forms of the data whose compiled walks are kept. The least recently used one is dropped."""


class Walk(NamedTuple):
    """Instructions with their functions. If `early`, the receives were moved up; the headers of all `lines` are known then."""

    instructions: tuple[Instruction, ...]
    functions: list[Do]
    lines: list[Incoming]
    early: bool


class Executor:
    """Runs a program. The watchdog reads `at`, the current instruction, and `worker` from another thread."""

    def __init__(self, program: Program, edges: Edges, actions: Actions, trace: Trace | None = None) -> None:
        self.program, self.edges, self.actions, self.trace = program, edges, actions, trace
        self.at: Instruction | None = None
        self.worker: int | None = None
        self.walks = 0
        self._computes = {id(i): self._compute(i) for i in program.instructions if i.channel is None}
        self._walks = Recent[Hashable, Walk](FORMS)

    def run(self, first_step: int, batches: Mapping[int, Any]) -> None:
        """Runs the list once. Its first microbatch is the first one of training step `first_step`."""
        status = current()
        seat = None if status is None else status.seated(self)
        self.actions.begin(first_step, batches)
        walk = self._walk()
        traced, rounds = self.trace is not None and self.trace.on, self.program.schedule.steps
        ends = self.trace.walk(walk.instructions, rounds) if self.trace is not None and traced else None
        with batch_policy(self.edges.device):
            for instruction, do in zip(walk.instructions, walk.functions, strict=True):
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

    def _walk(self) -> Walk:
        """Returns the walk for the next data. It is compiled again if early receives became possible or impossible."""
        form = self.actions.form()
        walk = self._walks.get(form)
        if walk is None or walk.early != self._may_post_early(walk.lines):
            walk = self._walks[form] = self._compile()
        return walk

    def _compile(self) -> Walk:
        """Compiles a function for each instruction (receive, compute or send). Everything constant is looked up once, here."""
        lines = {id(i): self._line(i) for i in self.program.instructions if i.channel is not None}
        incoming = [line for line in lines.values() if isinstance(line, Incoming)]
        early = self._may_post_early(incoming)
        instructions = self.program.early(self._depths(lines)) if early else self.program.instructions
        functions = [
            self._computes.get(id(i)) or (_nothing if (line := lines[id(i)]) is None else self.actions.compile(i, line))
            for i in instructions
        ]
        return Walk(instructions, functions, incoming, early)

    def _line(self, message: Instruction) -> Outgoing | Incoming | None:
        """Returns the channel end for a message of the next walk; None if the message has no rows."""
        shape, channel = self.actions.shape(message), message.channel
        assert channel is not None
        if shape is None:
            return None
        return self.edges.outgoing(channel, shape) if message.sends else self.edges.incoming(channel, shape)

    def _compute(self, instruction: Instruction) -> Do:
        """Compiles an action, with the turns that it waits for and signals."""
        do, store, token = self.actions.compile(instruction, None), self.actions.store, self.actions.token
        if not instruction.waits and not instruction.signals:
            return do

        def act() -> None:
            for slot in instruction.waits:
                store.pop(slot)
            do()
            for slot in instruction.signals:
                store.slots[slot] = token

        return act

    def _may_post_early(self, lines: Iterable[Incoming]) -> bool:
        """True if receives may be moved up. Posting must never block, so all headers must be known."""
        return self.edges.posts_early and all(line.agreed for line in lines)

    def _depths(self, lines: Mapping[int, Outgoing | Incoming | None]) -> dict[Channel, int]:
        """Returns how many receives each channel may have posted, given the largest message of this walk."""
        found: dict[Channel, int] = {}
        for message in self.program.instructions:
            if message.channel is not None and not message.sends:
                line = lines[id(message)]
                fit = WINDOW_BYTES // max(line.nbytes, 1) if isinstance(line, Incoming) else LARGEST
                found[message.channel] = min(found.get(message.channel, LARGEST), max(OUTSTANDING, fit))
        return found


def _nothing() -> None:
    """Does nothing: the message has no rows."""
