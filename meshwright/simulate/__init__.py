"""(Schedule, costs, cluster) -> Timeline: one engine, and a compiled fast path that must agree with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.ir.cluster import Cluster
from meshwright.ir.schedule import Schedule
from meshwright.passes.sync import Sync
from meshwright.simulate.simulator import simulate

if TYPE_CHECKING:
    from meshwright.simulate.compiled import Compiled

__all__ = ["compile", "simulate"]


def compile(schedule: Schedule, cluster: Cluster | None = None, *, sync: Sync | str = Sync.EAGER) -> Compiled:
    """Prepare a schedule for many simulations: numba, cached on disk; needs the extra `fast`."""
    try:
        from meshwright.simulate.compiled import Compiled
    except ImportError as error:
        from meshwright.errors import MeshwrightError

        raise MeshwrightError("the compiled simulator needs numpy and numba", fix="pip install 'meshwright[fast]'") from error
    return Compiled(schedule, cluster, sync=sync)
