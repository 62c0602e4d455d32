"""Chimera (Li & Hoefler, SC'21): two pipelines in opposite directions on the same workers fill each other's bubbles.

    0: F0 F1 .  F2 B2 F3 B3 B0 .  B1        down: replica 0, stage k on worker k
    1: .  F0 F2 F1 F3 B2 B0 B3 B1 .         up:   replica 1, stage k on worker D-1-k
    2: .  F2 F0 F3 F1 B0 B2 B1 B3 .
    3: F2 F3 .  F0 B0 F1 B1 B2 .  B3

In a unit of D microbatches, each direction runs D/2 of them in slots of unit length: forward i of stage k in slot k + 2i,
backward i in slot 2D-1-k + 2i. The slots of the two directions never collide, so sorting by slot merges them.

    direct    one unit after another, 2D slots apart
    doubling  a slot holds two forwards or one backward; double units, 3D slots apart
    halving   a slot holds one forward (`half_forward`: two halves) or half a backward; units 3D slots apart
    steady    not in the paper: the order of a folded wave, unfolded; no gap between units (28 instead of 30 slots at
              D=4, N=8, B=2F)

`pairs` (f) puts f such pairs on the same workers, D/f apart: 2f replicas and f times fewer bubbles. `split` splits backwards
and fills their weight halves into the gaps of the steady order, with at most D activations alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Action, Op
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import Lists, Schedule
from meshwright.ir.stage_cost import StageCost
from meshwright.schedules._orders.chimera_slots import sorted_slots, worker_of
from meshwright.schedules._orders.fill_weight_halves import fill
from meshwright.schedules._orders.wave import steady, unfold

COMPARED: tuple[dict[str, object], ...] = (
    {},
    {"mode": "doubling"},
    {"mode": "halving"},
    {"mode": "steady"},
    {"pairs": 2},
    {"split": True},
)
Mode = Literal["direct", "doubling", "halving", "steady"]


def build(
    *,
    workers: int,
    microbatches: int,
    costs: Sequence[StageCost] | None = None,
    pairs: int = 1,
    mode: Mode = "direct",
    half_forward: bool = False,
    split: bool = False,
) -> Schedule:
    """Needs whole units of D microbatches (doubling: 2D), or fewer; `split` and `steady` take any even number."""
    _refuse(workers, microbatches, pairs, mode, half_forward, split)
    placement = Placement.of(lambda r, stage: worker_of(workers, pairs, r, stage), stages=workers, replicas=2 * pairs)
    backward = Op.I if split else Op.B
    if mode == "steady" or (split and pairs == 1):
        unit = min(workers, microbatches)
        lists: Lists = tuple(
            map(tuple, unfold(steady(workers // 2, -(-microbatches // 2), backward=backward), microbatches, unit=unit))
        )
    else:
        lists = sorted_slots(workers, microbatches, pairs=pairs, mode=mode, half_forward=half_forward, backward=backward)
    if split:
        orders = [[a for a in entries if isinstance(a, Action)] for entries in lists]
        lists = tuple(map(tuple, fill(orders, stages=workers, cap=workers, costs=costs)))
    return Schedule("chimera", placement, microbatches, lists, parts=2 if mode == "halving" else 1)


def _refuse(workers: int, microbatches: int, pairs: int, mode: str, half_forward: bool, split: bool) -> None:
    if workers % 2:
        raise MeshwrightError(f"chimera needs an even number of workers, got {workers}", fix=f"--workers {workers + 1}")
    if pairs < 1 or (workers // 2) % pairs:
        good = [f for f in range(1, workers // 2 + 1) if (workers // 2) % f == 0]
        raise MeshwrightError(
            f"chimera: pairs={pairs} does not divide {workers} / 2", fix=" or ".join(f"pairs={f}" for f in good)
        )
    if half_forward and mode != "halving":
        raise MeshwrightError("chimera: half_forward needs mode=halving", fix="mode=halving")
    if (split and mode not in ("direct", "steady")) or (mode == "steady" and pairs > 1):
        raise MeshwrightError(f"chimera: mode={mode}, pairs={pairs}, split={split} cannot be combined", fix="mode=direct")
    unit = 2 * workers if mode == "doubling" else workers
    whole = mode != "steady" and not (split and pairs == 1)
    step = 4 * pairs if mode == "doubling" else 2 * pairs
    if microbatches % step or (whole and microbatches > unit and microbatches % unit):
        enough = unit if whole else step
        raise MeshwrightError(
            f"chimera runs whole units of {unit} microbatches, or fewer in multiples of {step}, got {microbatches}",
            fix=f"--microbatches {-(-microbatches // enough) * enough}",
        )
