"""From what a schedule says to what runs: recompute, then sync and updates, then sends and receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TypeVar

from meshwright.errors import MeshwrightError
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

Choice = TypeVar("Choice", bound=StrEnum)


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
    return lowered_flow(schedule, sync=sync, recompute=recompute, costs=costs, cluster=cluster).schedule


def lowered_flow(
    schedule: Schedule,
    *,
    sync: Sync | str = Sync.EAGER,
    recompute: Mode | str | Sequence[Recompute] | None = None,
    costs: Sequence[StageCost] | None = None,
    cluster: Cluster | None = None,
) -> Flow:
    """The lowered schedule with its effects, asked for once."""
    if schedule.lowered:
        return Flow.of(schedule)
    if recompute is None and costs is not None and any(cost.recompute_s > 0 for cost in costs):
        recompute = [Recompute(1.0 if cost.recompute_s > 0 else 0.0) for cost in costs]
    closed = schedule.flush and not schedule.prologue and not schedule.drain
    work = schedule.repeated(1) if closed else schedule
    work = settle_recompute(work, _choice(Mode, recompute) if isinstance(recompute, str) else recompute)
    duration = Price(work, costs, cluster).entry_s if costs is not None else None
    work = place_syncs(work, _choice(Sync, sync), duration=duration)
    flow = Flow.of(work)
    if costs is None:
        done = comm(work, flow=flow)
    else:
        price = Price(work, costs, cluster)
        delay = (lambda v, a, b: sum(price.message_s(flow.values[v], a, b))) if cluster is not None else None
        done = comm(work, flow=flow, duration=price.entry_s, delay=delay)
    if closed and schedule.repeats != 1:
        return Flow.of(replace(done.schedule, repeats=schedule.repeats))
    return done


def _choice(kind: type[Choice], text: str) -> Choice:
    try:
        return kind(text)
    except ValueError:
        raise MeshwrightError(f"there is no {kind.__name__.lower()} '{text}'", fix=", ".join(kind)) from None
