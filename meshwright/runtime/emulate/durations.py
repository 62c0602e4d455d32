"""The instructions of an emulated worker with their durations. The simulator uses the same prices."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.ir.action import COMPUTE, Cell, Op, Transfer, Value, walk
from meshwright.ir.analysis.price import Price
from meshwright.ir.schedule import Schedule
from meshwright.runtime.program import Instruction, Program
from meshwright.runtime.transport.send_receive import Bare

WORD = 8
"""Bytes of a number in a message."""

LARGEST = 1 << 24
"""The maximum bytes of a message. For larger ones, the costs of the model still count, but fewer bytes are sent."""


@dataclass(slots=True)
class Work:
    """The durations of an instruction: the slots that it waits for, and the time that it takes (for a message: on its link).

    `link_waits` are the messages from the same peer between this send and the one before. `second`: this is the second action of
    a cell, and the first one has already done both.
    """

    takes_s: float = 0.0
    waits: tuple[int, ...] = ()
    latency_s: float = 0.0
    words: int = 2
    link_waits: tuple[int, ...] = ()
    second: bool = False
    shape: Bare | None = None


def works(program: Program, price: Price) -> dict[int, Work]:
    """Returns every instruction with its durations, by the id of the instruction.

    Instructions wait only for values that come by message or collective.
    """
    joint = (Op.G,) if program.schedule.ring else (Op.S, Op.N, Op.G)
    brought = {
        instruction.slot for instruction in program.instructions if instruction.channel is not None and not instruction.sends
    }
    for instruction in program.instructions:
        if instruction.action.op in joint and instruction.channel is None:
            brought |= {slot for slots in instruction.writes.values() for slot in slots}
    found: dict[int, Work] = {}
    before: Instruction | None = None
    heard: dict[int, list[int]] = {}
    for instruction in program.instructions:
        if instruction.channel is not None:
            work = found[id(instruction)] = _message(instruction, price, program.worker, brought)
            if instruction.sends:
                work.link_waits = tuple(heard.pop(peer_of(instruction), ()))
            else:
                heard.setdefault(peer_of(instruction), []).append(instruction.slot)
            continue
        waits = tuple(slot for slots in instruction.reads.values() for slot in slots if slot in brought)
        if isinstance(instruction.entry, Cell) and before is not None and before.entry is instruction.entry:
            found[id(before)].waits += waits
            found[id(instruction)] = Work(second=True)
        else:
            found[id(instruction)] = Work(price.entry_s(program.worker, instruction.entry), waits)
        before = instruction
    return found


def _message(instruction: Instruction, price: Price, worker: int, brought: set[int]) -> Work:
    value: Value | None = instruction.value
    assert value is not None
    ends = (worker, peer_of(instruction)) if instruction.sends else (peer_of(instruction), worker)
    busy, latency = price.message_s(value, *ends)
    payload = min(int(price.value_bytes(ends[0], value)), LARGEST)
    waits = (instruction.slot,) if instruction.sends and instruction.slot in brought else ()
    words = 2 + -(-payload // WORD)
    return Work(busy, waits, latency, words, shape=Bare(words * WORD))


def peer_of(instruction: Instruction) -> int:
    """Returns the worker at the other end of a message."""
    assert isinstance(instruction.entry, Transfer)
    return instruction.entry.peer


def rounds_before_compute(schedule: Schedule) -> frozenset[int]:
    """Returns the rounds whose global reduction comes before further compute on some worker."""
    found: set[int] = set()
    for entries in schedule.lists:
        seen: list[int] = []
        for action in walk(entries):
            if action.op is Op.N:
                seen.append(action.version)
            elif action.op in COMPUTE:
                found.update(seen)
                seen.clear()
    return frozenset(found)
