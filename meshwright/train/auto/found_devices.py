"""Compares the devices of a named cluster with those that a run finds: a plan must fit on what is really there.

Nothing is timed for this. A device of another kind is only reported: a plan may be tried on other machines than its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.costs.memory.memory_classes import reserve_bytes
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster, Device
from meshwright.ir.links.machines import same_kind
from meshwright.ir.plan.planned_file import PlannedFile

LESS = 0.95
"""A device with less than this share of the memory that its cluster file says has less memory: others differ by rounding."""


def differences(name: str, cluster: Cluster, planned: PlannedFile, found: Sequence[Device]) -> list[str]:
    """Returns in words how the devices of the ranks differ from those of the cluster that a plan was made for.

    Raises:
        MeshwrightError: A rank has less memory than its device in the cluster, and less than the plan may need there.
    """
    peak = max((planned.predicted or {}).get("peak_bytes", ()), default=0.0)
    notes: dict[str, None] = {}
    for rank, (said, here) in enumerate(zip(cluster.devices, found, strict=False)):
        needed = peak - reserve_bytes(said.memory_bytes)
        if here.memory_bytes < LESS * said.memory_bytes and here.memory_bytes < needed:
            raise MeshwrightError(
                f"rank {rank} has {here.memory_bytes / 1e9:.3g} GB of memory, but the cluster {name} says "
                f"{said.memory_bytes / 1e9:.3g} GB, and the chosen plan needs up to {needed / 1e9:.3g} GB",
                fix='parallel="auto", which measures the devices, or write their memory into the cluster file',
            )
        if not same_kind(said.kind, here.kind):
            notes[
                f"the cluster {name} has devices {said.kind}, but ranks run on {here.kind}: the prediction is for the first"
            ] = None
    return list(notes)
