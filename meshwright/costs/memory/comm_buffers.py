"""Memory of communication on CPU workers, besides the values that are sent: what the runtime and gloo allocate for it.

    sum of two cores of a host    a window of shared memory, as large as the gradients (`runtime/transport/pair_sum.py`)
    channel inside a host         a ring of `SLOTS` messages in shared memory; each end is charged half of it
    sums and gathers of ZeRO      gloo copies the whole unit, and a gather also the slice that is sent

On GPUs nothing is counted: NCCL has small buffers of its own, which are part of the reserve.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from meshwright.ir.cluster import Cluster
from meshwright.ir.placement import Placement
from meshwright.ir.stage_cost import StageCost

SLOTS = 6
"""The most messages of a channel in flight, as in `runtime/transport/shared_memory.py`."""


def share_memory(cluster: Cluster, devices: Sequence[int]) -> bool:
    """Returns whether these devices are cores of one host. Cores whose hosts are not known are assumed to be of one."""
    if not cluster.devices or not all(cluster.devices[device].is_core for device in devices):
        return False
    return not cluster.host_of or len({cluster.host_of[device] for device in devices}) == 1


def window_bytes(cluster: Cluster, holders: Sequence[int], parameters: float) -> float:
    """Returns the window in which one of the holders of a unit shows its gradients to the other."""
    return parameters if len(holders) == 2 and share_memory(cluster, holders) else 0.0


def ring_bytes(
    cluster: Cluster, devices: Sequence[Sequence[int]], costs: Sequence[StageCost], placement: Placement, *, microbatches: int
) -> list[float]:
    """Returns the share of each worker in the rings of its channels. `devices` are those of each worker in one copy."""
    sizes: dict[tuple[int, int, bool], float] = {}
    counts: dict[tuple[int, int, bool], float] = {}
    for replica in placement.teams:
        workers = [teams[0][0] for teams in replica]
        for stage, (one, other) in enumerate(pairwise(workers)):
            for source, target, back in ((one, other, False), (other, one, True)):
                if source != target and share_memory(cluster, (*devices[one], *devices[other])):
                    size = costs[stage].gradient_bytes if back else costs[stage].output_bytes
                    key = (source, target, back)
                    sizes[key] = max(sizes.get(key, 0.0), size)
                    counts[key] = counts.get(key, 0.0) + microbatches / placement.replicas
    found = [0.0] * placement.workers
    for (source, target, back), size in sizes.items():
        half = min(SLOTS, counts[source, target, back]) * size / 2
        found[source] += half
        found[target] += half
    return found


def copied_bytes(cluster: Cluster, holders: Sequence[int], parameters: float) -> float:
    """Returns what gloo copies while it gathers a divided unit; it copies less while it adds up its gradients."""
    if len(holders) < 2 or not cluster.devices or not all(cluster.devices[device].is_core for device in holders):
        return 0.0
    return parameters * (1 + 1 / len(holders))
