"""What the proof accepts gives the result of one process on real engines too, not only on the executor of numbers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.conftest import Pool
from tests.support.engine_trials import trial, wrong
from tests.support.mutants import drawn

SAMPLE, ALL, BLOCKS = 50, 4000, 8
RINGS = (98, 107)
"""Rings in which a holder adds nothing."""


def judged(pool: Pool, seeds: Iterable[int]) -> int:
    """How many of the mutants of these seeds have run, all of them right."""
    count = 0
    for seed in seeds:
        if (given := trial(seed)) is not None:
            found = wrong(pool, given)
            assert not found, f"mutant {seed}: {found}\n{given}\n{drawn(given.schedule)}"
            count += 1
    return count


def test_a_few_accepted_mutants_train_as_one_process(pool: Pool) -> None:
    assert judged(pool, (*range(SAMPLE), *RINGS)) >= 5 + len(RINGS)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
def test_hundreds_of_accepted_mutants_train_as_one_process(pool: Pool, block: int) -> None:
    size = ALL // BLOCKS
    assert judged(pool, range(SAMPLE + block * size, SAMPLE + (block + 1) * size)) >= 25
