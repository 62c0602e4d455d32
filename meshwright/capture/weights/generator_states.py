"""Tracks random generators while a model is recorded. Tensors get no values, but each draw advances its generator by one number.

This detects a generator that was seeded again, and one that was reset to an earlier state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor

MARK = 0x6D657368
"""The seed of the default generator while recording."""


class SetBack(Exception):
    """A generator was reset to an earlier state, which the tape cannot express."""


class Clocks:
    """The states that generators have if no other code changed them."""

    def __init__(self) -> None:
        self.expected: dict[int, Tensor] = {}
        self.marks: set[bytes] = set()
        self.known: list[Generator] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start the default generator at a mark, and restore it at the end."""
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(MARK)
        self._expect(torch.default_generator)
        try:
            yield
        finally:
            torch.set_rng_state(before)

    def tick(self, generator: Generator | None) -> Tensor | None:
        """Record a draw. Returns the state to set before it if other code changed the generator, else None."""
        at = generator or torch.default_generator
        now = at.get_state()
        expected = self.expected.get(id(at))
        found = None
        if expected is None or not torch.equal(now, expected):
            if _bytes(now) in self.marks:
                raise SetBack("a random generator is reset to an earlier state (fork_rng, set_rng_state)")
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
