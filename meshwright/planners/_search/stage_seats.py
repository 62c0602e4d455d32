"""Which stages a worker holds, as arrays: what is known of stages becomes what is known of workers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.placement import Placement

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StageSeats:
    """The stages of worker 0, then those of worker 1, and so on. A worker may hold a stage in several replicas.

    Each method takes one number for each stage and returns one for each worker.
    """

    replicas: int
    stages: Ints
    begins: Ints
    """Where the stages of each worker begin."""
    again: NDArray[np.bool_] | None
    """Whether a worker holds a stage that it has in another replica, too; None if there is no such stage."""

    def least(self, values: Floats) -> Floats:
        """The least of the stages of each worker."""
        found: Floats = np.minimum.reduceat(values[self.stages], self.begins)
        return found

    def most(self, values: Floats) -> Floats:
        """The largest of the stages of each worker."""
        found: Floats = np.maximum.reduceat(values[self.stages], self.begins)
        return found

    def total(self, values: Floats) -> Floats:
        """The sum over the stages of each worker, in all replicas."""
        found: Floats = np.add.reduceat(values[self.stages], self.begins)
        return found

    def total_once(self, values: Floats) -> Floats:
        """The same, but a stage that a worker has in several replicas counts once."""
        if self.again is None:
            return self.total(values)
        found: Floats = np.add.reduceat(np.where(self.again, 0.0, values[self.stages]), self.begins)
        return found


@lru_cache(maxsize=1024)
def seats_of(placement: Placement) -> StageSeats:
    """Returns the stages of each worker."""
    stages = [[stage for _, stage in pairs] for pairs in placement.held]
    again = [stage in of_worker[:place] for of_worker in stages for place, stage in enumerate(of_worker)]
    return StageSeats(
        placement.replicas,
        np.array([stage for of_worker in stages for stage in of_worker], np.int64),
        np.cumsum([0, *map(len, stages[:-1])]),
        np.array(again) if any(again) else None,
    )
