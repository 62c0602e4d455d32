"""Which device runs which worker of which data-parallel copy, and which links that uses.

    stages   the copies of a stage are neighbours: sums of gradients stay on fast links
    copies   the stages of a copy are neighbours: messages between stages stay on fast links

The tensor ranks of a worker are always neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.cluster import Cluster, Link
from meshwright.ir.placement import Placement
from meshwright.ir.plan.chosen_plan import PlanStage
from meshwright.planners._search.candidate_plans import Candidate
from meshwright.planners._search.problem import Problem

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class DeviceGrid:
    """Devices by [worker, copy, tensor rank]."""

    devices: Ints

    @property
    def ranks(self) -> tuple[int, ...]:
        """The device of each rank: copy by copy, worker by worker, tensor ranks together."""
        return tuple(int(device) for device in self.devices.transpose(1, 0, 2).ravel())


def grid(order: Sequence[int], pp: int, dp: int, tp: int, layout: str) -> DeviceGrid:
    """Returns the devices of a layout, in a given order of devices."""
    devices = np.array(order[: pp * dp * tp], np.int64)
    if layout == "stages":
        return DeviceGrid(devices.reshape(pp, dp, tp))
    return DeviceGrid(devices.reshape(dp, pp, tp).transpose(1, 0, 2))


def worker_slowness(problem: Problem, found: DeviceGrid) -> Floats:
    """The slowest device of each worker decides, over all copies: they wait for each other in every step."""
    slow: Floats = problem.slowness[found.devices].max(axis=(1, 2))
    return slow


def stage_slowness(placement: Placement, workers: Floats) -> Floats:
    """The slowest worker of each stage."""
    found: Floats = workers[worker_table(placement)].max(axis=0)
    return found


def worker_links(problem: Problem, found: DeviceGrid, placement: Placement) -> Cluster:
    """Returns the links from worker to worker: for each pair the slowest over all copies and tensor ranks, all used at once."""
    table = worker_table(placement)
    ends = {(min(a, b), max(a, b)) for row in table.tolist() for a, b in pairwise(row)}
    pairs = sorted((a, b) for a, b in ends if a != b)
    if not pairs:
        return Cluster(duplex=problem.cluster.duplex)
    here, there = (found.devices[list(side)] for side in zip(*pairs, strict=True))
    latency, rate = problem.links.shared(np.concatenate([here, there]), np.concatenate([there, here]))
    links = map(Link, latency.max(axis=(1, 2)).tolist(), rate.min(axis=(1, 2)).tolist())
    both = [*pairs, *((b, a) for a, b in pairs)]
    return Cluster(Link(), dict(zip(both, links, strict=True)), problem.cluster.duplex)


def sync_groups(found: DeviceGrid, placement: Placement) -> list[Ints]:
    """For each stage the devices that add up its gradients: all holders in all copies, at the first tensor coordinate."""
    table = np.sort(worker_table(placement), axis=0)
    if len(table) == 1:
        return list(found.devices[table[0], :, 0])
    if (np.diff(table, axis=0) > 0).all():  # no worker holds a stage twice
        return list(np.sort(found.devices[table.T, :, 0].reshape(table.shape[1], -1), axis=1))
    return [np.unique(found.devices[np.unique(holders), :, 0]) for holders in table.T]


@lru_cache(maxsize=256)
def worker_table(placement: Placement) -> Ints:
    """The worker of each [replica, stage]."""
    return np.array([[teams[0][0] for teams in replica] for replica in placement.teams], np.int64)


def grid_stages(found: DeviceGrid, placement: Placement, plan: Candidate) -> tuple[PlanStage, ...]:
    """The stages of a plan, each with its devices in all copies."""
    holders = [np.unique(workers) for workers in worker_table(placement).T]
    shares = plan.family.recompute_shares(len(plan.ends), plan.recompute)
    return tuple(
        PlanStage(first, end - 1, tuple(found.devices[workers].ravel().tolist()), share)
        for first, end, workers, share in zip((0, *plan.ends[:-1]), plan.ends, holders, shares, strict=True)
    )
