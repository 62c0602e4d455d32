"""The most activations of each worker, in bytes, straight from unlowered lists.

Lifetimes of activations follow the lists, not the times, so one walk through each list finds the peak. Buffers of gradients
exist from the first backward of a stage on. Parameters, optimizer state and messages are not counted here; `simulate` has all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.ir.action import Action, Kind, Op, Value, actions
from meshwright.ir.analysis.price import Price, TeamPrice
from meshwright.ir.stage_cost import StageCost
from meshwright.simulate.quick_program import QuickLists
from meshwright.simulate.quick_sweep import settled


def activation_peaks(
    lists: QuickLists, costs: Sequence[StageCost], gradients: Sequence[float], widths: Sequence[int] = ()
) -> tuple[float, ...]:
    """Returns how many bytes of activations each worker holds besides all its buffers of gradients, at its peak.

    `gradients` are the bytes of the buffer of each stage. Activations that were freed before the buffers exist do not count.
    With `widths`, worker s stands for the `widths[s]` devices of stage s, and its bytes are those of one of them.
    """
    schedule = settled(lists.schedule, costs)
    price = TeamPrice(schedule, costs, widths) if widths else Price(schedule, costs)
    added = np.zeros(len(lists.examples))
    freed = np.zeros(len(lists.examples))
    during = np.zeros(len(lists.examples))
    for number, (worker, entry) in enumerate(lists.examples):
        for action in actions(entry):
            more, less, working = _changes(price, worker, action)
            added[number] += more
            freed[number] += less
            during[number] += working
    peaks = []
    for classes, made in zip(lists.classes, lists.last_gradients, strict=True):
        held = np.cumsum(added[classes] - freed[classes])
        buffers = np.zeros(len(classes))
        for unit, places in made.items():
            if unit < len(gradients):  # the buffer of a tie group belongs to its stages
                buffers[: places[0]] -= gradients[unit]
        peaks.append(float((held + freed[classes] + during[classes] + buffers).max(initial=0.0)))
    return tuple(peaks)


def _changes(price: Price, worker: int, action: Action) -> tuple[float, float, float]:
    """What an action keeps from its start, frees at its end, and needs while it runs."""
    recompute = price.recompute[action.stage] if price.recompute else None
    drops = recompute is not None and recompute.share > 0
    inline = drops and recompute is not None and not recompute.early

    def size(kind: Kind) -> float:
        return price.value_bytes(worker, Value(kind, action.stage, action.mb, action.replica, 0, action.part))

    match action.op:
        case Op.F:
            return size(Kind.KEPT if drops else Kind.SAVED), 0.0, 0.0
        case Op.B:
            working = recompute.share * size(Kind.SAVED) if inline and recompute is not None else 0.0
            return 0.0, size(Kind.KEPT if inline else Kind.SAVED), working
        case Op.I:  # one form replaces the other
            change = size(Kind.REST) - size(Kind.KEPT if inline else Kind.SAVED)
            return max(change, 0.0), max(-change, 0.0), 0.0
        case Op.W:
            return 0.0, size(Kind.REST), 0.0
        case Op.R:
            change = size(Kind.SAVED) - size(Kind.KEPT)
            return max(change, 0.0), max(-change, 0.0), 0.0
        case _:
            return 0.0, 0.0, 0.0
