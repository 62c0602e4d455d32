"""How the rows of a microbatch are cut for halves and teams, and which rows are in each message."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.errors import MeshwrightError
from meshwright.ir.action import NONE, Action, Value
from meshwright.ir.placement import Rows
from meshwright.ir.schedule import Schedule
from meshwright.runtime.stage.stage import Bundle


class Pieces:
    """The rows of one worker's actions and messages. If `narrow`, every team is one worker, which has all rows."""

    def __init__(self, schedule: Schedule, worker: int) -> None:
        self.schedule, self.placement, self.worker = schedule, schedule.placement, worker
        self.narrow = self.placement.narrow

    def own(self, action: Action, rows: Rows) -> tuple[Rows, ...]:
        """Returns this worker's rows of an action's microbatch, one range per part."""
        parts = self._parts(action.part, rows)
        if self.narrow:
            return parts
        team = self.placement.team(action.replica, action.stage, action.mb)
        return tuple(part.cut(team.index(self.worker), len(team)) for part in parts)

    def crossing(self, value: Value, rows: Rows) -> tuple[Rows, ...]:
        """Returns the rows of a value's microbatch that this value carries over the boundary after `value.stage`."""
        if value.piece == NONE:
            return (rows,) if value.part == NONE else self._parts(value.part, rows)
        before = self.placement.team(value.replica, value.stage, value.mb)
        after = self.placement.team(value.replica, value.stage + 1, value.mb)
        return tuple(part.piece(value.piece, len(before), len(after)) for part in self._parts(value.part, rows))

    def refuse_rows(self, cuts: Sequence[Rows]) -> None:
        """Raises if a microbatch does not have the number of rows that the teams share: some pieces would not be sent."""
        wanted = 0 if self.narrow else self.placement.rows
        for mb, rows in enumerate(cuts if wanted else ()):
            if rows.size != wanted:
                raise MeshwrightError(
                    f"the teams of {self.schedule.name} share microbatches of {wanted} rows, microbatch {mb} has {rows.size}",
                    fix="batches of that size, or a placement without rows, which takes any",
                )

    def _parts(self, part: int, rows: Rows) -> tuple[Rows, ...]:
        """Returns one part of the rows, or all parts. A team shares each part, so whole forwards and halved backwards agree."""
        count = self.schedule.parts
        if part != NONE:
            return (rows.cut(part, count),)
        return (rows,) if count == 1 else tuple(rows.cut(index, count) for index in range(count))


def size_of(ranges: Sequence[Rows]) -> int:
    """Returns the number of rows."""
    return sum(rows.stop - rows.start for rows in ranges)


def cut(bundle: Bundle, wanted: Sequence[Rows], own: Sequence[Rows]) -> Bundle | None:
    """Returns the `wanted` rows of a bundle whose rows are `own`, one range after another; None if it has none of them."""
    if wanted == own:
        return bundle
    require_rows(bundle, size_of(own))
    found, first = [], 0
    for there in own:
        for rows in wanted:
            start, stop = max(rows.start, there.start), min(rows.stop, there.stop)
            if start < stop:
                found.append((first + start - there.start, first + stop - there.start))
        first += there.stop - there.start
    if not found:
        return None
    return joined([Bundle(tuple(t[start:stop] for t in bundle.tensors), bundle.flags) for start, stop in found])


def by_range(pieces: Sequence[tuple[Bundle, Sequence[Rows]]], own: Sequence[Rows]) -> list[Bundle]:
    """Joins received pieces for each range of rows. A range without rows gets any piece."""
    if len(own) == 1:
        return [joined([bundle for bundle, _ in pieces])]
    found = [[cut(bundle, (part,), rows) for bundle, rows in pieces] for part in own]
    return [joined([piece for piece in each if piece is not None] or [pieces[0][0]]) for each in found]


def joined(pieces: Sequence[Bundle]) -> Bundle:
    """Concatenates the rows of several bundles."""
    if len(pieces) == 1:
        return pieces[0]
    return Bundle(tuple(torch.cat(t) for t in zip(*(piece.tensors for piece in pieces), strict=True)), pieces[0].flags)


def require_rows(bundle: Bundle, rows: int) -> None:
    """Raises if a tensor does not have one row per row of the microbatch, because it cannot be cut by rows then."""
    for tensor in bundle.tensors:
        if not tensor.dim() or tensor.shape[0] != rows:
            raise MeshwrightError(
                f"a tensor of shape {tuple(tensor.shape)} crosses stages and is to be cut by rows, "
                f"but its first dimension is not the {rows} rows of the microbatch",
                fix="rows first in everything that crosses, or a plan without width and halves",
            )
