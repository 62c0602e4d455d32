"""Every plan of one width that a search considers, with a bound on its step and on its memory, before anything is built.

Cuts are even by work; if they miss the memory of a worker, cuts that fit follow. The bounds are those of `group_bounds.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import islice, product

import numpy as np
from numpy.typing import NDArray

from meshwright.planners._search.candidate_plans import Candidate, Enumeration
from meshwright.planners._search.capped_cuts import capped_cuts
from meshwright.planners._search.effort import FEW
from meshwright.planners._search.even_cuts import even_cuts
from meshwright.planners._search.families import ZERO_3, Family, families
from meshwright.planners._search.grid_layout import (
    DeviceGrid,
    grid,
    stage_slowness,
    sync_groups,
    worker_slowness,
    worker_table,
)
from meshwright.planners._search.group_bounds import GroupBounds, Timed, placement_of
from meshwright.planners._search.problem import Floats, Problem
from meshwright.planners._search.tensor_costs import TensorChoice, tensor_choices, tensor_saved, tensor_seconds

Ints = NDArray[np.int64]
ZEROS = ("replicated", "zero-1", "zero-2")
TENSOR_SIZES = (1, 2, 4, 8, 16)
ROOMY = 0.5
"""If less than this share of a device is used by what is known before a simulation, modes that save memory are not tried."""


class Enumerator:
    """Walks through all combinations, and keeps what several of them share."""

    def __init__(self, problem: Problem, refused: Collection[TensorChoice] = ()) -> None:
        self.problem, self.refused = problem, refused
        self.limited = problem.is_limited
        self.least_memory = float(problem.memory.min()) if self.limited else 0.0
        self._timed: dict[tuple[object, ...], Timed] = {}
        self._cuts: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._groups: dict[tuple[object, ...], GroupBounds] = {}
        self._grids: dict[tuple[object, ...], DeviceGrid] = {}
        self._rates: dict[tuple[object, ...], tuple[Floats, int]] = {}
        self._tensor: dict[tuple[int, int | None], list[TensorChoice]] = {}
        self._lives: dict[tuple[object, ...], tuple[Floats, Floats]] = {}

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
                for family in islice(self._families(pp, dp, tp, count), 1 if few else None):
                    tight = False
                    for tensor, recompute in product(tensors, (False, True)):
                        if recompute and not tight:
                            continue  # a plan that fits without it is faster
                        for found in self._variants(family, pp, dp, tensor, (rows, share, count), recompute):
                            bounded += 1
                            tight = tight or found.about_bytes > -ROOMY * self.least_memory
                            (misfit if found.over_bytes > 0 else fit).append(found)
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
            single = [family for family in families(wanted) if family.has_line][:1]
            yield from single
            enough = self.problem.layers >= ZERO_3.chunks
            if dp > 1 and tp == 1 and wanted in (None, "interleaved") and enough:
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
                link = self._tensor_link(tp)
                seconds = {
                    choice: sum(float(x.sum()) for x in tensor_seconds(self.problem.profile, choice, rows or 1, *link))
                    for choice in choices
                }
                choices.sort(key=lambda choice: seconds[choice])
            smaller = [each for each in choices if not each.copies_residual]
            self._tensor[key] = choices[:1] + (smaller[:1] if choices[:1] != smaller[:1] else [])
        return self._tensor[key]

    def _tensor_link(self, tp: int) -> tuple[float, float]:
        """The slowest link inside any run of `tp` neighbours."""
        order = np.array(self.problem.order[: self.problem.devices // tp * tp]).reshape(-1, tp)
        latency, rate = self.problem.links.between(order[:, :-1], order[:, 1:])
        return float(latency.max()), float(rate.min())

    def timed(self, rows: int | None, share: int, tensor: TensorChoice) -> Timed:
        """Returns the seconds of layers for these rows and tensor ranks."""
        key = (rows, share, tensor)
        if key not in self._timed:
            arrays = self.problem.arrays(rows, share)
            tp = tensor.tp
            none = np.zeros(self.problem.layers)
            there, back = none, none
            if tp > 1:
                there, back = tensor_seconds(self.problem.profile, tensor, rows or 1, *self._tensor_link(tp))
            forward, input_s, weight = arrays.forward / tp + there, arrays.input / tp + back, arrays.weight / tp
            found = Timed(forward, input_s, weight, there + back)
            for name, values in (
                ("work", forward + input_s + weight),
                ("again", 2 * forward + input_s + weight),
                ("forward", forward),
                ("input", input_s),
                ("weight", weight),
                ("tensor", found.tensor),
                ("saved", tensor_saved(self.problem.profile, tensor, arrays.saved, arrays.output)),
            ):
                found.sums[name] = np.concatenate([[0.0], np.cumsum(values)])
            self._timed[key] = found
        return self._timed[key]

    def grid(self, pp: int, dp: int, tp: int, layout: str, reverse: bool = False) -> DeviceGrid:
        """Returns the devices of a layout."""
        key = (pp, dp, tp, layout, reverse)
        if key not in self._grids:
            order = self.problem.order
            self._grids[key] = grid(order[::-1] if reverse else order, pp, dp, tp, layout)
        return self._grids[key]

    def grid_of(self, plan: Candidate) -> DeviceGrid:
        """Returns the devices of a plan."""
        pp, dp, tp = plan.pp, plan.dp, plan.tensor.tp
        return grid(plan.ranks, pp, dp, tp, "copies") if plan.ranks else self.grid(pp, dp, tp, plan.layout, plan.reverse)

    def _variants(
        self, family: Family, pp: int, dp: int, tensor: TensorChoice, split: tuple[int | None, int, int], recompute: bool
    ) -> Iterator[Candidate]:
        """Yields what differs in layout and in how copies divide their state."""
        rows, share, count = split
        layouts = ("stages", "copies") if pp > 1 and dp > 1 else ("stages",)
        shares = dp * family.replicas
        zeros = ("zero-3",) if family is ZERO_3 else ZEROS if self.limited and shares > 1 else ZEROS[:1]
        roomy = False
        for layout in layouts:
            for reverse in (False,) if self.problem.uniform else (False, True):
                found = self.grid(pp, dp, tensor.tp, layout, reverse)
                group = self._group(family, pp, (rows, share), tensor, recompute, found)
                plan = Candidate(family, pp, dp, tensor, rows, share, count, "", recompute, layout, (), 0.0, reverse=reverse)
                least_s = self._least_s(plan, group)
                for zero in zeros:
                    if zero != zeros[0] and roomy:
                        break  # what fits with whole state is as fast and simpler
                    each = self._bounded(plan, zero, group, least_s, found)
                    roomy = each.about_bytes <= -ROOMY * self.least_memory if zero == zeros[0] else roomy
                    yield each
                    if each.over_bytes > 0 and family.has_line and pp > 1:
                        yield from self._capped(each, group, found)

    def _least_s(self, plan: Candidate, group: GroupBounds) -> float:
        """A bound on the step without the update."""
        most = self.alive(plan.family, plan.pp, plan.microbatches)[1]
        return group.bound_s(plan.microbatches, self._sync_s(plan, group), most)

    def _bounded(self, plan: Candidate, zero: str, group: GroupBounds, least_s: float, found: DeviceGrid) -> Candidate:
        """Returns a plan with the cuts of a group and with its bounds, if copies divide their state as `zero` says."""
        problem, shares = self.problem, plan.dp * plan.family.replicas
        over = about = -np.inf
        if self.limited:
            least = self.alive(plan.family, plan.pp, plan.microbatches)[0]
            over, about = group.over_bytes(problem, zero, shares, least, self._capacity(found), plan.microbatches)
        step = least_s + group.update_s(problem, zero, shares, found.devices)
        return replace(plan, zero=zero, ends=group.ends, bound_s=step, over_bytes=over, about_bytes=about, sharp=False)

    def _capacity(self, found: DeviceGrid) -> Floats:
        """The memory of the smallest device of each worker."""
        least: Floats = self.problem.memory[found.devices].min(axis=(1, 2))
        return self.problem.memory[:1] if self.problem.uniform else least

    def _capped(self, plan: Candidate, group: GroupBounds, found: DeviceGrid) -> Iterator[Candidate]:
        """Yields a plan whose stages have a worker each with cuts that fit its memory, if there are any."""
        alive = self.alive(plan.family, plan.pp, plan.microbatches)[0]
        room = group.room(self.problem, plan.zero, plan.dp, alive, self._capacity(found))
        timed = self.timed(plan.rows, plan.share, plan.tensor)
        ends = capped_cuts(timed.sums["again" if plan.recompute else "work"], group.slowness, room)
        if ends is not None and ends != group.ends:
            yield self.recut(plan, ends)

    def recut(self, plan: Candidate, ends: tuple[int, ...]) -> Candidate:
        """Returns a plan with other cuts, and its bounds."""
        found = self.grid_of(plan)
        group = self._group(plan.family, plan.pp, (plan.rows, plan.share), plan.tensor, plan.recompute, found, ends)
        return self._bounded(plan, plan.zero, group, self._least_s(plan, group), found)

    def alive(self, family: Family, pp: int, count: int) -> tuple[Floats, Floats]:
        """Returns the least and the most activations of each worker."""
        key = (family, pp, count)
        if key not in self._lives:
            least, most = (
                np.array([alive(w, pp, count) for w in range(pp)], dtype=np.float64)
                for alive in (family.live, family.most or family.live)
            )
            self._lives[key] = least, most
        return self._lives[key]

    def _group(
        self,
        family: Family,
        pp: int,
        rows: tuple[int | None, int],
        tensor: TensorChoice,
        recompute: bool,
        found: DeviceGrid,
        ends: tuple[int, ...] = (),
    ) -> GroupBounds:
        """Returns the bounds of plans with these cuts, or with even ones."""
        problem = self.problem
        workers = problem.slowness[:1] if problem.uniform else worker_slowness(problem, found)
        slow = tuple(workers.tolist())
        key = (family, pp, rows, tensor, recompute, slow, ends)
        if key not in self._groups:
            placement = placement_of(family, pp)
            stages = slow * placement.stages if problem.uniform else tuple(stage_slowness(placement, workers).tolist())
            timed = self.timed(*rows, tensor)
            cut_key = (rows, tensor, recompute, stages)
            if not ends and cut_key not in self._cuts:
                self._cuts[cut_key] = even_cuts(timed.sums["again" if recompute else "work"], stages)
            cuts = ends or self._cuts[cut_key]
            self._groups[key] = GroupBounds(problem, family, placement, timed, cuts, stages, recompute, tensor, rows)
        return self._groups[key]

    def _sync_s(self, plan: Candidate, group: GroupBounds) -> Floats:
        """The least time of the sums of each stage: two gathers at the best rate of its group.

        Copies that divide their state gather parameters after the sum of gradients, which takes as long as the second half of a
        plain sum. With zero-3 nothing is gathered at the end of a step.
        """
        family, tp, replicas = plan.family, plan.tensor.tp, plan.family.replicas
        key = (family if replicas > 1 else None, plan.pp, plan.dp, tp, plan.layout, plan.reverse, plan.ranks)
        if key not in self._rates:
            found = self.grid_of(plan)
            placement = placement_of(family, plan.pp)
            groups = list(found.devices[:, :, 0]) if replicas == 1 else sync_groups(found, placement)
            self._rates[key] = (self.problem.links.gather_rates(groups), min(map(len, groups)))
        rates, count = self._rates[key]
        if replicas == 1:
            rates = rates[worker_table(placement_of(family, plan.pp))[0]]
        gathers = 1 if family is ZERO_3 else 2
        sizes = np.maximum(group.parameters - self.problem.tied / tp, 0.0)  # tied ones are added up once
        least: Floats = gathers * (count - 1) / count * sizes / rates
        return least


def _pipelines(most: int, layers: int) -> list[int]:
    """Numbers of stages worth trying: all small ones, then divisors and powers of two."""
    limit = min(most, layers)
    if limit <= 16:
        return list(range(1, limit + 1))
    return [n for n in range(1, limit + 1) if most % n == 0 or n & (n - 1) == 0]
