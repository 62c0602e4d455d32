"""Chimera's slots: each action of 2f pipelines gets a slot that grows along every dependency, so a sorted order cannot deadlock.

In a unit, each of the 2f pipelines has a window of D/(2f) forwards, two slots apart. Backwards beyond the window follow D
slots later, aligned with the windows of the other pairs.
"""

from __future__ import annotations

from meshwright.ir.action import NONE, Action, Op
from meshwright.ir.schedule import Lists


def worker_of(workers: int, pairs: int, replica: int, stage: int) -> int:
    """Down pipeline i starts at worker i D/f; its mirror, up pipeline i, starts one worker earlier and runs the other way."""
    start = (replica // 2) * workers // pairs
    return (start - 1 - stage if replica % 2 else start + stage) % workers


def sorted_slots(workers: int, microbatches: int, *, pairs: int, mode: str, half_forward: bool, backward: Op) -> Lists:
    """Sorts the actions of each worker by slot; the first microbatches of a unit go to the down pipelines."""
    double = 2 if mode == "doubling" else 1
    unit, window = min(microbatches, double * workers), workers // (2 * pairs)
    each, apart = unit // (2 * pairs), (2 if mode == "direct" else 3) * workers
    rows: list[list[tuple[int, int, Action]]] = [[] for _ in range(workers)]
    for first in range(0, microbatches, unit):
        base = first // unit * apart
        for replica in range(2 * pairs):
            place = first + (replica // 2 + pairs * (replica % 2)) * each
            mbs = range(place, place + each)
            for stage in range(workers):
                row = rows[worker_of(workers, pairs, replica, stage)]
                for i, (mb, part) in enumerate(_halves(mbs, half_forward)):
                    slot = base + stage + 2 * (i // 2 if double == 2 or half_forward else i)
                    row.append((slot, i, Action(Op.F, stage, mb, replica, part=part)))
                for i, (mb, part) in enumerate(_halves(mbs, mode == "halving")):
                    slot = base + 2 * workers - 1 - stage + 2 * (i % window) + workers * (i // window)
                    row.append((slot, i, Action(backward, stage, mb, replica, part=part)))
    return tuple(tuple(action for *_, action in sorted(row)) for row in rows)


def _halves(mbs: range, halved: bool) -> list[tuple[int, int]]:
    return [(mb, part) for mb in mbs for part in ((0, 1) if halved else (NONE,))]
