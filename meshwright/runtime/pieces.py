"""How the rows of a microbatch are cut for halves and teams, and which of them cross in which message."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.errors import MeshwrightError
from meshwright.ir.action import NONE, Action, Value
from meshwright.ir.placement import Rows
from meshwright.ir.schedule import Schedule
from meshwright.runtime.stage import Bundle


class Pieces:
    """The rows of one worker's actions and messages; `narrow`: every team is one worker, which has all of them."""

    def __init__(self, schedule: Schedule, worker: int) -> None:
        self.schedule, self.placement, self.worker = schedule, schedule.placement, worker
        self.narrow = all(len(team) == 1 for copy in self.placement.teams for teams in copy for team in teams)

    def own(self, action: Action, rows: Rows) -> Rows:
        """What this worker has of the rows of an action's microbatch."""
        if action.part != NONE:
            rows = rows.cut(action.part, self.schedule.parts)
        if self.narrow:
            return rows
        team = self.placement.team(action.replica, action.stage, action.mb)
        return rows.cut(team.index(self.worker), len(team))

    def crossing(self, value: Value, rows: Rows) -> Rows:
        """What of the rows of a value's microbatch crosses the boundary behind `value.stage` in this value."""
        if value.part != NONE:
            rows = rows.cut(value.part, self.schedule.parts)
        if value.piece == NONE:
            return rows
        before = self.placement.team(value.replica, value.stage, value.mb)
        behind = self.placement.team(value.replica, value.stage + 1, value.mb)
        return rows.piece(value.piece, len(before), len(behind))


def cut(bundle: Bundle, rows: Rows, own: Rows) -> Bundle:
    """Some rows of a bundle that has those of `own`."""
    if rows is own:
        return bundle
    require_rows(bundle, own)
    start, stop = rows.start - own.start, rows.stop - own.start
    return Bundle(tuple(t[start:stop] for t in bundle.tensors), bundle.flags)


def joined(pieces: Sequence[Bundle]) -> Bundle:
    """Rows of several bundles, one after another."""
    if len(pieces) == 1:
        return pieces[0]
    return Bundle(tuple(torch.cat(t) for t in zip(*(piece.tensors for piece in pieces), strict=True)), pieces[0].flags)


def require_rows(bundle: Bundle, rows: Rows) -> None:
    """Only what has a row per row of the batch can be cut by rows."""
    for tensor in bundle.tensors:
        if not tensor.dim() or tensor.shape[0] != rows.stop - rows.start:
            raise MeshwrightError(
                f"a tensor of shape {tuple(tensor.shape)} crosses stages and is to be cut by rows, "
                f"but its first dimension is not the {rows.stop - rows.start} rows of the microbatch",
                fix="rows first in everything that crosses, or a plan without width and halves",
            )
