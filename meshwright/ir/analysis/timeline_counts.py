"""Counts from a timeline, simulated or measured: live activations over time, and messages of a stage's state per time step."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from itertools import accumulate

from meshwright.ir.action import Action, Kind, Op, Transfer, actions
from meshwright.ir.timeline import Lane, Timeline

STAGE_KINDS = frozenset({Kind.PARTIAL, Kind.SUM, Kind.PARAM})
"""Kinds of messages that carry the gradients or the parameters of a stage."""


def live_activations(timeline: Timeline) -> list[tuple[float, int]]:
    """Returns (time, number) from each change on: activations of one stage and microbatch that some worker holds.

    They live from the start of a forward to the end of the backward, of its second half if it is split.
    """
    begins: dict[object, float] = {}
    ends: dict[object, float] = {}
    for span in timeline.spans:
        for action in actions(span.entry) if span.lane is Lane.COMPUTE else ():
            if isinstance(action, Action) and action.op in (Op.F, Op.B, Op.I, Op.W):
                key = span.worker, action.stage, action.mb, action.replica
                if action.op is Op.F:
                    begins.setdefault(key, span.start_s)
                else:
                    ends[key] = max(ends.get(key, span.end_s), span.end_s)
    changes = [(time, 1) for time in begins.values()] + [(ends[key], -1) for key in begins if key in ends]
    changes.sort()  # at the same time, what ends comes first
    return list(zip([time for time, _ in changes], accumulate(change for _, change in changes), strict=True))


def live_activations_max(timeline: Timeline) -> int:
    """Returns the largest number of activations that all workers together hold at once."""
    return max((count for _, count in live_activations(timeline)), default=0)


def stage_messages_per_step(timeline: Timeline, rounds: int) -> int:
    """Returns the most messages with a stage's state that a worker starts to send in one time step.

    A time step of a worker is from the start of a forward or backward to the start of the next one. The last of `rounds` rounds
    does not count: there workers stop one after another and pass on everything that is left.
    """
    found: Counter[tuple[int, int]] = Counter()
    starts = [[span.start_s for span in computes] for computes in timeline.compute]
    for span in timeline.spans:
        if span.lane is Lane.SEND and isinstance(span.entry, Transfer) and span.entry.value.kind in STAGE_KINDS:
            own = starts[span.worker]
            step = bisect_right(own, span.start_s)
            if step <= len(own) - len(own) // rounds:
                found[span.worker, step] += 1
    return max(found.values(), default=0)
