"""Compile a worker's list into instructions: effects are computed once, values are numbered, messages have their channels.

The executor walks over the instructions and computes no dependencies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.ir.action import COMPUTE, NONE, Action, Entry, Kind, Op, Transfer, Value, actions
from meshwright.ir.analysis.effects import rule
from meshwright.ir.analysis.held_values import final
from meshwright.ir.schedule import Schedule
from meshwright.runtime.transport.base import Channel


@dataclass(slots=True)
class Instruction:
    """One action or one end of a message.

    `reads` and `writes` map kinds to slots. `round` is the round of the gradients. `in_place` is true for an update if no later
    instruction reads the version that it replaces. `drops` are the versions that this instruction is the last to read,
    `frees` the units that were gathered for it and the instructions before it.
    `ends` are slots with parameters that others own, of which this instruction is the last use here.
    `releases` is true for the last use of the unit's gradients of this round. `waits` and `signals` are turns. `words` is `name`
    and `stage` as bytes, and the worker if the plan maps workers to ranks. The executor writes them before it runs the
    instruction, so that the parent knows where a worker died.
    """

    entry: Entry
    action: Action
    reads: dict[Kind, tuple[int, ...]]
    writes: dict[Kind, tuple[int, ...]]
    round: int
    value: Value | None = None
    slot: int = NONE
    channel: Channel | None = None
    sends: bool = False
    in_place: bool = True
    drops: tuple[Value, ...] = ()
    frees: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    releases: bool = False
    waits: tuple[int, ...] = ()
    signals: tuple[int, ...] = ()
    words: bytes = b""

    def __post_init__(self) -> None:
        self.words = f"{self.name} {self.stage}".encode()

    @property
    def name(self) -> str:
        """The instruction as text, such as `2B5`."""
        return str(self.action if self.channel is None else self.entry)

    @property
    def stage(self) -> int:
        """The stage that the instruction belongs to."""
        return self.action.stage if self.value is None else self.value.stage

    @property
    def receives(self) -> bool:
        """True for the receiving end of a message."""
        return self.channel is not None and not self.sends


@dataclass(frozen=True)
class Program:
    """The instructions of one worker, and the value of each slot."""

    schedule: Schedule
    worker: int
    instructions: tuple[Instruction, ...]
    values: tuple[Value, ...]

    def early(self, depth: Mapping[Channel, int]) -> tuple[Instruction, ...]:
        """Returns the instructions with each receive moved up to the last read of the message `depth` before it on its channel.

        Transports whose receives do not block use this. A message whose receive is already posted saves one round trip.
        """
        last_read = {
            slot: index
            for index, instruction in enumerate(self.instructions)
            for slots in instruction.reads.values()
            for slot in slots
        }
        after: dict[int, list[Instruction]] = defaultdict(list)
        seen: dict[Channel, list[Instruction]] = defaultdict(list)
        posted: dict[Channel, int] = {}
        for index, instruction in enumerate(self.instructions):
            if instruction.channel is None or instruction.sends:
                continue
            if instruction.channel.kind is Kind.PARAM:  # large, and placed a whole action before their use
                after[index].append(instruction)
                continue
            before, ahead = seen[instruction.channel], depth[instruction.channel]
            place = last_read.get(before[-ahead].slot, index) if len(before) >= ahead else -1
            # Messages of a channel arrive in its order, but may be read in another one.
            place = posted[instruction.channel] = max(min(place, index), posted.get(instruction.channel, -1))
            after[place].append(instruction)
            before.append(instruction)
        found = list(after[-1])
        for index, instruction in enumerate(self.instructions):
            if not instruction.receives:
                found.append(instruction)
            found += after[index]
        return tuple(found)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that this worker holds, in order."""
        return tuple(sorted({stage for _, stage in self.schedule.placement.held[self.worker]}))

    @property
    def units(self) -> tuple[int, ...]:
        """The units whose parameters this worker holds."""
        return tuple(unit for unit, workers in enumerate(self.schedule.holders) if self.worker in workers)

    @property
    def borrowed(self) -> tuple[int, ...]:
        """The units whose parameters this worker uses, but does not hold."""
        used = (unit for unit, workers in enumerate(self.schedule.runners) if self.worker in workers)
        return tuple(unit for unit in used if unit not in self.units)


_MESSAGE = Action(Op.F, NONE)
"""The placeholder action of an instruction that is a message."""


def program(schedule: Schedule, worker: int, rank_of: Callable[[int], int]) -> Program:
    """Compiles one worker's list. `rank_of` maps a worker of this data-parallel copy to its rank."""
    effects = rule(schedule)
    slots: dict[Value, int] = {}
    instructions: list[Instruction] = []
    for entry in schedule.lists[worker]:
        if isinstance(entry, Transfer):
            instructions.append(_message(entry, worker, slots, rank_of))
            continue
        for action in actions(entry):
            found = effects(worker, action)
            round_ = action.mb // schedule.microbatches if action.op in COMPUTE else action.version
            instruction = Instruction(entry, action, _by_kind(found.reads, slots), _by_kind(found.writes, slots), round_)
            instruction.waits, instruction.signals = instruction.reads.get(Kind.TURN, ()), instruction.writes.get(Kind.TURN, ())
            instructions.append(instruction)
    _mark_versions(instructions, list(slots), schedule, worker)
    _mark_releases(instructions)
    return Program(schedule, worker, tuple(instructions), tuple(slots))


def _message(entry: Transfer, worker: int, slots: dict[Value, int], rank_of: Callable[[int], int]) -> Instruction:
    slot = slots.setdefault(entry.value, len(slots))
    ends = (worker, entry.peer) if entry.sends else (entry.peer, worker)
    channel = Channel(rank_of(ends[0]), rank_of(ends[1]), entry.value.kind)
    return Instruction(entry, _MESSAGE, {}, {}, 0, entry.value, slot, channel, entry.sends)


def _by_kind(values: tuple[Value, ...], slots: dict[Value, int]) -> dict[Kind, tuple[int, ...]]:
    found: dict[Kind, tuple[int, ...]] = {}
    for value in values:
        found[value.kind] = (*found.get(value.kind, ()), slots.setdefault(value, len(slots)))
    return found


def _mark_versions(instructions: list[Instruction], values: list[Value], schedule: Schedule, worker: int) -> None:
    """Computes the lifetime of parameter versions: liveness over the worker's list, and what the next rounds need after it."""
    kept = {(value.stage, value.version) for value in final(schedule, worker)} if schedule.first else set()
    last: dict[int, int] = {}
    for index, instruction in enumerate(instructions):
        for slot in _parameters_of(instruction):
            last[slot] = index
    replaced = {
        (instruction.action.stage, instruction.action.version): index
        for index, instruction in enumerate(instructions)
        if instruction.action.op is Op.U
    }
    versions: dict[tuple[int, int], int] = {}
    for slot, index in last.items():
        value = values[slot]
        if value.mb != NONE:
            instructions[index].frees += (value.stage,)
            continue
        if worker not in schedule.holders[value.stage]:
            instructions[index].ends += (slot,)
        key = value.stage, value.version
        versions[key] = max(index, versions.get(key, 0))
    for (unit, version), index in versions.items():
        update, stays = replaced.get((unit, version)), (unit, version) in kept
        if update is not None:
            instructions[update].in_place = index <= update and not stays
        ends = update is not None or version < schedule.first or worker not in schedule.holders[unit]
        if ends and not stays:
            instructions[index].drops += (Value(Kind.PARAM, unit, version=version),)


def _parameters_of(instruction: Instruction) -> tuple[int, ...]:
    """Returns the slots of the parameters that an instruction reads or passes on."""
    if instruction.value is not None:
        return (instruction.slot,) if instruction.sends and instruction.value.kind is Kind.PARAM else ()
    return instruction.reads.get(Kind.PARAM, ())


def _mark_releases(instructions: list[Instruction]) -> None:
    """Marks the last use of a round's gradients: the update, or the send of a sum after it, or without an update here."""
    last: dict[tuple[int, int], Instruction] = {}
    for instruction in instructions:
        if instruction.action.op is Op.U:
            last[instruction.action.stage, instruction.action.version] = instruction
        elif instruction.value is not None and instruction.value.kind in (Kind.SUM, Kind.PARTIAL) and instruction.sends:
            last[instruction.value.stage, instruction.value.version] = instruction
    for instruction in last.values():
        instruction.releases = True
