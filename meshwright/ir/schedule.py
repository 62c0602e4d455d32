"""A schedule: a placement and one ordered list of entries per worker, without times.

A schedule has a prologue, a period and a drain. Each period advances the microbatches by N and the parameter version by one,
so one period describes training of any length:

    lists = prologue + period + period shifted by 1 + ... + drain shifted by `repeats`

A schedule with a flush is a period only. A forward-only schedule (evaluation) stays at one version. Parameters are numbered
by sync units: unit s has the parameters of stage s alone; unit `stages + i` is tie group i, shared by the stages it names.

A run may be cut into several schedules. One that continues a run has `first` > 0: its rounds are numbered from `first` on, and
it starts and ends with the last two versions of the parameters that its forwards read one round late.

If stages have owners, only the owner of a unit keeps its parameters and updates them. Other workers get them for a forward or
a backward, from the worker that used them before. A tie group belongs to the owner of its first stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple

from meshwright.ir.action import COMPUTE, Action, Cell, Entry, Op, Transfer, Value, actions, walk
from meshwright.ir.placement import Placement

Lists = tuple[tuple[Entry, ...], ...]


class Recompute(NamedTuple):
    """How a stage recomputes the activations that its forward did not keep.

    Args:
        share: The share of its layers that is recomputed, from 0 to 1.
        early: True: by an action R of its own, before the backward. False: inside the backward.

    Examples:
        >>> import meshwright as mw
        >>> schedule = mw.schedules.build("onef1b", workers=2, microbatches=2)
        >>> mw.lower(schedule, recompute=[mw.Recompute(share=0.5), mw.Recompute(share=0.0)]).recompute[0].share
        0.5
    """

    share: float = 1.0
    early: bool = False


class Sharding(StrEnum):
    """The state that the holders of a unit divide among them, over all data-parallel copies (the stages of ZeRO)."""

    NONE = "none"
    STATE = "zero-1"  # optimizer state
    GRADIENTS = "zero-2"  # ... and gradients: there is a sync for each gradient
    PARAMETERS = "zero-3"  # ... and parameters: each use gathers them

    @property
    def sums_singly(self) -> bool:
        """Whether every gradient is summed on its own, because whole gradients are not kept."""
        return self in (Sharding.GRADIENTS, Sharding.PARAMETERS)


class ChannelOrder(NamedTuple):
    """The order of messages on the link between two workers, given by the actions that produce them."""

    workers: tuple[int, int]
    producers: tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """A placement of stages and one ordered list of actions per worker, without times.

    It is a prologue, a period that repeats, and a drain. A schedule with a flush is all period. `meshwright.schedules.build`
    makes one by name.

    Args:
        name: What it is called.
        placement: Which worker has which stage.
        microbatches: Microbatches of one round, that is of one update.
        period: For each worker the entries that repeat.
        prologue: For each worker the entries before the first period.
        drain: For each worker the entries after the last period.
        repeats: How many periods there are.
        options: The options that it was built with.
        parts: Into how many parts a microbatch is cut by rows.
        ties: Groups of stages that share a parameter.
        recompute: For each stage how it recomputes; None if nothing is settled.
        turns: Pairs (writer, reader) of actions where the second waits for the first without a message.
        channels: Orders of messages between two workers, where the schedule chooses them.
        flush: Whether a step ends before the next one begins.
        ring: Whether gradients are added up from worker to worker instead of by a collective.
        norm: Whether a step has one global reduction for the norm of its gradient.
        sharding: What the holders of a unit divide among them. If anything, G gathers parameters after U, or before use.
        first: The number of its first round. Above 0 it continues a run, and versions `first` - 1 and `first` exist at its start.
        owners: For each stage the worker that keeps its parameters; empty if every worker that runs a stage keeps them.
        lowered: Whether syncs, updates, sends and receives are in the lists.
        proof: The digest of what was proved, set by the proof.

    Examples:
        >>> import meshwright as mw
        >>> schedule = mw.schedules.build("onef1b", workers=2, microbatches=2)
        >>> print(*schedule.lists[0])
        0F0 0F1 0B0 0B1
    """

    name: str
    placement: Placement
    microbatches: int
    period: Lists
    prologue: Lists = ()
    drain: Lists = ()
    repeats: int = 1
    options: tuple[tuple[str, object], ...] = ()
    parts: int = 1
    ties: tuple[tuple[int, ...], ...] = ()
    recompute: tuple[Recompute, ...] | None = None
    turns: tuple[tuple[Action, Action], ...] = ()
    channels: tuple[ChannelOrder, ...] = ()
    flush: bool = True
    ring: bool = False
    norm: bool = False
    sharding: Sharding = Sharding.NONE
    first: int = 0
    owners: tuple[int, ...] = ()
    lowered: bool = False
    proof: str = field(default="", compare=False, repr=False)
    """The digest of the lists that were proved. It is ignored if the lists have changed (`passes/check.py`)."""

    @cached_property
    def digest(self) -> str:
        """A hash that differs between different schedules (also list vs tuple). Equal on all hosts; cheap next to a proof."""
        found = sha256(repr(replace(self, prologue=(), period=(), drain=())).encode())
        for segment in (self.prologue, self.period, self.drain):
            for entries in segment:
                found.update(";".join(map(_plain, entries)).encode())
                found.update(b"|" if type(entries) is tuple else repr(type(entries)).encode())
            found.update(b"||" if type(segment) is tuple else repr(type(segment)).encode())
        return found.hexdigest()

    def __getstate__(self) -> dict[str, object]:
        """Pickles only the fields; the receiver computes lists and digest itself."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def workers(self) -> int:
        """The number of workers, which is the number of lists."""
        return self.placement.workers

    @property
    def stages(self) -> int:
        """The number of stages of a replica."""
        return self.placement.stages

    @property
    def units(self) -> int:
        """The number of sync units: one per stage and one per tie group."""
        return self.stages + len(self.ties)

    @cached_property
    def units_of(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the units whose parameters it uses."""
        return tuple(
            (stage, *(self.stages + i for i, tied in enumerate(self.ties) if stage in tied)) for stage in range(self.stages)
        )

    @cached_property
    def forward_only(self) -> bool:
        """True if all actions are forwards, and gathers for them. Then nothing is saved for backwards, synced or updated."""
        ops = (action.op for lists in (self.prologue, self.period, self.drain) for entries in lists for action in walk(entries))
        return next(ops, None) in (Op.F, Op.G) and all(op is Op.F or op is Op.G for op in ops)

    def stages_of(self, unit: int) -> tuple[int, ...]:
        """Returns the stages that use a unit's parameters."""
        return (unit,) if unit < self.stages else self.ties[unit - self.stages]

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """For each unit, the workers that hold its parameters: its owner, or else all that run it."""
        if not self.owners:
            return self.runners
        return tuple((self.owners[self.stages_of(unit)[0]],) for unit in range(self.units))

    @cached_property
    def runners(self) -> tuple[tuple[int, ...], ...]:
        """For each unit, the workers that run a stage with its parameters."""
        found: list[set[int]] = [set() for _ in range(self.units)]
        for worker, pairs in enumerate(self.placement.held):
            for _, stage in pairs:
                for unit in self.units_of[stage]:
                    found[unit].add(worker)
        return tuple(tuple(sorted(workers)) for workers in found)

    @cached_property
    def lists(self) -> Lists:
        """All entries of each worker in order: prologue, periods, drain."""
        if self.repeats == 1 and not self.prologue and not self.drain:
            return self.period
        count = self.workers
        periods = range(self.repeats if any(self.period) else 0)
        parts = [(self.prologue, 0), *((self.period, k) for k in periods), (self.drain, self.repeats)]
        return tuple(
            tuple(entry for segment, k in parts if segment for entry in self._later(segment[worker], k))
            for worker in range(count)
        )

    @cached_property
    def turn_edges(self) -> tuple[tuple[Action, Action], ...]:
        """Control edges (writer, reader) of the whole run. An edge repeats with its reader; edges past the end are dropped."""
        if not self.turns:
            return ()
        in_period = {action for entries in self.period for action in walk(entries)}
        in_drain = {action for entries in self.drain for action in walk(entries)}
        there = {action for entries in self.lists for action in walk(entries)}
        edges: dict[tuple[Action, Action], None] = {}
        for writer, reader in self.turns:
            shifts = [*range(self.repeats)] if reader in in_period else []
            shifts += [self.repeats] if reader in in_drain else []
            for k in shifts or [0]:
                edges[writer.shifted(*self._shift(k)), reader.shifted(*self._shift(k))] = None
        return tuple((writer, reader) for writer, reader in edges if writer in there and reader in there)

    @cached_property
    def steps(self) -> int:
        """The number of rounds in the lists."""
        last = max((a.mb for entries in self.lists for entry in entries for a in actions(entry) if a.op in COMPUTE), default=-1)
        return (last + self.microbatches) // self.microbatches - self.first

    @property
    def rounds(self) -> range:
        """The numbers of the rounds in the lists."""
        return range(self.first, self.first + self.steps)

    def with_lists(self, lists: Lists) -> Schedule:
        """Returns the schedule with these lists. Without a flush they become the prologue and do not repeat."""
        flat = replace(self, prologue=(), drain=(), turns=self.turn_edges)
        return replace(flat, period=lists, repeats=1) if self.flush else replace(flat, prologue=lists, period=(), repeats=0)

    def repeated(self, repeats: int) -> Schedule:
        """Returns the same schedule with another number of periods."""
        return replace(self, repeats=repeats)

    def _later(self, entries: tuple[Entry, ...], k: int) -> Iterable[Entry]:
        mb, version = self._shift(k)
        return entries if k == 0 else (entry.shifted(mb, version) for entry in entries)

    def _shift(self, k: int) -> tuple[int, int]:
        """Returns the shift of period k, in microbatches and versions."""
        return k * self.microbatches, 0 if self.forward_only else k


def _plain(entry: Entry) -> str:
    """Returns an entry as numbers; faster than its text form."""
    if type(entry) is Action:
        return " ".join(map(str, entry))
    if type(entry) is Transfer and type(entry.value) is Value:
        return " ".join(map(str, (entry.sends, *entry.value, entry.peer)))
    return f"[{','.join(map(_plain, actions(entry)))}]" if type(entry) is Cell else repr(entry)
