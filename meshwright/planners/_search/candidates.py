"""Every plan of one width that a search considers, with a bound on its step and on its memory, before anything is built.

Cuts are even by work; if they miss the memory of a worker, cuts that fit follow. The bounds are those of `plan_bounds.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice, product

import numpy as np
from numpy.typing import NDArray

from meshwright.planners._search.candidate_plans import Candidate, Enumeration
from meshwright.planners._search.effort import FEW
from meshwright.planners._search.families import ZERO_3, Family, families
from meshwright.planners._search.plan_bounds import PlanBounds
from meshwright.planners._search.problem import Problem
from meshwright.planners._search.tensor_costs import TensorChoice, tensor_choices, tensor_seconds

Ints = NDArray[np.int64]
ZEROS = ("replicated", "zero-1", "zero-2")
TENSOR_SIZES = (1, 2, 4, 8, 16)
ROOMY = 0.5
"""If less than this share of a device is used by what is known before a simulation, modes that save memory are not tried."""
SIMPLER = 0.999
"""Nor are modes that make the bound of a step shorter by less."""


class Enumerator:
    """Walks through all combinations, and keeps what several of them share."""

    def __init__(self, problem: Problem, refused: Collection[TensorChoice] = ()) -> None:
        self.problem, self.refused = problem, refused
        self.bounds, self.limited = PlanBounds(problem), problem.is_limited
        self.least_memory = float(problem.memory.min()) if self.limited else 0.0
        self._tensor: dict[tuple[int, int | None], list[TensorChoice]] = {}

    def run(self, *, few: bool = False) -> Enumeration:
        """Returns all candidates, the most promising first; or a few simple ones, so that a first plan is there at once."""
        fit: list[Candidate] = []
        misfit: list[Candidate] = []
        bounded = 0
        for pp, dp, tp in self._degrees():
            if few and (pp & (pp - 1) or tp not in (1, 8)):
                continue
            for rows, share, count in self.problem.splits(dp)[: 1 if few else None]:
                tensors = self.tensors(tp, rows)[: 1 if few else None]
                crowded = False  # whether a schedule does not fit easily
                for family in islice(self._families(pp, dp, tp, count), 1 if few else None):
                    tight = family.early and (crowded or self.problem.limits.schedule is not None)
                    for tensor, recompute in product(tensors, (True,) if family.early else (False, True)):
                        if recompute and not tight:
                            continue  # a plan that fits without it is faster
                        for found in self._variants(family, pp, dp, tensor, (rows, share, count), recompute):
                            bounded += 1
                            tight = tight or found.about_bytes > -ROOMY * self.least_memory
                            (misfit if found.over_bytes > 0 else fit).append(found)
                    crowded = crowded or (tight and not family.early)
        fit.sort(key=lambda candidate: candidate.key)
        return Enumeration(fit, misfit, bounded)

    def _degrees(self) -> Iterator[tuple[int, int, int]]:
        """Pipeline, data-parallel and tensor degrees that fit on the devices."""
        problem, limits = self.problem, self.problem.limits
        for tp in TENSOR_SIZES if limits.tensor else (1,):
            rest = problem.devices // tp
            for pp in [limits.pp] if limits.pp else _pipelines(rest, problem.layers):
                most = rest // pp
                for dp in [limits.dp] if limits.dp else self._copies(most, pp):
                    if 1 <= dp <= most and pp <= problem.layers:
                        yield pp, dp, tp

    def _copies(self, most: int, pp: int) -> list[int]:
        """Numbers of copies worth trying: all on few devices, on more only large ones, and one device alone."""
        few, alone = self.problem.devices <= FEW, {1} if pp == 1 else set()
        batch = self.problem.batch
        if batch is not None:
            found = [n for n in range(most, 0, -1) if batch % n == 0]
            return found if few else sorted({*found[:2], *alone}, reverse=True)
        if few or most <= 4:
            return list(range(most, 0, -1))
        return sorted({most, most - 1, 2 ** (most.bit_length() - 1), most // 2, *alone}, reverse=True)

    def _families(self, pp: int, dp: int, tp: int, count: int) -> Iterator[Family]:
        """The schedules that run with these degrees. zero-3 runs without pipelines and tensor ranks."""
        wanted = self.problem.limits.schedule
        if pp == 1:
            single = [family for family in families(wanted) if family.has_line and family.fits(1, count)][:1]
            yield from single
            enough = self.problem.layers >= ZERO_3.chunks
            if dp > 1 and tp == 1 and wanted in (None, "interleaved") and enough and self.problem.limits.zero:
                yield ZERO_3
            return
        for family in families(wanted):
            if pp * family.chunks <= self.problem.layers and family.fits(pp, count):
                yield family

    def tensors(self, tp: int, rows: int | None) -> list[TensorChoice]:
        """Returns the mode with the least collectives; none if tensor ranks cannot be priced, or no mode can run.

        If its ranks keep whole what lies between layers, the best mode that divides that follows: it holds and sends less.
        """
        key = (tp, rows)
        if key not in self._tensor:
            found = [each for each in tensor_choices(self.problem.profile, tp) if each not in self.refused]
            choices = [each for each in found if (rows or 0) % each.row_unit == 0]
            if len(choices) > 1:
                link = self.bounds.tensor_link(tp)
                seconds = {
                    choice: sum(float(x.sum()) for x in tensor_seconds(self.problem.profile, choice, rows or 1, *link))
                    for choice in choices
                }
                choices.sort(key=lambda choice: seconds[choice])
            smaller = [each for each in choices if not each.copies_residual]
            self._tensor[key] = choices[:1] + (smaller[:1] if choices[:1] != smaller[:1] else [])
        return self._tensor[key]

    def _variants(
        self, family: Family, pp: int, dp: int, tensor: TensorChoice, split: tuple[int | None, int, int], recompute: bool
    ) -> Iterator[Candidate]:
        """Yields what differs in layout and in how copies divide their state."""
        rows, share, count = split
        bounds = self.bounds
        layouts = ("stages", "copies") if pp > 1 and dp > 1 else ("stages",)
        shares = dp * family.replicas
        zeros = ("zero-3",) if family is ZERO_3 else ZEROS if self.problem.limits.zero and shares > 1 else ZEROS[:1]
        roomy, whole_s = False, 0.0
        for layout in layouts:
            for reverse in (False,) if self.problem.uniform else (False, True):
                found = bounds.grid(pp, dp, tensor.tp, layout, reverse)
                group = bounds.group(family, pp, (rows, share), tensor, recompute, found)
                plan = Candidate(family, pp, dp, tensor, rows, share, count, "", recompute, layout, (), 0.0, reverse=reverse)
                least_s = bounds.least_s(plan, group)
                for zero in zeros:
                    each = bounds.bounded(plan, zero, group, least_s, found)
                    if zero == zeros[0]:
                        roomy, whole_s = each.about_bytes <= -ROOMY * self.least_memory, each.bound_s
                    elif roomy and (zero != "zero-1" or each.bound_s > SIMPLER * whole_s):
                        break  # whole state fits, is as fast and simpler; with divided state, updates are shorter
                    yield each
                    line = family.has_line and pp > 1
                    if each.over_bytes > 0 and line and (capped := bounds.capped(each, group, found)) is not None:
                        yield capped


def _pipelines(most: int, layers: int) -> list[int]:
    """Numbers of stages worth trying: all small ones, then divisors and powers of two."""
    limit = min(most, layers)
    if limit <= 16:
        return list(range(1, limit + 1))
    return [n for n in range(1, limit + 1) if most % n == 0 or n & (n - 1) == 0]
