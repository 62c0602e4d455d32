"""Receives that are posted early keep the order of their channel: messages of equal size would be exchanged in silence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

from meshwright import lower, schedules
from meshwright.runtime.program import Instruction, program
from meshwright.runtime.transport.base import Channel


def by_channel(instructions: Iterable[Instruction]) -> dict[Channel, list[int]]:
    found: dict[Channel, list[int]] = defaultdict(list)
    for instruction in instructions:
        if instruction.receives and instruction.channel is not None:
            found[instruction.channel].append(instruction.slot)
    return found


@pytest.mark.parametrize("depth", [1, 2, 3, 64])
@pytest.mark.parametrize("options", [{}, {"rule": "v1"}, {"form": "zero"}], ids=str)
def test_early_receives_keep_the_order_of_their_channel(options: dict[str, Any], depth: int) -> None:
    lowered = lower(schedules.build("cyclic", workers=4, microbatches=4, steps=4, first=1, **options))
    lowered = lowered.with_lists(lowered.lists)
    for worker in range(4):
        made = program(lowered, worker, lambda other: other)
        early = made.early(defaultdict(lambda: depth))
        assert by_channel(early) == by_channel(made.instructions)
        assert sorted(map(id, early)) == sorted(map(id, made.instructions))
        assert [i for i in early if not i.receives] == [i for i in made.instructions if not i.receives]
        places = {id(instruction): at for at, instruction in enumerate(early)}
        before = {slot: places[id(i)] for i in early if i.receives for slot in (i.slot,)}
        assert all(before[slot] < places[id(i)] for i in early for of in i.reads.values() for slot in of if slot in before)
