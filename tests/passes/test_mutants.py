"""No mutant that the proof accepts gets stuck or computes another result than one process."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from meshwright import check, lower
from tests.support.cases import flat, tiny
from tests.support.mutants import judged, mutant, subject
from tests.support.mutations import drops
from tests.support.whole_numbers_run import verdict

SAMPLE, ALL, BLOCKS = 1500, 100_000, 20


def test_accepted_mutants_give_the_result_of_one_process() -> None:
    accepted = sum(judged(seed) for seed in range(SAMPLE))
    assert 0.05 * SAMPLE < accepted < 0.6 * SAMPLE, "both verdicts come up"


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_hundred_thousand_mutants(block: int) -> None:
    size = ALL // BLOCKS
    accepted = sum(judged(seed) for seed in range(SAMPLE + block * size, SAMPLE + (block + 1) * size))
    assert accepted > 0.05 * size


def test_subjects_are_of_every_kind() -> None:
    """Ties, teams, halves, rings, no flush, recompute, lowered and not: each in a fair share of the subjects."""
    kinds: Counter[str] = Counter()
    for seed in range(400):
        found = subject(Random(f"mutant {seed}"))
        wide = any(len(team) > 1 for copy in found.placement.teams for teams in copy for team in teams)
        flags = {"ties": found.ties, "parts": found.parts > 1, "teams": wide, "flush": found.flush, "ring": found.ring}
        flags |= {"endless": not found.flush, "recompute": found.recompute, "lowered": found.lowered, "turns": found.turns}
        kinds.update(name for name, there in flags.items() if there)
    assert all(count >= 12 for count in kinds.values()) and len(kinds) == 9, kinds


@pytest.mark.parametrize("case", tiny(every_option=False), ids=str)
def test_the_executor_says_no_by_itself(case: object) -> None:
    """It finds what is wrong without the proof: of schedules with an entry less, all that do not run right."""
    schedule = flat(lower(case.build()))  # type: ignore[attr-defined]
    assert verdict(schedule) == "" and check(schedule).ok
    wrong = [bool(verdict(mutation.schedule)) for mutation in drops(schedule)]
    assert sum(wrong) > 0.6 * len(wrong)


def test_mutants_are_what_their_seed_says() -> None:
    assert [mutant(seed) for seed in range(20)] == [mutant(seed) for seed in range(20)]
