"""Random generators while a model is recorded: nothing is drawn, but each draw moves them on by a mark.

So a generator that was seeded anew shows, and one that was set back to where it had been.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor

MARK = 0x6D657368
"""Where the default generator starts while recording."""


class SetBack(Exception):
    """A generator was set back to a state it had before: the tape cannot say what that is."""


class Clocks:
    """The states that generators should be in, had nobody else touched them."""

    def __init__(self) -> None:
        self.expected: dict[int, Tensor] = {}
        self.marks: set[bytes] = set()
        self.known: list[Generator] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """The default generator starts at a mark; it is as before in the end."""
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(MARK)
        self._expect(torch.default_generator)
        try:
            yield
        finally:
            torch.set_rng_state(before)

    def tick(self, generator: Generator | None) -> Tensor | None:
        """A draw is noted: the state that has to be set before it, where somebody has set one."""
        at = generator or torch.default_generator
        now = at.get_state()
        expected = self.expected.get(id(at))
        found = None
        if expected is None or not torch.equal(now, expected):
            if _bytes(now) in self.marks:
                raise SetBack("a random generator is set back to an earlier state (fork_rng, set_rng_state)")
            found = now
        torch.empty(1).uniform_(generator=at)
        self._expect(at)
        return found

    def _expect(self, generator: Generator) -> None:
        if id(generator) not in self.expected:
            self.known.append(generator)
        state = generator.get_state()
        self.expected[id(generator)] = state
        self.marks.add(_bytes(state))


def _bytes(state: Tensor) -> bytes:
    return state.numpy().tobytes()
