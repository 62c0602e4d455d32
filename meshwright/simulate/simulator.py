"""Simulates a schedule: lowers it if needed, sweeps it once, and returns the times and the memory."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.ir.action import Action, Entry
from meshwright.ir.analysis.effects import collective
from meshwright.ir.analysis.lifetime import lives, parameter_copies
from meshwright.ir.analysis.order import no_collection
from meshwright.ir.analysis.price import Price, TeamPrice
from meshwright.ir.cluster import Cluster
from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost
from meshwright.ir.timeline import Lane, Span, Timeline
from meshwright.passes.check import proved_run, refuse_unproved
from meshwright.passes.lower import lowered_flow
from meshwright.passes.sync import Sync
from meshwright.simulate.event_graph import EventGraph, Message, sweep
from meshwright.simulate.lower_bound import lower_bound
from meshwright.simulate.memory import at_peak, memory


@no_collection()
def simulate(
    schedule: Schedule,
    costs: Sequence[StageCost],
    cluster: Cluster | None = None,
    *,
    sync: Sync | str = Sync.EAGER,
    overlap: float = 0.0,
    copies: int = 1,
) -> Timeline:
    """Predict when every action, message and sync happens, and what each worker holds.

    Args:
        schedule: The schedule. One that is not lowered is lowered first.
        costs: One cost for each stage.
        cluster: The links between workers; None: messages take no time.
        sync: When gradients are added up, for a schedule that is not lowered.
        overlap: How much of the shorter action a cell hides, from 0 to 1.
        copies: Data-parallel copies of the schedule. They divide optimizer state and gradients if the schedule says so.

    Returns:
        The timeline: spans, memory, bubble and a lower bound.

    Raises:
        MeshwrightError: The costs are not for as many stages as there are, or the schedule breaks a law.

    Examples:
        >>> import meshwright as mw
        >>> schedule = mw.schedules.build("chimera", workers=4, microbatches=4)
        >>> timeline = mw.simulate(schedule, mw.even_costs(stages=4, workers=4))
        >>> timeline.makespan_s, timeline.bubble_ratio, timeline.lower_bound_s
        (16.0, 0.25, 16.0)
    """
    refuse_unproved(schedule)
    cluster = cluster or Cluster()
    flow = lowered_flow(schedule, sync=sync, costs=costs, cluster=cluster)
    price = Price(flow.schedule, costs, cluster, overlap=overlap, copies=copies)
    program = EventGraph(flow, cluster.duplex)
    return timeline(program, price, *sweep(program, program.table(price)))


@no_collection()
def proved_with_peaks(
    schedule: Schedule,
    costs: Sequence[StageCost],
    cluster: Cluster | None = None,
    *,
    copies: int = 1,
    bounded: bool = False,
    widths: Sequence[int] = (),
    paces: Sequence[float] = (),
) -> tuple[Timeline, tuple[dict[str, float], ...]]:
    """Proves a schedule as `check` does, and simulates it: its timeline, and what the peak of each worker consists of.

    The second is in bytes by kind of value. What is proved is what is simulated. The timeline has spans, and a
    lower bound if `bounded`; a search has bounds of its own. With `widths`, worker s stands for the `widths[s]` devices of
    stage s, and its bytes are those of one of them. `paces` is how long each worker computes relative to the costs. Raises if a
    law is broken.
    """
    cluster = cluster or Cluster()
    flow = lowered_flow(schedule, costs=costs, checked=True)  # a run places messages by costs: it does not know the links
    program = EventGraph(flow, cluster.duplex, proved_run(schedule, flow))
    price = Price(flow.schedule, costs, cluster, copies=copies, paces=paces)
    spans, times = _spans(program, *sweep(program, program.table(price)))
    least = lower_bound(program, price) if bounded else 0.0
    found = Timeline(schedule.name, schedule.workers, tuple(spans), lower_bound_s=least, flush=schedule.flush)
    held = TeamPrice(flow.schedule, costs, widths) if widths else price
    return found, tuple(at_peak(lives(flow, held, worker), of_worker) for worker, of_worker in enumerate(times))


def timeline(program: EventGraph, price: Price, starts: Sequence[float], ready: Sequence[float]) -> Timeline:
    """Returns spans, memory, parameter copies and the lower bound from the times of a program's nodes."""
    schedule = program.schedule
    spans, times = _spans(program, starts, ready)
    held = [list(lives(program.flow, price, worker)) for worker in range(schedule.workers)]
    return Timeline(
        schedule=schedule.name,
        workers=schedule.workers,
        spans=tuple(spans),
        memory=tuple(memory(of_worker, times[worker]) for worker, of_worker in enumerate(held)),
        parameter_copies=tuple(parameter_copies(of_worker, schedule) for of_worker in held),
        lower_bound_s=lower_bound(program, price),
        flush=schedule.flush,
    )


def _spans(
    program: EventGraph, starts: Sequence[float], ready: Sequence[float]
) -> tuple[list[Span], list[list[tuple[float, float]]]]:
    """Returns all spans, and for each worker the times of its entries."""
    schedule, flow = program.schedule, program.flow
    spans: list[Span] = []
    times: list[list[tuple[float, float]]] = [[(0.0, 0.0)] * len(entries) for entries in flow.lists]
    lanes = [_lanes(schedule, what) for _, what in program.classes]
    for places, class_, start, end in zip(program.places, program.class_of, starts, ready, strict=True):
        for (worker, index), lane in zip(places, lanes[class_], strict=True):
            times[worker][index] = (start, end)
            spans.append(Span(worker, lane, flow.lists[worker][index], start, end))
    return spans, times


def _lanes(schedule: Schedule, what: Entry | Message) -> tuple[Lane, ...]:
    """Returns the lane of each place of a node, in order."""
    if isinstance(what, Message):
        return (Lane.SEND, Lane.RECEIVE)
    group = collective(schedule, what) if isinstance(what, Action) else ()
    return (Lane.COLLECTIVE,) * len(group) or (Lane.COMPUTE,)
