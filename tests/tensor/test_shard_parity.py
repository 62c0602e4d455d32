"""Sharded models against the user's model in one process, float64, on threads: losses, gradients, words, shares of matrices."""

from __future__ import annotations

import pytest

from tests.support.sharded import FAMILIES, Outcome, Request, box, declared_words, family, grid, line, parity, tesseract

BOUND = 1e-12


def check(outcome: Outcome) -> None:
    assert outcome.loss <= BOUND and outcome.gradient <= BOUND, outcome
    assert outcome.words == declared_words(outcome.settled)


ONE_EACH: list[tuple[str, Request]] = [
    ("gpt2", box(2, 2, 2)),
    ("llama", line(4)),
    ("bert", grid(2)),
    ("t5", line(2, sequence=True)),
    ("vit", tesseract(2, 2)),
    ("llama", box(2, 1, 2)),
]
BOXES = [box(*sides) for sides in ((2, 2, 2), (1, 4, 2), (2, 4, 1), (4, 1, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8))]
OTHERS = [
    line(1),
    line(2),
    line(4),
    line(8),
    line(2, sequence=True),
    line(8, sequence=True),
    grid(2),
    tesseract(2, 1),
    tesseract(2, 2),
]


@pytest.mark.parametrize(("name", "asked"), ONE_EACH)
def test_exact(name: str, asked: Request) -> None:
    check(parity(family(name), asked))


@pytest.mark.slow
@pytest.mark.parametrize("asked", [*BOXES, *OTHERS], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_exact_everywhere(name: str, asked: Request) -> None:
    check(parity(family(name, layers=2), asked, layers=True))
