"""The tensor-parallel fields of a plan: checks their types and fills in values that follow from others. Modes are in `costs/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.input_limits import shown
from meshwright.ir.plan.unset_values import Unset, UnsetName
from meshwright.ir.reader import LARGEST

TENSOR_FIELDS = ("tp", "tensor", "box", "depth", "sequence", "save", "overlap", "replicate")
SAVES = ("shards", "gathered")


@dataclass
class CheckedTensor:
    """The fields, with those filled in that follow from others."""

    tp: int
    tensor: str
    box: tuple[int, ...]
    replicate: tuple[str, ...]


def checked_tensor(given: Mapping[str, Any], width: tuple[int, ...]) -> CheckedTensor:
    """Returns the tensor fields of a plan. `tp` alone means `line`; a `box` alone sets `tp`.

    Raises:
        MeshwrightError: A value has the wrong type, or two values contradict each other.
    """
    for name in ("tp", "depth"):
        _refuse_count(name, given[name])
    for name in ("sequence", "overlap"):
        if not isinstance(given[name], bool):
            raise MeshwrightError(f"{name} must be True or False, got {shown(given[name])}", fix=f"{name}=True")
    if not isinstance(given["tensor"], str):
        raise MeshwrightError(f"tensor must be the name of a mode, got {shown(given['tensor'])}", fix='tensor="line"')
    if given["save"] not in SAVES:
        raise MeshwrightError(f"save must be one of {', '.join(SAVES)}, got {shown(given['save'])}", fix='save="shards"')
    box, mode = _box(given["box"]), str(given["tensor"])
    if box and isinstance(given["tensor"], UnsetName):
        mode = "box"
    tp = prod(box) if box and isinstance(given["tp"], Unset) else int(given["tp"])
    if box and mode != "box":
        raise MeshwrightError(f'box {box} is the shape of tensor="box", not of tensor={mode!r}', fix='tensor="box"')
    if box and tp != prod(box):
        raise MeshwrightError(f"box {box} has {prod(box)} ranks, tp is {tp}", fix=f"tp={prod(box)}, or leave tp out")
    _refuse_one_rank(given, tp, mode, box)
    if tp > 1 and width:
        raise MeshwrightError(f"width {width} and tp {tp} cannot be combined", fix="one worker for each stage, or tp=1")
    return CheckedTensor(tp, mode, box, _names(given["replicate"]))


def _refuse_one_rank(given: Mapping[str, Any], tp: int, mode: str, box: tuple[int, ...]) -> None:
    """Raises if one rank is asked to share tensors.

    With `tp=1` in the plan, `sequence`, `overlap`, `save` and `replicate` change nothing, and the box (1, 1, 1) is one rank.
    """
    if tp > 1:
        return
    if mode != "line" and not box:
        raise MeshwrightError(
            f"tensor={mode!r} shares the tensors of a worker between ranks, but tp is 1", fix="tp=4, or leave tensor out"
        )
    if given["depth"] != 1:
        raise MeshwrightError(
            f"depth={given['depth']} is that of a tesseract, but tp is 1",
            fix=f'tp={4 * given["depth"]}, tensor="tesseract", or leave depth out',
        )
    used = {"sequence": given["sequence"], "overlap": given["overlap"], "replicate": bool(given["replicate"])}
    used["save"] = given["save"] != SAVES[0]
    if isinstance(given["tp"], Unset) and not box and (names := [name for name, on in used.items() if on]):
        shown_as = ", ".join(f"{name}={given[name]!r}" for name in names)
        raise MeshwrightError(
            f"{shown_as} belongs to ranks that share tensors, but the plan has no tp",
            fix=f"tp=2, or leave {' and '.join(names)} out",
        )


def _refuse_count(name: str, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count < LARGEST:
        raise MeshwrightError(
            f"{name} must be a whole number of at least 1 and below {LARGEST}, got {shown(count)}", fix=f"{name}=2"
        )


def _box(given: object) -> tuple[int, ...]:
    if given is None or given == ():
        return ()
    if isinstance(given, list | tuple) and len(given) == 3 and all(type(n) is int and 1 <= n < LARGEST for n in given):
        return tuple(given)
    if given == []:
        return ()
    raise MeshwrightError(f"box must be three whole numbers (w, a, b), got {shown(given)}", fix="box=(2, 2, 1)")


def _names(given: object) -> tuple[str, ...]:
    if isinstance(given, list | tuple) and all(isinstance(name, str) for name in given):
        return tuple(given)
    raise MeshwrightError(f"replicate must list modules by name, got {shown(given)}", fix='replicate=["lm_head"]')
