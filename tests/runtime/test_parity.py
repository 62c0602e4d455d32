"""Any plan equals one process: a pairwise cover of the matrix, and all of it in `make full`.

Schedules without a flush equal their own delayed rule bit for bit.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import pytest

from tests.conftest import Pool
from tests.support.parity import ASYNCHRONOUS, Point, matrix, pairwise_cover, variants
from tests.support.thin import slow

COVER = pairwise_cover(list(matrix()))


def holds(pool: Pool, point: Point) -> None:
    """Verify one point of the matrix against the bar of its dtype."""
    steps = 4 if point.variant[0] in ASYNCHRONOUS else 2  # a version that is read late must first be there
    found = pool.verify(point.build(), point.batch(), steps=steps, dtype=point.dtype, **point.plan())
    assert found.passed, f"{point}: {found.max_relative_error:.2e} {found.worst} {found.problems}"
    assert found.tolerance == {"float64": 1e-9, "float32": 1e-5}[point.dtype]
    if point.variant[0] in ASYNCHRONOUS and point.model != "tied":  # a tie is added up by its holders first, then between them
        assert found.max_relative_error == 0.0, found.worst
        assert point.dtype != "float64" or found.loss_error <= 1e-15  # ranks add up their losses in another order


def in_two_parts(points: list[Point]) -> list[Any]:
    """Of every variant its first two points; the others are slow."""
    seen: Counter[object] = Counter()
    found = []
    for point in points:
        seen[point.variant] += 1
        found.append(point if seen[point.variant] <= 2 else slow(point))
    return found


@pytest.mark.parametrize("point", in_two_parts(COVER), ids=str)
def test_a_plan_equals_one_process(pool: Pool, point: Point) -> None:
    holds(pool, point)


def test_the_cover_holds_every_pair_of_choices() -> None:
    def pairs(point: Point) -> set[object]:
        return set(combinations(vars(point).items(), 2))

    seen = set().union(*map(pairs, COVER))
    assert all(pairs(point) <= seen for point in matrix())
    assert {point.variant for point in COVER} == set(variants())


@pytest.mark.slow
@pytest.mark.parametrize("variant", variants(), ids=lambda v: "-".join([v[0], *(f"{k}={x}" for k, x in v[1])]))
@pytest.mark.parametrize("pp", [2, 4])
def test_the_whole_matrix(pool: Pool, variant: tuple[str, tuple[tuple[str, object], ...]], pp: int) -> None:
    for point in matrix(lean=True):
        if point.variant == variant and point.pp == pp:
            holds(pool, point)
