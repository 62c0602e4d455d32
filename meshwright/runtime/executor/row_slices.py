"""How the rows of a microbatch are cut for halves and teams, and which of them cross in which message."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.errors import MeshwrightError
from meshwright.ir.action import NONE, Action, Value
from meshwright.ir.placement import Rows
from meshwright.ir.schedule import Schedule
from meshwright.runtime.stage.stage import Bundle


class Pieces:
    """The rows of one worker's actions and messages; `narrow`: every team is one worker, which has all of them."""

    def __init__(self, schedule: Schedule, worker: int) -> None:
        self.schedule, self.placement, self.worker = schedule, schedule.placement, worker
        self.narrow = all(len(team) == 1 for copy in self.placement.teams for teams in copy for team in teams)

    def own(self, action: Action, rows: Rows) -> tuple[Rows, ...]:
        """What this worker has of the rows of an action's microbatch, one after another where they come in parts."""
        parts = self._parts(action.part, rows)
        if self.narrow:
            return parts
        team = self.placement.team(action.replica, action.stage, action.mb)
        return tuple(part.cut(team.index(self.worker), len(team)) for part in parts)

    def crossing(self, value: Value, rows: Rows) -> tuple[Rows, ...]:
        """What of the rows of a value's microbatch crosses the boundary behind `value.stage` in this value."""
        if value.piece == NONE:
            return (rows,) if value.part == NONE else self._parts(value.part, rows)
        before = self.placement.team(value.replica, value.stage, value.mb)
        behind = self.placement.team(value.replica, value.stage + 1, value.mb)
        return tuple(part.piece(value.piece, len(before), len(behind)) for part in self._parts(value.part, rows))

    def refuse_rows(self, cuts: Sequence[Rows]) -> None:
        """Raise where teams share a given number of rows and a microbatch has another: pieces of it would not be sent."""
        wanted = 0 if self.narrow else self.placement.rows
        for mb, rows in enumerate(cuts if wanted else ()):
            if rows.size != wanted:
                raise MeshwrightError(
                    f"the teams of {self.schedule.name} share microbatches of {wanted} rows, microbatch {mb} has {rows.size}",
                    fix="batches of that size, or a placement without rows, which takes any",
                )

    def _parts(self, part: int, rows: Rows) -> tuple[Rows, ...]:
        """A part of rows, or all of them: a team shares a part, so that whole forwards and halved backwards agree."""
        count = self.schedule.parts
        if part != NONE:
            return (rows.cut(part, count),)
        return (rows,) if count == 1 else tuple(rows.cut(index, count) for index in range(count))


def size_of(ranges: Sequence[Rows]) -> int:
    """How many rows these are."""
    return sum(rows.stop - rows.start for rows in ranges)


def cut(bundle: Bundle, wanted: Sequence[Rows], own: Sequence[Rows]) -> Bundle | None:
    """Some ranges of rows of a bundle that has those of `own`, one after another; None where no row is among them."""
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
    """Pieces with the rows that they bring, put together for each range of rows; for one without rows any of them."""
    if len(own) == 1:
        return [joined([bundle for bundle, _ in pieces])]
    found = [[cut(bundle, (part,), rows) for bundle, rows in pieces] for part in own]
    return [joined([piece for piece in each if piece is not None] or [pieces[0][0]]) for each in found]


def joined(pieces: Sequence[Bundle]) -> Bundle:
    """Rows of several bundles, one after another."""
    if len(pieces) == 1:
        return pieces[0]
    return Bundle(tuple(torch.cat(t) for t in zip(*(piece.tensors for piece in pieces), strict=True)), pieces[0].flags)


def require_rows(bundle: Bundle, rows: int) -> None:
    """Only what has a row per row of the batch can be cut by rows."""
    for tensor in bundle.tensors:
        if not tensor.dim() or tensor.shape[0] != rows:
            raise MeshwrightError(
                f"a tensor of shape {tuple(tensor.shape)} crosses stages and is to be cut by rows, "
                f"but its first dimension is not the {rows} rows of the microbatch",
                fix="rows first in everything that crosses, or a plan without width and halves",
            )
