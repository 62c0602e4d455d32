"""Chimera (Li & Hoefler, SC'21): two pipelines in opposite directions over the same workers fill each other's bubbles.

    0: F0 F1 .  F2 B2 F3 B3 B0 .  B1        down: replica 0, stage k on worker k
    1: .  F0 F2 F1 F3 B2 B0 B3 B1 .         up:   replica 1, stage k on worker D-1-k
    2: .  F2 F0 F3 F1 B0 B2 B1 B3 .
    3: F2 F3 .  F0 B0 F1 B1 B2 .  B3

D stages, h = D/2. In a unit of D microbatches each direction runs h of them, in fixed slots of unit length: forward m of
stage k in slot k + 2m, backward m in slot 2D-1-k + 2m. The slots of the two directions never meet, so sorting by slot is
the whole merge. More microbatches:

    direct    unit after unit, 2D slots apart
    doubling  a slot holds two forwards or one backward: 2h backwards per direction, double units 3D slots apart
    halving   the same program with one forward or half a backward in a slot; `half_forward` halves forwards as well

`pairs` (f) puts f such pairs on the same workers, D/f apart: 2f replicas and f times fewer bubbles.
"""

from __future__ import annotations

from typing import Literal

from meshwright.errors import MeshwrightError
from meshwright.ir.action import NONE, Action, Op
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import Schedule


def build(
    *,
    workers: int,
    microbatches: int,
    pairs: int = 1,
    mode: Literal["direct", "doubling", "halving"] = "direct",
    half_forward: bool = False,
    split: bool = False,
) -> Schedule:
    """Sort every worker's slots; `split` takes backwards apart into I and W."""
    _refuse(workers, microbatches, pairs, mode, half_forward, split)
    placement = Placement.of(
        lambda replica, stage: _worker(workers, pairs, replica, stage), stages=workers, replicas=2 * pairs
    )
    if split:
        lists = split_lists(workers, microbatches)
    else:
        lists = _sorted_slots(workers, microbatches, pairs, mode, half_forward)
    parts = 2 if mode == "halving" else 1
    return Schedule("chimera", placement, microbatches, lists, parts=parts)


def _worker(workers: int, pairs: int, replica: int, stage: int) -> int:
    """Down pipeline i starts at worker i D/f; its mirror, up pipeline i, runs the other way from the worker before."""
    start = (replica // 2) * workers // pairs
    return (start - 1 - stage if replica % 2 else start + stage) % workers


def _sorted_slots(workers: int, microbatches: int, pairs: int, mode: str, half_forward: bool) -> tuple[tuple[Action, ...], ...]:
    """Every action with its slot, sorted on its worker."""
    double = 2 if mode == "doubling" else 1
    unit = min(microbatches, double * workers)
    each = unit // (2 * pairs)
    apart = (2 if mode == "direct" else 3) * workers
    slots: list[list[tuple[int, int, Action]]] = [[] for _ in range(workers)]
    for first in range(0, microbatches, unit):
        base = first // unit * apart
        for replica in range(2 * pairs):
            # Microbatches of a unit are dealt to the down pipelines first, then to the up pipelines.
            place = (replica // 2 + (pairs if replica % 2 else 0)) * each
            mbs = range(first + place, first + place + each)
            for stage in range(workers):
                row = slots[_worker(workers, pairs, replica, stage)]
                for number, (mb, part) in enumerate(_halves(mbs, half_forward)):
                    step = number // 2 if double == 2 or half_forward else number
                    row.append((base + stage + 2 * step, number, Action(Op.F, stage, mb, replica, part=part)))
                for number, (mb, part) in enumerate(_halves(mbs, mode == "halving")):
                    slot = base + 2 * workers - 1 - stage + 2 * number
                    row.append((slot, number, Action(Op.B, stage, mb, replica, part=part)))
    return tuple(tuple(action for *_, action in sorted(row)) for row in slots)


def _halves(mbs: range, halved: bool) -> list[tuple[int, int]]:
    return [(mb, part) for mb in mbs for part in ((0, 1) if halved else (NONE,))]


def _refuse(workers: int, microbatches: int, pairs: int, mode: str, half_forward: bool, split: bool) -> None:
    if workers % 2:
        raise MeshwrightError(
            f"chimera needs an even number of workers, got {workers}", fix=f"--workers {workers + 1}, or --workers {max(2, workers - 1)}"
        )
    if pairs < 1 or (workers // 2) % pairs:
        good = [f for f in range(1, workers // 2 + 1) if (workers // 2) % f == 0]
        raise MeshwrightError(f"chimera: pairs={pairs} does not divide {workers} / 2", fix=" or ".join(f"pairs={f}" for f in good))
    if half_forward and mode != "halving":
        raise MeshwrightError("chimera: half_forward belongs to mode=halving", fix="mode=halving")
    if split and (mode != "direct" or pairs > 1):
        raise MeshwrightError(f"chimera: split=true runs with mode=direct and pairs=1, got mode={mode}, pairs={pairs}", fix="split=false")
    unit = 2 * workers if mode == "doubling" else workers
    if microbatches % (2 * pairs) or (microbatches > unit and microbatches % unit):
        below = 2 * pairs
        more = -(-microbatches // unit) * unit
        raise MeshwrightError(
            f"chimera runs whole units of {unit} microbatches, or fewer in multiples of {below}, got {microbatches}",
            fix=f"--microbatches {more}",
        )
    if mode == "doubling" and microbatches % (4 * pairs):
        raise MeshwrightError(
            f"chimera: doubling pairs up forwards, {microbatches} microbatches over {2 * pairs} pipelines leave one over",
            fix=f"--microbatches {-(-microbatches // unit) * unit}",
        )


def split_lists(workers: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Backwards in two halves."""
    raise NotImplementedError
