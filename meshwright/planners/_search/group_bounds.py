"""Bounds on the step and the memory of plans that differ only in copies, layout, and how copies divide state."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshwright.costs.memory.memory_classes import RESERVE, gradient_bytes, static_bytes
from meshwright.ir.placement import Placement
from meshwright.planners._search.cuts.capped_cuts import Room
from meshwright.planners._search.families import Family
from meshwright.planners._search.problem import Floats, Problem
from meshwright.planners._search.stage_seats import seats_of
from meshwright.planners._search.tensor_costs import TensorChoice

Ints = NDArray[np.int64]


@dataclass
class Timed:
    """Seconds of layers on one device, tensor ranks included, and their sums."""

    forward: Floats
    input: Floats
    weight: Floats
    tensor: Floats
    """Seconds of tensor collectives of a layer, forward and backward."""
    sums: dict[str, Floats] = field(default_factory=dict)


class GroupBounds:
    """Candidates that differ only in copies, layout, and how copies divide state."""

    def __init__(
        self,
        problem: Problem,
        family: Family,
        placement: Placement,
        timed: Timed,
        ends: tuple[int, ...],
        slowness: tuple[float, ...],
        recompute: bool,
        tensor: TensorChoice,
        rows: tuple[int | None, int],
    ) -> None:
        self.ends, self.family, self.slowness = ends, family, np.array(slowness)
        shares = np.array(family.recompute_shares(len(ends), recompute))
        self.seats = seats = seats_of(placement)
        at, before = np.array(ends), np.array((0, *ends[:-1]))
        slow = self.slowness

        def stage_sums(name: str) -> Floats:
            found: Floats = timed.sums[name][at] - timed.sums[name][before]
            return found

        forward = stage_sums("forward") * slow
        again = forward * shares
        backward = (stage_sums("input") + stage_sums("weight")) * slow + (0.0 if family.early else again)
        chain = stage_sums("input") * slow if family.split else backward
        self.stage_work = forward + backward + (again if family.early else 0.0)
        self.parameters = (problem.parameter_sums[at] - problem.parameter_sums[before]) / tensor.tp
        self.first_head = np.concatenate([[0.0], np.cumsum(forward)[:-1]])
        self.head = seats.least(self.first_head)
        after = np.concatenate([[0.0], np.cumsum(chain)[:-1]])
        self.tail = np.zeros(placement.workers) if family.split else seats.least(after)
        self.work = seats.total(self.stage_work) / placement.replicas
        stay = np.cumsum((forward + chain)[::-1])[::-1]  # from the forward of a stage to its backward
        self.stay = seats.total(stay)
        self.trip = float(stay[0])
        self._tp, self._saved, self._recompute = tensor.tp, timed.sums["saved"], recompute
        self.swaps = self.seats.most(shares) if family.split or family.early else 0.0  # what comes back replaces what was kept
        self._memory(problem, timed, (before, at), shares, tensor, rows)

    def _memory(
        self,
        problem: Problem,
        timed: Timed,
        ends: tuple[Ints, Ints],
        shares: Floats,
        tensor: TensorChoice,
        rows: tuple[int | None, int],
    ) -> None:
        before, at = ends
        kept = timed.sums["saved"][at] - timed.sums["saved"][before]
        arrays = problem.arrays(*rows)
        scratch = np.maximum.reduceat(arrays.transient, before) / tensor.tp
        self._scratch, self._crossing = float(arrays.transient.max()) / tensor.tp, 0.0
        if self._recompute:
            scratch = scratch + shares * kept
            crossing = arrays.output / (1 if tensor.copies_residual else tensor.tp)
            inputs = np.where(before > 0, crossing[np.maximum(before - 1, 0)], 0.0)
            kept = np.where(shares > 0, inputs, kept)
            self._crossing = float(crossing.max())
        self.held = np.maximum(self.seats.total_once(self.parameters) - problem.tied / tensor.tp, 0.0)
        self.largest = self.seats.most(self.parameters)
        self.kept = self.seats.least(kept)
        self.scratch = self.seats.most(scratch)

    def bound_s(self, count: int, sync_s: Floats, most: Floats) -> float:
        """Returns a lower bound on the time of a step with `count` microbatches, in any order.

        A worker holds `most` activations at once; other microbatches wait until one of these has come back.
        """
        each = count / self.seats.replicas
        waits = count // self.seats.replicas * float((self.stay / most).max())
        whole = float((self.head + count * self.work + self.tail).max())
        sums = float((self.first_head + each * self.stage_work + sync_s).max())
        return max(whole, sums, waits, self.trip)

    def over_bytes(
        self, problem: Problem, zero: str, shares: int, alive: Floats, capacity: Floats, count: int
    ) -> tuple[float, float]:
        """Returns how many bytes the fullest worker exceeds its memory by, at least and about; negative if it may fit.

        A worker holds the most activations besides its gradients if whole backwards alternate with forwards of one stage.
        Otherwise some gradients may not exist yet by then; all of them exist at the end.
        """
        static = self.held * static_bytes(1.0, problem.optimizer(1.0), zero=zero, shares=shares)  # linear in the parameters
        if zero == "zero-3":
            static = static + self.parameters.min()  # of the stage that runs
        elif zero == "zero-2":
            static = static + np.maximum(self.largest - problem.tied, 0.0)  # a gradient before its sum
        reserve = RESERVE * np.where(np.isfinite(capacity), capacity, 0.0)
        need = static + (alive - self.swaps) * self.kept + self.scratch + reserve
        late = self.held * gradient_bytes(1.0, zero=zero, shares=shares)
        alternates = (alive < count) & (self.family.has_line and not self.family.split)
        least = np.where(alternates, need, np.maximum(need - late, static + reserve))
        return float((least - capacity).max()), float((need - capacity).max())

    def room(self, problem: Problem, zero: str, shares: int, alive: Floats, capacity: Floats) -> Room:
        """Returns what stages with a worker each may hold, whatever their cuts: temporary memory is that of the largest layer."""
        each = static_bytes(1.0, problem.optimizer(1.0), zero=zero, shares=shares) / self._tp
        left = (1.0 - RESERVE) * capacity - self._scratch - (alive - self.swaps) * self._crossing
        held = np.ones_like(alive) if self._recompute else alive
        return Room(problem.parameter_sums, self._saved, each, held, left)

    def update_s(self, problem: Problem, zero: str, shares: int, devices: Ints) -> float:
        """The longest update of a worker, whose devices are given by [worker, copy, tensor rank]."""
        return problem.update_s(self.held / (1 if zero == "replicated" else shares), devices)


@lru_cache(maxsize=1024)
def placement_of(family: Family, pp: int) -> Placement:
    """Returns which worker has which stage under the schedule of a family."""
    return family.placement(pp)
