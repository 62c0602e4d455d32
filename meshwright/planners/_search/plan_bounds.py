"""Bounds of plans of one width. What several plans share is made once: their devices, their cuts, and sums over layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshwright.costs.memory.memory_classes import RESERVE, static_bytes
from meshwright.ir.links.link import Link
from meshwright.planners._search.candidate_plans import Candidate
from meshwright.planners._search.cuts.capped_cuts import capped_cuts
from meshwright.planners._search.cuts.even_cuts import even_cuts
from meshwright.planners._search.families import ZERO_3, Family
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
from meshwright.planners._search.stage_seats import seats_of
from meshwright.planners._search.tensor_costs import TensorChoice, tensor_saved, tensor_seconds

Ints = NDArray[np.int64]


class PlanBounds:
    """Bounds the step and the memory of plans, and keeps what several of them share."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.limited = problem.is_limited
        self._timed: dict[tuple[object, ...], Timed] = {}
        self._cuts: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._groups: dict[tuple[object, ...], GroupBounds] = {}
        self._grids: dict[tuple[object, ...], DeviceGrid] = {}
        self._rates: dict[tuple[object, ...], tuple[Floats, int]] = {}
        self._lives: dict[tuple[object, ...], tuple[Floats, Floats]] = {}

    def tensor_link(self, tp: int) -> tuple[float, float]:
        """Returns latency and bandwidth of collectives on the slowest links inside any run of `tp` neighbours."""
        order = np.array(self.problem.order[: self.problem.devices // tp * tp]).reshape(-1, tp)
        latency, rate = self.problem.links.between(order[:, :-1], order[:, 1:])
        found = Link(float(latency.max()), float(rate.min())).slower(self.problem.cluster.collective)
        return found.latency_s, found.bytes_per_s

    def timed(self, rows: int | None, share: int, tensor: TensorChoice) -> Timed:
        """Returns the seconds of layers for these rows and tensor ranks."""
        key = (rows, share, tensor)
        if key not in self._timed:
            arrays = self.problem.arrays(rows, share)
            tp = tensor.tp
            none = np.zeros(self.problem.layers)
            there, back = none, none
            if tp > 1:
                there, back = tensor_seconds(self.problem.profile, tensor, rows or 1, *self.tensor_link(tp))
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

    def least_s(self, plan: Candidate, group: GroupBounds) -> float:
        """A bound on the step without the update."""
        most = self.alive(plan.family, plan.pp, plan.microbatches)[1]
        return group.bound_s(plan.microbatches, self._sync_s(plan, group), most)

    def bounded(self, plan: Candidate, zero: str, group: GroupBounds, least_s: float, found: DeviceGrid) -> Candidate:
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
        if self.problem.uniform:
            return self.problem.memory[:1]
        least: Floats = self.problem.memory[found.devices].min(axis=(1, 2))
        return least

    def capped(self, plan: Candidate, group: GroupBounds, found: DeviceGrid) -> Candidate | None:
        """Returns a plan whose stages have a worker each with cuts that fit its memory; None if there are no other ones."""
        alive = self.alive(plan.family, plan.pp, plan.microbatches)[0]
        room = group.room(self.problem, plan.zero, plan.dp, alive, self._capacity(found))
        timed = self.timed(plan.rows, plan.share, plan.tensor)
        work, slowness = _cut_costs(plan.family, timed, tuple(group.slowness.tolist()), plan.recompute)
        ends = capped_cuts(work, np.array(slowness), room)
        return None if ends is None or ends == group.ends else self.recut(plan, ends)

    def recut(self, plan: Candidate, ends: tuple[int, ...]) -> Candidate:
        """Returns a plan with other cuts, and its bounds."""
        group, found = self._group_of(plan, ends)
        return self.bounded(plan, plan.zero, group, self.least_s(plan, group), found)

    def may_fit(self, plan: Candidate) -> bool:
        """Whether a plan could fit with other cuts: if the state of all workers is more than their memory, no cut fits."""
        problem, placement = self.problem, placement_of(plan.family, plan.pp)
        seats = seats_of(placement)
        holders = (len(seats.stages) - (0 if seats.again is None else int(seats.again.sum()))) // placement.stages
        held = (holders * problem.parameter_sums[-1] / placement.workers - problem.tied) / plan.tensor.tp
        state = static_bytes(1.0, problem.optimizer(1.0), zero=plan.zero, shares=plan.dp * plan.family.replicas)
        return bool(held * state <= (1.0 - RESERVE) * self._capacity(self.grid_of(plan)).mean())

    def _group_of(self, plan: Candidate, ends: tuple[int, ...]) -> tuple[GroupBounds, DeviceGrid]:
        found = self.grid_of(plan)
        return self.group(plan.family, plan.pp, (plan.rows, plan.share), plan.tensor, plan.recompute, found, ends), found

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

    def group(
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
        key = (family, pp, rows, tensor, recompute, slow)
        if not ends and key in self._groups:
            return self._groups[key]
        placement = placement_of(family, pp)
        stages = slow * placement.stages if problem.uniform else tuple(stage_slowness(placement, workers).tolist())
        timed = self.timed(*rows, tensor)
        work, slowness = _cut_costs(family, timed, stages, recompute)
        cut_key = (rows, tensor, recompute, slowness)
        if not ends and cut_key not in self._cuts:
            self._cuts[cut_key] = even_cuts(work, slowness)
        group = GroupBounds(problem, family, placement, timed, ends or self._cuts[cut_key], stages, recompute, tensor, rows)
        if not ends:  # others are used once
            self._groups[key] = group
        return group

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


def _cut_costs(family: Family, timed: Timed, slowness: tuple[float, ...], recompute: bool) -> tuple[Floats, tuple[float, ...]]:
    """Returns sums over the work of layers, and how slow each stage does it: cuts are even by both.

    A last stage that recomputes nothing counts as faster, by the share that recompute has in all work.
    """
    work = timed.sums["again" if recompute else "work"]
    if not family.early or not work[-1]:
        return work, slowness
    return work, (*slowness[:-1], slowness[-1] * float(timed.sums["work"][-1] / work[-1]))
