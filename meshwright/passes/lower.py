"""From what a schedule says to what runs: recompute, then sync and updates, then sends and receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.ir.cluster import Cluster
from meshwright.ir.order import Flow
from meshwright.ir.price import Price
from meshwright.ir.profile import StageCost
from meshwright.ir.schedule import Recompute, Schedule
from meshwright.passes.comm import comm
from meshwright.passes.recompute import Mode
from meshwright.passes.recompute import recompute as settle_recompute
from meshwright.passes.sync import Sync
from meshwright.passes.sync import sync as place_syncs


def lower(
    schedule: Schedule,
    *,
    sync: Sync | str = Sync.EAGER,
    recompute: Mode | str | Sequence[Recompute] | None = None,
    costs: Sequence[StageCost] | None = None,
    cluster: Cluster | None = None,
) -> Schedule:
    """Add what a schedule has not placed: recompute, gradient sync, updates, sends and receives.

    Costs, where known, choose the best of the safe orders. A period with a flush is lowered once and repeated.
    """
    if schedule.lowered:
        return schedule
    closed = schedule.flush and not schedule.prologue and not schedule.drain
    work = schedule.repeated(1) if closed else schedule
    if recompute is None and costs is not None and any(cost.recompute_s > 0 for cost in costs):
        recompute = [Recompute(1.0 if cost.recompute_s > 0 else 0.0) for cost in costs]
    work = settle_recompute(work, Mode(recompute) if isinstance(recompute, str) else recompute)
    duration = Price(work, costs, cluster).entry_s if costs is not None else None
    work = place_syncs(work, Sync(sync), duration=duration)
    if costs is None:
        work = comm(work)
    else:
        price = Price(work, costs, cluster)
        flow = Flow(work)
        work = comm(work, flow=flow, duration=price.entry_s, delay=lambda v, a, b: sum(price.message_s(flow.values[v], a, b)))
    return replace(work, repeats=schedule.repeats) if closed else work
