"""Cyclic ZeRO: parameters are sent from reader to reader, and are in memory only while an action uses them.

    receive    new flat tensors, in a slot like any other message
    action     copies them into the storage of its leaves; a forward frees it again, and the backward fills the same storage
    send       passes the message on as it came; the owner makes it from its own version

The last stage keeps its parameters from forward to backward, because nothing runs in between.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from meshwright.ir.action import Kind, Op, Value
from meshwright.runtime.executor.actions import Do, Store
from meshwright.runtime.parameters.unit import Unit
from meshwright.runtime.parameters.zero_shares import flat_plans
from meshwright.runtime.program import Instruction, Program
from meshwright.runtime.stage.stage import Bundle
from meshwright.runtime.transport.send_receive import Bare, Outgoing


class ParameterTours:
    """The parameters that a worker lends to others and borrows from them, during the walks of one program."""

    def __init__(self, program: Program, units: Mapping[int, Unit], store: Store) -> None:
        self.program, self.units, self.store = program, units, store
        self.versioned = not program.schedule.flush
        self.plans = {number: flat_plans(unit.params, 1) for number, unit in units.items()}

    def shape(self, value: Value) -> Bare:
        """Returns the size of a message, which both ends know."""
        return Bare(sum(plan.width * plan.dtype.itemsize for plan in self.plans[value.stage]))

    def room(self, value: Value) -> Bundle:
        """Returns the tensors that a message is received into."""
        borrowed = self.units[value.stage].borrowed
        assert borrowed is not None, "the owner of a unit gets its parameters from no other worker"
        flats = borrowed.room()
        return Bundle(tuple(flats), (False,) * len(flats))

    def send(self, instruction: Instruction, line: Outgoing) -> Do:
        """Compiles a send: what was received before, or the owner's version as it is now."""
        value = instruction.value
        assert value is not None
        unit = self.units[value.stage]

        def send() -> None:
            line.send(self._own(unit, value) if unit.borrowed is None else self.store.take(instruction.slot))
            self._end(instruction)
            if unit.versions is not None:
                for dropped in instruction.drops:
                    unit.versions.drop(dropped.version)

        return send

    def around(self, instruction: Instruction, do: Do) -> Do:
        """Returns a function that gives borrowed parameters memory, runs an action and frees them again."""
        values = [(slot, self.program.values[slot]) for slot in instruction.reads.get(Kind.PARAM, ())]
        read = [(slot, value.version, unit) for slot, value in values if (unit := self.units[value.stage].borrowed) is not None]
        if not read:
            return do
        last = self.program.schedule.stages - 1
        op, trains = instruction.action.op, not self.program.schedule.forward_only
        stays = op is Op.R or (op is Op.F and instruction.action.stage == last and trains)

        def run() -> None:
            for slot, version, unit in read:
                unit.open(version, self.store.take(slot).tensors)
                if not self.versioned:
                    unit.show(version)
            do()
            for _, version, unit in read:
                if not self.versioned:
                    unit.hide()
                if not stays:
                    unit.close(version)
            self._end(instruction)

        return run

    def _own(self, unit: Unit, value: Value) -> Bundle:
        """Returns a copy of a version of the unit's owner. The version may change during the send."""
        tensors = unit.at(value.version) if self.versioned else unit.params
        plans = self.plans[value.stage]
        flats = [torch.cat([tensors[index].detach().reshape(-1) for index, _, _ in plan.places]) for plan in plans]
        return Bundle(tuple(flats), (False,) * len(flats))

    def _end(self, instruction: Instruction) -> None:
        """Drops messages and versions that an instruction is the last to use."""
        for slot in instruction.ends:
            self.store.slots[slot] = None
        for value in instruction.drops:
            if (borrowed := self.units[value.stage].borrowed) is not None:
                borrowed.drop(value.version)
