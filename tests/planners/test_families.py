"""What is known of a schedule without building it, against its lists."""

from __future__ import annotations

import pytest

import meshwright as mw
from meshwright import Op
from meshwright.ir.action import actions
from meshwright.planners._search.families import FAMILIES, Family
from tests.support.thin import thinned


def most_alive(family: Family, workers: int, microbatches: int) -> list[int]:
    """For each worker the most forwards whose backward, or whose first half of a backward, has not ended."""
    schedule = mw.schedules.build(family.schedule, workers=workers, microbatches=microbatches, **family.options)
    assert schedule.placement == family.placement(workers)
    found = []
    for entries in schedule.period:
        now = most = 0
        for entry in entries:
            now += sum(action.op is Op.F for action in actions(entry))
            most = max(most, now)
            now -= sum(action.op in (Op.B, Op.I) for action in actions(entry))
        found.append(most)
    return found


@pytest.mark.parametrize("workers", [2, 3, 4, *thinned((5, 6, 8, 12, 16), 6, first=5)])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_activations_of_every_order(family: Family, workers: int) -> None:
    """A plan that has no room for the least is not built; the most bound its step."""
    for microbatches in (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 32, 48):
        if family.fits(workers, microbatches):
            found = most_alive(family, workers, microbatches)
            least = [family.live(worker, workers, microbatches) for worker in range(workers)]
            assert all(a >= b for a, b in zip(found, least, strict=True)), (microbatches, found, least)
            most = [(family.most or family.live)(worker, workers, microbatches) for worker in range(workers)]
            assert all(a <= b for a, b in zip(found, most, strict=True)), (microbatches, found, most)
