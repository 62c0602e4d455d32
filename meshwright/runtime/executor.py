"""The executor: one loop over a worker's lowered list, one match.

It obeys the list and decides nothing. Values are slots; a receive is posted where it stands and waited for at the first
use of its value; sends and syncs overlap what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.ir.action import NONE, Kind, Op, Value
from meshwright.runtime.batch import Batch, Rows
from meshwright.runtime.edges import Edges, Pending
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.program import Program, Step
from meshwright.runtime.stage import Bundle, Call, Key, Record, Stage, Weights, leaf
from meshwright.runtime.unit import Unit

Feed = Callable[[int], Batch]
"""The batch of a step."""


@dataclass(frozen=True)
class Rules:
    """What an update does besides the optimizer's step."""

    clip: float | None = None
    skip_nonfinite: bool = False


@dataclass
class Tally:
    """What a rank saw of one step: the sum of losses and its weight (where last stages are), the norm, skipped or not."""

    loss: Tensor | float = 0.0
    weight: float = 0.0
    norm: float | None = None
    skipped: bool = False


@dataclass
class Executor:
    """Runs a program on this rank's stages and units. `microbatches` is per step of data; rounds may be shorter."""

    program: Program
    mesh: Mesh
    stages: Mapping[int, Stage]
    units: Mapping[int, Unit]
    edges: Edges
    microbatches: int
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        self.schedule = self.program.schedule
        self.store: list[Any] = [None] * len(self.program.values)
        self.narrow = all(len(team) == 1 for copy in self.schedule.placement.teams for teams in copy for team in teams)
        self.versioned = not self.schedule.flush
        self.tallies: dict[int, Tally] = {}
        self.scales: dict[int, float | None] = {}
        self.at: Step | None = None

    def run(self, feed: Feed, first_step: int = 0) -> dict[int, Tally]:
        """Walk the list once; its first microbatch is the first of step `first_step`."""
        self.feed, self.base, self.tallies = feed, first_step * self.microbatches, {}
        for step in self.program.steps:
            self.at = step
            if step.channel is not None:
                self._transfer(step)
                continue
            for slot in step.reads.get(Kind.TURN, ()):
                self._take(slot)
            match step.action.op:
                case Op.F:
                    self._forward(step)
                case Op.B:
                    self._backward(step, weights=True)
                case Op.I:
                    self._backward(step, weights=False)
                case Op.W:
                    self._finish(step)
                case Op.R:
                    self._recompute(step)
                case Op.S:
                    self._sync(step)
                case Op.N:
                    self._norm(step)
                case Op.U:
                    self._update(step)
                case Op.G:
                    raise AssertionError("a schedule that gathers its parameters is not lowered yet")
            for slot in step.writes.get(Kind.TURN, ()):
                self.store[slot] = Bundle((torch.zeros(1, dtype=torch.uint8),), ())
            if step.drops and self.versioned:
                for value in step.drops:
                    self.units[value.stage].drop(value.version)
        for unit in self.units.values():
            unit.rebase()
        self.edges.transport.flush()
        self.at = None
        return self.tallies

    # ---- messages -------------------------------------------------------------------------------------------------

    def _transfer(self, step: Step) -> None:
        value, channel = step.value, step.channel
        assert value is not None and channel is not None
        match value.kind:
            case Kind.ACT | Kind.GRAD:
                rows = self._crossing_rows(value)
                if rows.start == rows.stop:
                    return
                shape = (value.stage, value.part, value.piece, self._signature(value.mb, rows))
                if step.sends:
                    self.edges.send(channel, self.store[step.slot], shape)
                    self.store[step.slot] = None
                else:
                    self.store[step.slot] = self.edges.receive(channel, shape)
            case Kind.PARTIAL | Kind.SUM:
                flats = tuple(self.units[value.stage].buffer(value.version).flats)
                if step.sends:
                    self._take(step.slot)
                    for flat in flats:
                        self.edges.transport.send(channel, flat.clone())
                    if step.releases:
                        self.units[value.stage].release(value.version)
                else:
                    into = flats if value.kind is Kind.SUM else tuple(torch.empty_like(flat) for flat in flats)
                    self.store[step.slot] = self.edges.receive_like(channel, into)
            case Kind.TURN:
                if step.sends:
                    self.edges.transport.send(channel, self.store[step.slot].tensors[0])
                else:
                    self.store[step.slot] = self.edges.receive_like(channel, (torch.empty(1, dtype=torch.uint8),))
            case kind:
                raise AssertionError(f"no {kind} crosses between workers")

    def _take(self, slot: int) -> Any:
        """What is in a slot, waited for if it is still on its way; the slot stays filled."""
        found = self.store[slot]
        if type(found) is Pending:
            found = self.store[slot] = found.wait()
        return found

    def _consume(self, slots: tuple[int, ...]) -> Bundle:
        """The pieces of a bundle put together, and their slots emptied; pieces without rows were never sent."""
        found = [self._take(slot) for slot in slots]
        for slot in slots:
            self.store[slot] = None
        pieces = [bundle for bundle in found if bundle is not None]
        if len(pieces) == 1:
            return pieces[0]
        tensors = tuple(torch.cat(parts) for parts in zip(*(piece.tensors for piece in pieces), strict=True))
        return Bundle(tensors, pieces[0].flags)

    def _hand_on(self, slots: tuple[int, ...], bundle: Bundle, own: Rows) -> None:
        """Put a bundle into its slots, cut into pieces where the next team is another."""
        if self.narrow:
            for slot in slots:
                self.store[slot] = bundle
            return
        for slot in slots:
            rows = self._crossing_rows(self.program.values[slot])
            if rows.start < rows.stop:
                cut = slice(rows.start - own.start, rows.stop - own.start)
                self.store[slot] = Bundle(tuple(t[cut].contiguous() for t in bundle.tensors), bundle.flags)

    # ---- rows -----------------------------------------------------------------------------------------------------

    def _batch(self, mb: int) -> tuple[Batch, int]:
        step, local = divmod(self.base + mb, self.microbatches)
        return self.feed(step), local

    def _rows(self, stage: int, replica: int, mb: int, part: int) -> Rows:
        """The rows of the whole batch that this worker has of a microbatch at a stage."""
        batch, local = self._batch(mb)
        rows = batch.rows(local)
        if part != NONE:
            rows = rows.cut(part, self.schedule.parts)
        if not self.narrow:
            team = self.schedule.placement.team(replica, stage, mb)
            rows = rows.cut(team.index(self.program.worker), len(team))
        return rows

    def _crossing_rows(self, value: Value) -> Rows:
        """The rows that cross the boundary behind `value.stage` in this value."""
        batch, local = self._batch(value.mb)
        rows = batch.rows(local)
        if value.part != NONE:
            rows = rows.cut(value.part, self.schedule.parts)
        if value.piece == NONE:
            return rows
        placement = self.schedule.placement
        before = placement.team(value.replica, value.stage, value.mb)
        behind = placement.team(value.replica, value.stage + 1, value.mb)
        i, j = divmod(value.piece, len(behind))
        mine, theirs = rows.cut(i, len(before)), rows.cut(j, len(behind))
        start = max(mine.start, theirs.start)
        return Rows(start, max(start, min(mine.stop, theirs.stop)))

    def _signature(self, mb: int, rows: Rows) -> object:
        return self._batch(mb)[0].signature(rows)

    # ---- compute --------------------------------------------------------------------------------------------------

    def _forward(self, step: Step) -> None:
        action, stage = step.action, self.stages[step.action.stage]
        saved = step.writes.get(Kind.SAVED) or step.writes.get(Kind.KEPT) or ()
        rows = self._rows(action.stage, action.replica, action.mb, action.part)
        if rows.start == rows.stop:
            return
        received = self._consume(step.reads[Kind.ACT]) if Kind.ACT in step.reads else None
        bundles = []
        for index in range(max(1, len(saved))):
            part = rows.cut(index, max(1, len(saved)))
            call = self._call(step, part, rows, received)
            bundle, record = stage.forward(call)
            if saved:
                self.store[saved[index]] = record
            if stage.is_last:
                self._count_loss(step, bundle.tensors[0], call)
            bundles.append(bundle)
        if Kind.ACT in step.writes:
            tensors = tuple(torch.cat(p) for p in zip(*(b.tensors for b in bundles), strict=True)) if len(bundles) > 1 else None
            self._hand_on(step.writes[Kind.ACT], Bundle(tensors, bundles[0].flags) if tensors else bundles[0], rows)

    def _call(self, step: Step, rows: Rows, whole: Rows, received: Bundle | None) -> Call:
        batch, local = self._batch(step.action.mb)
        named: Mapping[str, Tensor] = {}
        if received is None:
            inputs, named = batch.inputs(rows)
        else:
            cut = None if rows == whole else slice(rows.start - whole.start, rows.stop - whole.start)
            pairs = zip(received.tensors, received.flags, strict=True)
            inputs = tuple(leaf(t if cut is None else t[cut], flag) for t, flag in pairs)
        number = batch.copy * batch.microbatches + local
        key = Key((self.base + step.action.mb) // self.microbatches, number)
        return Call(inputs, named, batch.targets(rows), rows, key, self._weights(step))

    def _backward(self, step: Step, *, weights: bool) -> None:
        stage = self.stages[step.action.stage]
        inline = Kind.KEPT in step.reads
        (slot,) = step.reads[Kind.KEPT if inline else Kind.SAVED]
        record: Record | None = self.store[slot]
        self.store[slot] = None
        if record is None:
            return
        gradients = self._consume(step.reads[Kind.GRAD]).tensors if Kind.GRAD in step.reads else ()
        if inline:
            stage.recompute(record)
        self._aim(step)
        found = stage.backward(record, gradients, weights=weights)
        if Kind.GRAD in step.writes:
            self._hand_on(step.writes[Kind.GRAD], Bundle(found, (False,) * len(found)), record.call.rows)
        if weights:
            self._weigh(step, record)
        else:
            self.store[step.writes[Kind.REST][0]] = record

    def _finish(self, step: Step) -> None:
        (slot,) = step.reads[Kind.REST]
        record: Record | None = self.store[slot]
        self.store[slot] = None
        if record is not None:
            self.stages[step.action.stage].finish(record)
            self._weigh(step, record)

    def _recompute(self, step: Step) -> None:
        (kept,), (saved,) = step.reads[Kind.KEPT], step.writes[Kind.SAVED]
        record: Record | None = self.store[kept]
        self.store[kept] = None
        if record is not None:
            self.stages[step.action.stage].recompute(record)
        self.store[saved] = record

    # ---- parameters -----------------------------------------------------------------------------------------------

    def _weights(self, step: Step) -> Weights | None:
        """The parameters of the versions that this action reads, where there is more than one."""
        if not self.versioned:
            return None
        chosen: dict[int, Tensor] = {}
        for slot in step.reads[Kind.PARAM]:
            value = self.program.values[slot]
            unit = self.units[value.stage]
            chosen.update((id(p), t) for p, t in zip(unit.params, unit.leaves[value.version], strict=True))
        layers = self.stages[step.action.stage].layers
        return [{name: chosen.get(id(p), p) for name, p in layer.named_parameters(remove_duplicate=False)} for layer in layers]

    def _aim(self, step: Step) -> None:
        """Let the gradients of old versions go to the buffer of their round."""
        if self.versioned:
            for slot in step.reads[Kind.PARAM]:
                value = self.program.values[slot]
                self.units[value.stage].aim(value.version, step.round)

    def _weigh(self, step: Step, record: Record) -> None:
        """Count what was added to the gradients of this stage's units; a tie counts with its first stage alone."""
        call = record.call
        stage = step.action.stage
        weight = self.stages[stage].objective.weight(call.target, call.rows)
        for unit in self.schedule.units_of[stage]:
            if self.schedule.stages_of(unit)[0] == stage:
                self.units[unit].buffer(step.round).weight += weight

    def _sync(self, step: Step) -> None:
        unit = self.units[step.action.stage]
        if not self.schedule.ring:
            unit.sync(step.round)
            return
        buffer = unit.buffer(step.round)
        buffer.seal()
        for slot in step.reads.get(Kind.PARTIAL, ()):
            for mine, others in zip(buffer.flats, self._take(slot).tensors, strict=True):
                mine.add_(others)
            self.store[slot] = None

    def _norm(self, step: Step) -> None:
        """The one global reduction: the norm of all gradients, each unit counted once; not finite means: skip."""
        self.scales[step.round] = 1.0
        if self.rules.clip is None and not self.rules.skip_nonfinite:
            return
        square = 0.0
        for number, unit in self.units.items():
            first = self.mesh.holders(self.schedule, number)[0] == self.mesh.rank
            square += unit.square(step.round) * first
        total = torch.tensor([square], dtype=torch.float64)
        dist.all_reduce(total)
        norm = total.sqrt().item()
        tally = self._tally(step.round)
        tally.norm = norm
        if self.rules.skip_nonfinite and not norm < float("inf"):
            tally.skipped, self.scales[step.round] = True, None
        elif self.rules.clip is not None:
            self.scales[step.round] = min(1.0, self.rules.clip / (norm + 1e-6))

    def _update(self, step: Step) -> None:
        unit = self.units[step.action.stage]
        for slot in step.reads.get(Kind.SUM, ()):
            self._take(slot)
        scale = self.scales.get(step.round, 1.0)
        if not self.schedule.norm and self.rules.clip is not None:
            norm = unit.square(step.round) ** 0.5
            scale = min(1.0, self.rules.clip / (norm + 1e-6))
        unit.update(step.round, in_place=step.in_place, scale=scale)
        if step.releases:
            unit.release(step.round)

    # ---- what happened --------------------------------------------------------------------------------------------

    def _tally(self, round_: int) -> Tally:
        step = (self.base + round_ * self.schedule.microbatches) // self.microbatches
        return self.tallies.setdefault(step, Tally())

    def _count_loss(self, step: Step, loss: Tensor, call: Call) -> None:
        tally = self._tally(step.round)
        tally.loss = tally.loss + loss
        tally.weight += self.stages[step.action.stage].objective.weight(call.target, call.rows)

