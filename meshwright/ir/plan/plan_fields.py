"""The fields of a plan that take several forms: options, recompute, widths, places of stages, sizes with units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, nan
from numbers import Real
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.byte_sizes import bytes_in
from meshwright.ir.input_limits import refuse_unfit, shown
from meshwright.ir.reader import LARGEST


def checked_options(given: object) -> dict[str, object]:
    """Returns the options by name; None means no options."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise MeshwrightError(f"options must be a mapping from names to values, got {shown(given)}", fix="options={'chunks': 2}")
    for name, value in given.items():
        if isinstance(value, int) and abs(value) >= LARGEST:
            raise MeshwrightError(f"option {name} must be below {LARGEST}, got {shown(value)}", fix=f"options={{'{name}': 2}}")
    refuse_unfit(given, "a mapping of options")
    return dict(given)


def checked_recompute(given: object) -> str | float | tuple[float, ...] | None:
    """Returns a mode name, a budget in bytes, or shares. The number of shares is checked later, when stages are known."""
    if given is None:
        return None
    if isinstance(given, str):
        budget = bytes_in(given)
        if budget is None:
            return given
        if budget < inf:
            return budget
    elif 1 < (budget := _number(given)) < inf:
        return budget
    if (shares := _listed(given)) is None or not all(_is_share(share) for share in shares):
        raise MeshwrightError(
            "recompute must be a mode, a budget in bytes, or for each stage a share of its layers between 0 and 1, "
            f"got {shown(given)}",
            fix="recompute='inline', recompute='2GB', or recompute=[0.5, 1]",
        )
    return tuple(float(share) for share in shares)


def _listed(given: object) -> tuple[Any, ...] | None:
    """Returns the items of a sequence; None for str and bytes, which count as one value."""
    single = isinstance(given, str | bytes | bytearray | memoryview)
    return tuple(given) if isinstance(given, Sequence) and not single else None


def _is_share(given: object) -> bool:
    return 0 <= _number(given) <= 1


def _number(given: object) -> float:
    """Returns a number as a float: infinity if it is too large, NaN if it is not a number."""
    if not isinstance(given, Real) or isinstance(given, bool):
        return nan
    try:
        return float(given)
    except OverflowError:
        return inf


def checked_stages(given: object) -> tuple[str | int, ...]:
    """Returns where stages begin; None means that Meshwright chooses."""
    if given is None:
        return ()
    found = _listed(given)
    if found is None or not all(_is_place(at) for at in found):
        raise MeshwrightError(
            f"stages must list the modules that stages begin with, got {shown(given)}",
            fix='stages=["model.layers.4", "model.layers.8"]',
        )
    return found


def _is_place(given: object) -> bool:
    return isinstance(given, str) or (isinstance(given, int) and not isinstance(given, bool) and abs(given) < LARGEST)


def checked_width(given: object) -> tuple[int, ...]:
    """Returns the number of workers of each stage; None means one each."""
    if given is None:
        return ()
    found = _listed(given)
    if found is None or any(isinstance(w, bool) or not isinstance(w, int) or not 0 < w < LARGEST for w in found):
        raise MeshwrightError(f"width must list the workers of each stage, got {shown(given)}", fix="width=(4, 2, 1, 1)")
    return found
