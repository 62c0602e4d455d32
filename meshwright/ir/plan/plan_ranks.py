"""The `ranks` of a plan: the process that runs each place. By default process i runs place i.

A place is worker w of data-parallel copy j at tensor coordinate c. Places are numbered with the coordinate fastest, then the
worker, then the copy. Ranks without a place are idle.
"""

from __future__ import annotations

from collections import Counter

from meshwright.errors import MeshwrightError
from meshwright.ir.input_limits import shown
from meshwright.ir.reader import LARGEST


def checked_ranks(given: object) -> tuple[int, ...]:
    """Returns the rank of each place; None means place i on rank i. Their number is checked when the plan is known."""
    if given is None:
        return ()
    fix = "ranks=(1, 0, 3, 2)"
    if not isinstance(given, list | tuple) or any(isinstance(r, bool) or not isinstance(r, int) for r in given):
        raise MeshwrightError(f"ranks must list the rank of each place as whole numbers, got {shown(given)}", fix=fix)
    if wrong := [rank for rank in given if not 0 <= rank < LARGEST]:
        raise MeshwrightError(f"ranks must be at least 0 and below {LARGEST}, got {shown(wrong[0])}", fix=fix)
    if len(set(given)) < len(given):
        twice, times = Counter(given).most_common(1)[0]
        raise MeshwrightError(f"ranks names rank {twice} {times} times: a rank runs one place", fix=fix)
    return tuple(given)


def refuse_count(ranks: tuple[int, ...], processes: int, degrees: tuple[str, ...]) -> None:
    """Raises if a plan names more or fewer ranks than it has places."""
    if ranks and len(ranks) != processes:
        raise MeshwrightError(
            f"ranks names {len(ranks)} ranks, but the plan needs {' x '.join(degrees)} = {processes}",
            fix=f"{processes} ranks, or leave ranks out",
        )
