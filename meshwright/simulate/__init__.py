"""(Schedule, costs, cluster) -> Timeline: a plain engine, and a compiled fast path that must give the same result.

simulator           the entry: lowers, sweeps, returns a timeline
event_graph         a schedule as events in a fixed order
compiled            the same with numba, for many costs
memory              what each worker holds over time
lower_bound         the shortest possible makespan
recompute_budget    the least recompute under a memory budget
quick_sweep         times without lowering, for searches
quick_program       its input as arrays
quick_kernels       its loops
quick_syncs         its sums of gradients
quick_wires         its messages
quick_memory        its memory
"""

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
    """Prepares a schedule for many simulations with numba, cached on disk. Needs the extra `fast`."""
    try:
        from meshwright.simulate.compiled import Compiled
    except ImportError as error:
        from meshwright.errors import MeshwrightError

        raise MeshwrightError("the compiled simulator needs numpy and numba", fix="pip install 'meshwright[fast]'") from error
    return Compiled(schedule, cluster, sync=sync)
