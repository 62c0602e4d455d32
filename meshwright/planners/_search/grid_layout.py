"""Which device runs which worker of which data-parallel copy, and which links that uses.

    stages   the copies of a stage are neighbours: sums of gradients stay on fast links
    copies   the stages of a copy are neighbours: messages between stages stay on fast links

The tensor ranks of a worker are always neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.cluster import Cluster, Link
from meshwright.ir.placement import Placement
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


def stage_slowness(placement: Placement, workers: Floats) -> list[float]:
    """The slowest worker of each stage."""
    return [max(float(workers[placement.teams[r][s][0][0]]) for r in range(placement.replicas)) for s in range(placement.stages)]


def worker_links(problem: Problem, found: DeviceGrid, placement: Placement) -> Cluster:
    """Returns the links between workers: for each pair the slowest over all copies and tensor ranks."""
    pairs = {
        tuple(sorted((placement.teams[r][s][0][0], placement.teams[r][s + 1][0][0])))
        for r in range(placement.replicas)
        for s in range(placement.stages - 1)
    }
    links: dict[tuple[int, int], Link] = {}
    for a, b in sorted(pair for pair in pairs if pair[0] != pair[1]):
        latency, rate = problem.links.between(found.devices[a], found.devices[b])
        back_latency, back = problem.links.between(found.devices[b], found.devices[a])
        links[a, b] = Link(float(max(latency.max(), back_latency.max())), float(min(rate.min(), back.min())))
    return Cluster(Link(), links, problem.cluster.duplex)


def sync_groups(found: DeviceGrid, placement: Placement) -> list[Ints]:
    """For each stage the devices that add up its gradients: all holders in all copies, at the first tensor coordinate."""
    groups: list[Ints] = []
    for s in range(placement.stages):
        holders = sorted({placement.teams[r][s][0][0] for r in range(placement.replicas)})
        groups.append(np.unique(found.devices[holders, :, 0]))
    return groups
