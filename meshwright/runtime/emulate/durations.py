"""The steps of an emulated worker with their times: what the simulator charges, from the same prices."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.ir.action import COMPUTE, Cell, Op, Transfer, Value, walk
from meshwright.ir.analysis.price import Price
from meshwright.ir.schedule import Schedule
from meshwright.runtime.program import Program, Step
from meshwright.runtime.transport.edges import Bare

WORD = 8
"""Bytes of a number in a message."""

LARGEST = 1 << 24
"""No message carries more bytes than this; what a model's costs say beyond it is only reckoned with."""


@dataclass(slots=True)
class Work:
    """A step made ready: which slots it waits for, and how long it takes (a message: how long it takes its link).

    `link_waits` are messages from the same peer that stand between this send and the one before; `second`: the other
    action of a cell has done this one too.
    """

    takes_s: float = 0.0
    waits: tuple[int, ...] = ()
    latency_s: float = 0.0
    words: int = 2
    link_waits: tuple[int, ...] = ()
    second: bool = False
    shape: Bare | None = None


def works(program: Program, price: Price) -> dict[int, Work]:
    """Every step with its times, by the id of the step; only what comes by message or collective is waited for."""
    ring = program.schedule.ring
    brought = {step.slot for step in program.steps if step.channel is not None and not step.sends}
    for step in program.steps:
        if step.action.op in (Op.S, Op.N) and not ring and step.channel is None:
            brought |= {slot for slots in step.writes.values() for slot in slots}
    found: dict[int, Work] = {}
    before: Step | None = None
    heard: dict[int, list[int]] = {}
    for step in program.steps:
        if step.channel is not None:
            work = found[id(step)] = _message(step, price, program.worker, brought)
            if step.sends:
                work.link_waits = tuple(heard.pop(peer_of(step), ()))
            else:
                heard.setdefault(peer_of(step), []).append(step.slot)
            continue
        waits = tuple(slot for slots in step.reads.values() for slot in slots if slot in brought)
        if isinstance(step.entry, Cell) and before is not None and before.entry is step.entry:
            found[id(before)].waits += waits
            found[id(step)] = Work(second=True)
        else:
            found[id(step)] = Work(price.entry_s(program.worker, step.entry), waits)
        before = step
    return found


def _message(step: Step, price: Price, worker: int, brought: set[int]) -> Work:
    value: Value | None = step.value
    assert value is not None
    ends = (worker, peer_of(step)) if step.sends else (peer_of(step), worker)
    busy, latency = price.message_s(value, *ends)
    payload = min(int(price.value_bytes(ends[0], value)), LARGEST)
    waits = (step.slot,) if step.sends and step.slot in brought else ()
    words = 2 + -(-payload // WORD)
    return Work(busy, waits, latency, words, shape=Bare(words * WORD))


def peer_of(step: Step) -> int:
    """The worker at the other end of a message."""
    assert isinstance(step.entry, Transfer)
    return step.entry.peer


def rounds_before_compute(schedule: Schedule) -> frozenset[int]:
    """The rounds whose global reduction stands before further compute on some worker."""
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
