"""The microbatches of a step that a rank loads if the workers of a stage take turns, and how their rows become one batch.

A microbatch is read and collated on its own, with its own random numbers. So all ranks that run it have the same tensors,
whichever other microbatches they load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.ir.schedule import Schedule
from meshwright.runtime.stage.batch import Given, Own, Several
from meshwright.train.data.collate import no_rows
from meshwright.train.data.sampler import share


def microbatches_of(schedule: Schedule, worker: int) -> tuple[int, ...]:
    """Returns the microbatches of a step that a worker runs in some round.

    Of k teams, team c runs microbatches m = c mod k. Rounds of N microbatches start at all multiples of gcd(N, k) mod k.
    """
    found: set[int] = set()
    for replica, stage in schedule.placement.held[worker]:
        teams = schedule.placement.teams[replica][stage]
        every = gcd(schedule.microbatches, len(teams))
        for index, team in enumerate(teams):
            if worker in team:
                found |= set(range(index % every, schedule.microbatches, every))
    return tuple(sorted(found))


def load(rows: list[Any], numbers: tuple[int, ...], count: int, tensors: Callable[[int, list[Any]], Given]) -> Own:
    """Returns some of the `count` microbatches of a step. `tensors(number, rows)` collates one of them."""
    parts = {number: mine for number in numbers if (mine := share(rows, number, count))}
    if not parts:
        return Own(no_rows(tensors(numbers[0], rows[:1])), several=Several(numbers, len(rows)))
    return Own(_joined({number: tensors(number, mine) for number, mine in parts.items()}), several=Several(numbers, len(rows)))


def _joined(parts: dict[int, Given]) -> Given:
    """Joins the tensors of microbatches by rows."""
    (first, one), *_ = parts.items()
    if len(parts) == 1:
        return one
    if isinstance(one, Mapping):
        named = {number: part for number, part in parts.items() if isinstance(part, Mapping)}
        return {name: _column(name, {number: part[name] for number, part in named.items()}) for name in one}
    listed = {number: tuple(part) for number, part in parts.items() if not isinstance(part, Mapping)}
    return tuple(_column(f"tensor {k}", {number: part[k] for number, part in listed.items()}) for k in range(len(listed[first])))


def _column(name: object, parts: dict[int, Tensor]) -> Tensor:
    sizes = {number: tuple(part.shape[1:]) for number, part in parts.items()}
    (first, size), *others = sizes.items()
    for number, other in others:
        if other != size:
            raise MeshwrightError(
                f"rows of {name} have the size {size} in microbatch {first} and {other} in microbatch {number} of a step; "
                f"ranks that run different microbatches need rows of one size",
                fix='pad all rows to one length, or use dp_mode="cyclic-pp", whose ranks load whole steps',
            )
    return torch.cat(list(parts.values()))
