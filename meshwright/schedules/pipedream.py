"""PipeDream: 1F1B without a flush. Every microbatch updates the weights; a backward uses the version of its forward.

A stage with w stages after it has w microbatches in flight. So its forward m reads version m - w, and it keeps w + 1
versions: D on the first stage, one on the last. A round is a single microbatch here.
"""

from __future__ import annotations

from meshwright.ir.schedule import Schedule
from meshwright.schedules._orders.no_flush import endless


def build(*, workers: int, microbatches: int, steps: int = 1) -> Schedule:
    """Runs `steps` times `microbatches` rounds of one microbatch each."""
    return endless(
        "pipedream",
        workers=workers,
        microbatches=1,
        rounds=steps * microbatches,
        version=lambda stage, mb: max(0, mb - (workers - 1 - stage)),
        settled=workers - 1,
    )
