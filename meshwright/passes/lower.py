"""Lowering: adds recompute, then sync and updates, then sends and receives to a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TypeVar

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Entry, Transfer
from meshwright.ir.analysis.order import Flow, no_collection
from meshwright.ir.analysis.price import Price
from meshwright.ir.cluster import Cluster
from meshwright.ir.schedule import Recompute, Schedule
from meshwright.ir.stage_cost import StageCost
from meshwright.passes.laws import refuse_broken
from meshwright.passes.messages import comm
from meshwright.passes.recompute import Mode
from meshwright.passes.recompute import recompute as settle_recompute
from meshwright.passes.round_laws import refuse_lost
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

    A period with a flush is lowered once and repeated.

    Args:
        schedule: The schedule. One that is lowered already is returned as it is.
        sync: When gradients are added up: `lazy`, `eager`, `eager-opt` or `ring`.
        recompute: `none`, `inline`, `early`, or a `Recompute` for each stage; None keeps what the schedule says.
        costs: One cost for each stage. They choose the best of the safe orders of messages.
        cluster: The links between workers, for the same purpose.

    Returns:
        The lowered schedule, which `check`, `simulate` and the runtime take as it is.

    Raises:
        MeshwrightError: The schedule breaks a law, so that it cannot be lowered.

    Examples:
        >>> import meshwright as mw
        >>> print(*mw.lower(mw.schedules.build("gpipe", workers=2, microbatches=1)).lists[0])
        0F0 0act0>1 0grad0<1 0B0 0S N 0U
    """
    if schedule.lowered:
        return schedule

    def lowered(work: Schedule) -> Schedule:
        return lowered_flow(work, sync=sync, recompute=recompute, costs=costs, cluster=cluster).schedule

    if schedule.flush or not schedule.period:
        return lowered(schedule)
    short = lowered(schedule)
    try:
        return folded(short, lowered(schedule.repeated(schedule.repeats + 1)))
    except MeshwrightError:  # a single period that cannot repeat
        return short


def folded(short: Schedule, long: Schedule) -> Schedule:
    """Finds the period in the shorter of two lowered schedules that differ by one period, and makes it repeatable.

    On every worker, the longer list must be the shorter one with a period inserted and everything after it one round later.
    """
    prologue, period, drain = [], [], []
    for a, b in zip(short.lists, long.lists, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
        more = len(b) - len(a)
        later = [entry.shifted(short.microbatches, 1) for entry in a[same:]]
        if later != list(b[same + more :]):
            return short
        prologue.append(a[:same])
        period.append(b[same : same + more])
        drain.append(a[same:])
    turns = tuple(dict.fromkeys((*short.turns, *long.turns)))
    return replace(short, prologue=tuple(prologue), period=tuple(period), drain=tuple(drain), repeats=0, turns=turns)


@no_collection()
def lowered_flow(
    schedule: Schedule,
    *,
    sync: Sync | str = Sync.EAGER,
    recompute: Mode | str | Sequence[Recompute] | None = None,
    costs: Sequence[StageCost] | None = None,
    cluster: Cluster | None = None,
    checked: bool = False,
) -> Flow:
    """Returns the lowered schedule with its effects. `checked=True` skips the check of the structure."""
    if not checked:
        refuse_broken(schedule)
    if schedule.lowered:
        return Flow.of(schedule)
    if recompute is not None and schedule.recompute is not None:
        raise MeshwrightError(f"{schedule.name} sets its recompute itself", fix="lower it without recompute=")
    if schedule.recompute is None and recompute is None and costs is not None and any(cost.recompute_s > 0 for cost in costs):
        recompute = [Recompute(1.0 if cost.recompute_s > 0 else 0.0) for cost in costs]
    closed = schedule.flush and not schedule.prologue and not schedule.drain
    work = schedule.repeated(1) if closed else schedule
    work = settle_recompute(work, named(Mode, recompute) if isinstance(recompute, str) else recompute)
    duration = Price(work, costs, cluster).entry_s if costs is not None else None
    given = work
    work = place_syncs(work, named(Sync, sync), duration=duration)
    flow = Flow.of(work)
    if costs is None:
        done = comm(work, flow=flow)
    else:
        clock = _Clock(Price(work, costs, cluster), flow)
        done = comm(work, flow=flow, duration=clock.duration, delay=None if cluster is None or cluster.free else clock.delay)
    refuse_lost(given, done.schedule)
    if closed and schedule.repeats != 1:
        return Flow.of(replace(done.schedule, repeats=schedule.repeats))
    return done


class _Clock:
    """Times for the linear order: of entries on workers, of messages between workers, or on a channel with its own list."""

    def __init__(self, price: Price, flow: Flow) -> None:
        self.price, self.values, self.workers = price, flow.values, flow.schedule.workers
        self.channels = flow.schedule.channels

    def duration(self, worker: int, entry: Entry) -> float:
        """Returns how long an entry occupies its worker, or a message its channel."""
        if not isinstance(entry, Transfer):
            return self.price.entry_s(worker, entry)
        ends = self.channels[worker - self.workers].workers
        return self.price.message_s(entry.value, ends[0] if entry.peer == ends[1] else ends[1], entry.peer)[0]

    def delay(self, value: int, source: int, target: int) -> float:
        """Returns the travel time of a value. A value carried by a channel is only delayed by the latency."""
        if target >= self.workers:
            return 0.0
        if source >= self.workers:
            ends = self.channels[source - self.workers].workers
            return self.price.cluster.between(*ends).latency_s
        return sum(self.price.message_s(self.values[value], source, target))


def named(kind: type[Choice], text: str) -> Choice:
    """Returns the enum member with this value; raises with the known values."""
    try:
        return kind(text)
    except ValueError:
        raise MeshwrightError(f"there is no {kind.__name__.lower()} '{text}'", fix=", ".join(kind)) from None
