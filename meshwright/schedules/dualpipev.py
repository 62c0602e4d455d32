"""DualPipeV (Sea AI Lab): DualPipe cut in half. Stages form a V; forwards and backwards of its two legs overlap in cells.

The phases of worker w with n microbatches (at least 2D-1 are planned) are below. Capital letters are its shallow stage, small
letters its deep stage, a bracket is a cell, and i and w are the two halves of a backward:

    F x 2(D-1-w),  Ff x (w+1),  iwf x (D-1-w),  [Fb][fB] x (n-2D+1+w),  b[fB] x (D-1-w),  bB x (w+1),  wI x (D-1-w),  w x (w+1)

The second half of the bB phase runs as input halves; their weight halves fill the drain.
"""

from __future__ import annotations

from meshwright.ir.action import Action, Cell
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import Schedule
from meshwright.schedules._orders.wave import letters


def build(*, workers: int, microbatches: int) -> Schedule:
    """Takes any number of microbatches; the bubble is the published one from 2D-1 on."""
    return Schedule("dualpipev", Placement.zigzag(workers, legs=2), microbatches, folded_lists(workers, microbatches))


def folded_lists(workers: int, microbatches: int) -> tuple[tuple[Action | Cell, ...], ...]:
    """Returns the lists on a V; DualPipe unfolds them."""
    planned = max(microbatches, 2 * workers - 1)
    return tuple(
        tuple(
            letters(_phases(worker, workers, planned), shallow=worker, deep=2 * workers - 1 - worker, microbatches=microbatches)
        )
        for worker in range(workers)
    )


def _phases(worker: int, workers: int, microbatches: int) -> str:
    before, own = workers - 1 - worker, worker + 1
    main = "[Fb][fB]" * (microbatches - 2 * workers + 1 + worker)
    if worker == workers - 1:
        main = main.replace("[Fb]", "Fb", 1)  # on the last worker the first pair cannot overlap
    last = "bB" * own
    last = last[:own] + last[own:].replace("b", "i").replace("B", "I")
    return "F" * (2 * before) + "Ff" * own + "iwf" * before + main + "b[fB]" * before + last + "wI" * before + "w" * own
