"""PipeDream-2BW: 1F1B without a flush. The gradients of N microbatches make one update, and two versions are enough.

Every microbatch of round t reads version t - 1 on all stages: W(t+1) = W(t) - lr * grad f(W(t-1)).
"""

from __future__ import annotations

from meshwright.errors import MeshwrightError
from meshwright.ir.schedule import Schedule
from meshwright.schedules._orders.no_flush import endless


def build(*, workers: int, microbatches: int, steps: int = 1) -> Schedule:
    """A round needs at least as many microbatches as are in flight, otherwise version t - 1 would come too late."""
    if microbatches < workers - 1:
        raise MeshwrightError(
            f"pipedream_2bw needs at least {workers - 1} microbatches for {workers} workers, got {microbatches}",
            fix=f"--microbatches {workers}",
        )
    return endless(
        "pipedream_2bw",
        workers=workers,
        microbatches=microbatches,
        rounds=steps,
        version=lambda _, mb: max(0, mb // microbatches - 1),
        settled=1,
    )
