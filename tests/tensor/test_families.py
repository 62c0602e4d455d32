"""Families of the zoo under tensor modes: exact or refused by name, as the page says; most are exact."""

from __future__ import annotations

import pytest

from tests.zoo.every import FAMILIES
from tests.zoo.tensor_study import MODES, Fit, tensor_study
from tests.zoo.tensor_table import TENSOR_PAGE, cells_of, shares, tensor_row, tensor_rows_of

ROWS = tensor_rows_of(TENSOR_PAGE)
UNKNOWN = "?"
"""A family that was not measured since a rule has changed."""
QUICK = ("phi3", "bloom", "gpt2 texts")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES])
def test_every_family_is_exact_or_refused_as_the_page_says(name: str) -> None:
    found = tensor_study(name)
    bad = {mode: fitted.note for mode, fitted in found.modes.items() if fitted.fit in (Fit.WRONG, Fit.RAISES)}
    assert not bad, bad
    if name in ROWS and UNKNOWN not in cells_of(ROWS[name]):
        assert cells_of(tensor_row(found)) == cells_of(ROWS[name]), (
            "python -m tests.zoo.tensor_table --write docs/tensor-families.md"
        )


def test_no_family_of_the_page_is_wrong() -> None:
    assert ROWS.keys() <= FAMILIES.keys()
    assert {cell for line in ROWS.values() for cell in cells_of(line)} <= {"exact", "refused", "sizes", "-", UNKNOWN}


@pytest.mark.parametrize("mode", MODES)
def test_most_families_are_exact(mode: str) -> None:
    exact, every = shares(ROWS)[mode]
    assert every >= 100
    assert exact >= 0.6 * every
