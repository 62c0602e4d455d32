"""Interleaved 1F1B (Megatron-LM): v chunks of layers per worker; filling the pipeline takes chunks of 1/v of a stage.

Stage s is chunk s // D of worker s mod D. Microbatches pass a worker in groups of D: a group runs the first chunk, then the
second, and so on; backwards run the chunks in reverse.

    D = 2, v = 2, N = 2:
    0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1      (warm-up 2 (D-1-w) + (v-1) D forwards, then one forward, one backward)
    1: .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
"""

from __future__ import annotations

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Action, Op
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import Schedule


def build(*, workers: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Megatron's order; needs whole groups of D microbatches."""
    if chunks < 1:
        raise MeshwrightError(f"interleaved needs at least one chunk per worker, got {chunks}", fix="chunks=2")
    if microbatches % workers:
        raise MeshwrightError(
            f"interleaved runs whole groups of {workers} microbatches (one per worker), got {microbatches}",
            fix=f"--microbatches {-(-microbatches // workers) * workers}",
        )
    period = tuple(_worker_list(worker, workers, microbatches, chunks) for worker in range(workers))
    return Schedule("interleaved", Placement.looped(workers, chunks=chunks), microbatches, period)


def _worker_list(worker: int, workers: int, microbatches: int, chunks: int) -> tuple[Action, ...]:
    total = microbatches * chunks
    warm = min(total, 2 * (workers - 1 - worker) + (chunks - 1) * workers)

    def turn(op: Op, k: int) -> Action:
        group, rest = divmod(k, workers * chunks)
        chunk, offset = divmod(rest, workers)
        if op is Op.B:
            chunk = chunks - 1 - chunk
        return Action(op, chunk * workers + worker, group * workers + offset)

    forwards = [turn(Op.F, k) for k in range(total)]
    backwards = [turn(Op.B, k) for k in range(total)]
    steady = [action for pair in zip(forwards[warm:], backwards, strict=False) for action in pair]
    return (*forwards[:warm], *steady, *backwards[total - warm :])
