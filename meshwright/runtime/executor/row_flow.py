"""Follows the rows of a walk: the batch of each microbatch, and the rows in each message."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from meshwright.ir.action import COMPUTE, Kind, Value
from meshwright.ir.analysis.carried_values import Load, carried
from meshwright.ir.placement import Rows
from meshwright.runtime.executor.actions import Store
from meshwright.runtime.executor.row_slices import Pieces, by_range, cut, size_of
from meshwright.runtime.program import Instruction, Program
from meshwright.runtime.stage.batch import Batch
from meshwright.runtime.stage.stage import Bundle


class RowFlow:
    """Follows rows through the messages of a worker. `microbatches` is per training step."""

    def __init__(self, program: Program, store: Store, microbatches: int) -> None:
        self.program, self.store, self.microbatches = program, store, microbatches
        self.loads = {kind: way.load for kind, way in carried(program.schedule).items()}
        self.pieces = Pieces(program.schedule, program.worker)
        self.first_step = 0
        """The training step of round 0, which may be before the walk."""
        self.batches: Mapping[int, Batch] = {}
        computed = [i.action.mb for i in program.instructions if i.channel is None and i.action.op in COMPUTE]
        self._ahead = sorted({mb // microbatches for mb in computed})

    def place(self, mb: int) -> tuple[int, Batch, int]:
        """Returns the training step of a microbatch of the schedule, the batch of that step, and its number in the batch."""
        ahead, number = divmod(mb, self.microbatches)
        step = self.first_step + ahead
        return step, self.batches[step], number

    def form(self) -> Hashable:
        """Returns the forms of all batches of a walk."""
        return tuple([self.batches[self.first_step + ahead].form for ahead in self._ahead])

    def shape(self, instruction: Instruction) -> object:
        """Returns boundary, piece, number of rows and batch shape of a message; None if it has no rows."""
        value = instruction.value
        assert value is not None
        if self.loads[value.kind] is not Load.ROWS:
            return value.kind
        batch, rows = self._crossing(value)
        if not (size := size_of(rows)):
            return None
        return value.stage, value.part, value.piece, size, batch.form[1:]

    def received(self, instruction: Instruction, own: tuple[Rows, ...]) -> list[Bundle]:
        """Returns the received inputs of a forward, one bundle per range of rows."""
        values = self.program.values
        there = [(bundle, slot) for slot in instruction.reads[Kind.ACT] if (bundle := self.store.pop(slot)) is not None]
        return by_range([(bundle, self._crossing(values[slot])[1]) for bundle, slot in there], own)

    def scatter(self, slots: tuple[int, ...], bundle: Bundle, own: tuple[Rows, ...]) -> None:
        """Puts a bundle into its slots, cut into pieces if the next team has other workers."""
        if self.pieces.narrow:
            for slot in slots:
                self.store.slots[slot] = bundle
            return
        for slot in slots:
            _, rows = self._crossing(self.program.values[slot])
            if (piece := cut(bundle, rows, own)) is not None and size_of(rows):
                self.store.slots[slot] = Bundle(tuple(t.contiguous() for t in piece.tensors), piece.flags)

    def _crossing(self, value: Value) -> tuple[Batch, tuple[Rows, ...]]:
        """Returns the batch of a message, and the rows in the message."""
        _, batch, number = self.place(value.mb)
        return batch, self.pieces.crossing(value, batch.cuts[number])
