"""Which numbers of rows to profile for a plan: those that its search may choose, so that no time is extrapolated to more rows.

    estimated             powers of two up to the batch, at most 128: another number costs nothing
    measured on a GPU     powers of two up to the batch, at most 32
    measured on a CPU     powers of two up to the batch, at most 8: each number is as much work as all before it

The rows of a microbatch that a user asks for are added to them.
"""

from __future__ import annotations

from meshwright.ir.cluster import Cluster
from meshwright.planners._limits import MOST_ROWS
from meshwright.train.profiling.profile_request import is_here, this_device

ROWS = (1, 2, 4)
"""The rows of a profile if nothing is known about its plan."""
ESTIMATED, MEASURED_ON_GPU, MEASURED_ON_CPU = MOST_ROWS, 32, 8
"""The most rows that are profiled without being asked for."""


def rows_to_profile(cluster: Cluster, *, batch: int | None, rows: int | None) -> tuple[int, ...]:
    """Returns the numbers of rows to profile for a step of `batch` rows, or for microbatches of `rows` rows.

    Devices that share a microbatch divide its rows, so smaller numbers are profiled too.
    """
    asked = batch if rows is None else rows
    if asked is None or asked < 1:
        return ROWS
    powers = [2**k for k in range(_most(cluster).bit_length()) if 2**k <= max(asked, 2)]
    return tuple(sorted({*powers, *([] if rows is None else [rows])}))


def _most(cluster: Cluster) -> int:
    if cluster.devices and not is_here(cluster.devices[0]):
        return ESTIMATED
    return MEASURED_ON_CPU if this_device().type == "cpu" else MEASURED_ON_GPU
