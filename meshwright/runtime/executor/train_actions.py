"""The actions of a training worker: stages compute on rows, parameters are synchronized and updated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from meshwright.ir.action import COMPUTE, NONE, Kind, Op
from meshwright.ir.analysis.carried_values import Load
from meshwright.runtime.device import stream
from meshwright.runtime.executor.actions import Do, Store
from meshwright.runtime.executor.parameter_tours import ParameterTours
from meshwright.runtime.executor.row_flow import RowFlow
from meshwright.runtime.executor.row_slices import joined, require_rows, size_of
from meshwright.runtime.parameters.parameters import Parameters
from meshwright.runtime.program import Instruction, Program
from meshwright.runtime.stage.batch import Batch, Cut
from meshwright.runtime.stage.graphs_by_size import Graphs
from meshwright.runtime.stage.objective import Tally
from meshwright.runtime.stage.reached_parameters import Leaves, Reached, everything
from meshwright.runtime.stage.stage import Bundle, Record, Stage, leaves, own_leaves
from meshwright.runtime.transport.send_receive import Bare, Incoming, Outgoing, Pending


class TrainActions:
    """Compiles the actions of a worker that trains. `microbatches` is per training step; a round of a schedule may be shorter."""

    def __init__(
        self, program: Program, stages: Mapping[int, Stage], parameters: Parameters, microbatches: int, graphs: Graphs
    ) -> None:
        self.program, self.stages, self.parameters = program, stages, parameters
        self._all_leaves: dict[int, Reached] = {}
        self.graphs = graphs
        self.store = Store(len(program.values))
        self.flow = RowFlow(program, self.store, microbatches)
        self.form = self.flow.form
        self.tours = ParameterTours(program, parameters.units, self.store) if program.schedule.owners else None
        self.tallies: dict[int, Tally] = {}
        self.token = Bundle((torch.zeros(1, dtype=torch.uint8, device=parameters.device),), (False,))

    def begin(self, first_step: int, batches: Mapping[int, Any]) -> None:
        """Starts a walk at a training step, with the batches of this step and of the steps after it."""
        origin = first_step - self.program.schedule.first
        self.flow.first_step, self.flow.batches, self.tallies = origin, batches, {}
        self.parameters.begin(origin)

    def end(self) -> None:
        """Ends a walk."""
        self.parameters.end()
        self.flow.batches = {}

    def shape(self, instruction: Instruction) -> object:
        """Returns a key for the shape of a message. Both ends know the size of a sum and of parameters: they need no header."""
        value = instruction.value
        if value is not None and self.flow.loads[value.kind] is Load.BUFFER:
            return Bare(self.parameters.units[value.stage].buffer_bytes)
        if value is not None and self.tours is not None and value.kind is Kind.PARAM:
            return self.tours.shape(value)
        return self.flow.shape(instruction)

    def compile(self, instruction: Instruction, line: Outgoing | Incoming | None) -> Do:
        """Compiles an instruction once; the returned function runs it on every walk."""
        do = self._compiled(instruction, line)
        computes = line is None and instruction.action.op in COMPUTE
        if computes and self.tours is not None:
            return self.tours.around(instruction, do)
        return self.parameters.while_whole(instruction, do) if computes and self.parameters.gathers else do

    def _compiled(self, instruction: Instruction, line: Outgoing | Incoming | None) -> Do:
        if isinstance(line, Outgoing):
            return self._send(instruction, line)
        if isinstance(line, Incoming):
            return self._receive(instruction, line)
        match instruction.action.op:
            case Op.F:
                return self._forward(instruction)
            case Op.B | Op.I:
                return self._backward(instruction, weights=instruction.action.op is Op.B)
            case Op.W:
                return self._finish(instruction)
            case Op.R:
                return self._recompute(instruction)
            case Op.S:
                return self._sync(instruction)
            case Op.N:
                return self._with_sums(instruction, self.parameters.norm)
            case Op.U:
                return self._with_sums(instruction, self.parameters.update)
            case Op.G:
                return partial(self.parameters.gather, instruction)

    def _stage(self, instruction: Instruction, cut: Cut) -> Stage:
        """Returns the stage of an instruction, in the graph of the captured model that these rows use."""
        number = instruction.action.stage
        return self.graphs.stage(number, cut.graph) if cut.graph else self.stages[number]

    def _forward(self, instruction: Instruction) -> Do:
        """Runs a stage on its rows."""
        saved = instruction.writes.get(Kind.SAVED) or instruction.writes.get(Kind.KEPT) or ()
        if not self.flow.pieces.narrow or instruction.action.part != NONE or len(saved) > 1:
            return partial(self._forward_cut, instruction, saved)
        stage, slots, flow = self.stages[instruction.action.stage], self.store.slots, self.flow
        ahead, local = divmod(instruction.action.mb, flow.microbatches)
        (given,), (keep,) = instruction.reads.get(Kind.ACT, (NONE,)), saved or (NONE,)
        written = instruction.writes.get(Kind.ACT, ())

        def forward() -> None:
            step = flow.first_step + ahead
            batch = flow.batches[step]
            mine = (batch.ready or batch.make_ready(stage.objective, stage.seed, step))[local]
            start, stop = mine.rows
            if start == stop:
                return
            if given == NONE:
                record = Record(mine, *batch.inputs(mine.rows))
            else:
                values, slots[given] = slots[given], None
                record = Record(mine, own_leaves(*values.wait()) if type(values) is Pending else leaves(*values))
            bundle = self._run(instruction, record, batch, step)
            if keep != NONE:
                slots[keep] = record
            for slot in written:
                slots[slot] = bundle

        return forward

    def _run(self, instruction: Instruction, record: Record, batch: Batch, step: int) -> Bundle:
        """Runs a stage with its target, columns and weights. Losses of the last stage are summed per training step."""
        stage = self._stage(instruction, record.cut)
        if stage.is_last:
            record.target = batch.targets(record.cut.rows)
        if stage.columns:
            record.columns = batch.named(stage.columns, record.cut.rows)
        if self.parameters.versioned:
            record.weights = self.parameters.versions(instruction)
        bundle = stage.forward(record)
        if stage.is_last:
            self.tallies.setdefault(step, Tally()).add(bundle.tensors[0], record.times, record.cut.counts)
        return bundle

    def _forward_cut(self, instruction: Instruction, saved: tuple[int, ...]) -> None:
        """Runs a stage on this worker's part of the rows. If backwards are halved, each half has its own autograd graph."""
        stage, (step, batch, local) = self.stages[instruction.action.stage], self.flow.place(instruction.action.mb)
        own = self.flow.pieces.own(instruction.action, batch.cuts[local])
        if not size_of(own):
            return
        received = self.flow.received(instruction, own) if Kind.ACT in instruction.reads else None
        bundles: list[Bundle] = []
        for index, part in enumerate(own):
            if part.start == part.stop:  # half of a single row; its gradient is not sent either
                continue
            mine = batch.cut(local, part, stage.objective, stream(stage.seed, step))
            record = Record(mine, *batch.inputs(mine.rows)) if received is None else Record(mine, leaves(*received[index]))
            bundle = self._run(instruction, record, batch, step)
            if saved:
                self.store.slots[saved[index]] = record
            if not stage.is_last and len(own) > 1:
                require_rows(bundle, part.size)
            bundles.append(bundle)
        if Kind.ACT in instruction.writes:
            self.flow.scatter(instruction.writes[Kind.ACT], joined(bundles), own)

    def _backward(self, instruction: Instruction, *, weights: bool) -> Do:
        """Computes the gradients of a stage's inputs, and of its weights unless `weights` is False."""
        slots, inline, op = self.store.slots, Kind.KEPT in instruction.reads, instruction.action.op
        kept, read = instruction.reads[Kind.KEPT if inline else Kind.SAVED][0], instruction.reads.get(Kind.GRAD, ())
        written, (rest,) = instruction.writes.get(Kind.GRAD, ()), instruction.writes.get(Kind.REST, (NONE,))
        aim = self.parameters.aim if self.parameters.aims else None
        pop, scatter, count = self.store.pop, self.flow.scatter, self.parameters.counter(instruction)

        def backward() -> None:
            record: Record | None = slots[kept]
            slots[kept] = None
            if record is None:
                if aim is not None:
                    aim(instruction)  # even without rows this may be the last reader of a version
                return
            # pieces without rows were never sent
            gradients = joined([piece for slot in read if (piece := pop(slot)) is not None]).tensors if read else ()
            stage = self._stage(instruction, record.cut)
            if inline:
                stage.recompute(record)
            first, known = self._to_find_out(instruction, stage, record)
            if aim is not None:
                aim(instruction)
            found = stage.backward(record, gradients, weights=weights, first=first, known=known)
            if written:
                scatter(written, Bundle(found, (False,) * len(found)), (record.cut.rows,))
            if weights:
                count(record.cut.counts, record.reached or stage.reached.get(op) or everything(first or ()))
            else:
                slots[rest] = record

        return backward

    def _finish(self, instruction: Instruction) -> Do:
        """Computes the weight gradients that a split backward deferred."""
        slot, count = instruction.reads[Kind.REST][0], self.parameters.counter(instruction)
        aim = self.parameters.aim if self.parameters.aims else None

        def finish() -> None:
            record: Record | None = self.store.pop(slot)
            stage = None if record is None else self._stage(instruction, record.cut)
            first = None if record is None or stage is None else self._to_find_out(instruction, stage, record)[0]
            if aim is not None:  # another round may have used the leaves since I
                aim(instruction)
            if record is not None and stage is not None:
                stage.finish(record, first)
                count(record.cut.counts, record.reached or stage.reached.get(Op.W) or everything(first or ()))

        return finish

    def _to_find_out(self, instruction: Instruction, stage: Stage, record: Record) -> tuple[Leaves | None, Reached | None]:
        """Returns the leaves of a backward if it must record which of them it reaches, and those that its round has reached.

        A captured stage records once. A list of layers records in every backward until its round has reached all leaves.
        """
        number = instruction.action.stage
        if stage.is_captured:
            return None if instruction.action.op in stage.reached else self.parameters.leaves(instruction), None
        known = self.parameters.known(instruction)
        if known == self._all_leaves.get(number):
            record.reached = known
            return None, known
        found = self.parameters.leaves(instruction)
        self._all_leaves[number] = everything(found)
        return found, known

    def _recompute(self, instruction: Instruction) -> Do:
        """Recomputes what a forward did not keep."""
        (kept,), (saved,) = instruction.reads[Kind.KEPT], instruction.writes[Kind.SAVED]

        def recompute() -> None:
            record: Record | None = self.store.pop(kept)
            if record is not None:
                self._stage(instruction, record.cut).recompute(record)
            self.store.slots[saved] = record

        return recompute

    def _sync(self, instruction: Instruction) -> Do:
        """Sums a unit's gradients with a collective or along a ring."""
        slots = instruction.reads.get(Kind.PARTIAL)
        return lambda: self.parameters.sync(instruction, self.store.pop(slots[0]).tensors if slots else ())

    def _with_sums(self, instruction: Instruction, do: Callable[[Instruction], None]) -> Do:
        """Waits for the sums that an instruction reads, then runs it."""
        sums, store = instruction.reads.get(Kind.SUM, ()), self.store

        def act() -> None:
            for slot in sums:
                store.take(slot)
            do(instruction)

        return act

    def _send(self, instruction: Instruction, line: Outgoing) -> Do:
        """Sends a bundle from its slot, or the current running sum of a unit."""
        value, slot = instruction.value, instruction.slot
        assert value is not None
        if self.tours is not None and value.kind is Kind.PARAM:
            return self.tours.send(instruction, line)
        if self.flow.loads[value.kind] is not Load.BUFFER:
            return line.send_from(self.store.slots, slot)

        def send_sum() -> None:
            self.store.take(slot)
            line.send(self.parameters.handed_on(value, last=instruction.releases))

        return send_sum

    def _receive(self, instruction: Instruction, line: Incoming) -> Do:
        """Posts a receive into the buffer of a sum, into parameters or a token, or into new tensors that the header describes."""
        assert instruction.value is not None
        slots, load = self.store.slots, self.flow.loads[instruction.value.kind]
        if load is Load.BUFFER:
            return line.fill_into(slots, instruction, partial(self.parameters.room, instruction.value))
        if self.tours is not None and load is Load.WEIGHTS:
            return line.fill_into(slots, instruction, partial(self.tours.room, instruction.value))
        if load is Load.TOKEN:
            return line.fill_into(slots, instruction, lambda: Bundle((torch.empty_like(self.token.tensors[0]),), (False,)))
        return line.post_into(slots, instruction)
