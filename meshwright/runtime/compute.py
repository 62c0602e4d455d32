"""Real hands: stages that compute on rows, and parameters that sync and update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.ir.action import NONE, Action, Kind, Value
from meshwright.ir.placement import Rows
from meshwright.runtime.batch import Batch
from meshwright.runtime.executor import Store
from meshwright.runtime.parameters import Parameters
from meshwright.runtime.program import Program, Step
from meshwright.runtime.stage import Bundle, Call, Key, Record, Stage, leaf


@dataclass
class Tally:
    """What a rank saw of one step: the sum of losses and its weight, where last stages are."""

    losses: list[Tensor] = field(default_factory=list)
    weight: float = 0.0

    @property
    def loss(self) -> Tensor | float:
        """The sum of all losses."""
        return torch.stack([loss.double() for loss in self.losses]).sum() if self.losses else 0.0


class Compute:
    """The hands of a worker that trains. `microbatches` is per step of data; the rounds of a schedule may be shorter."""

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        parameters: Parameters,
        batches: Mapping[int, Batch],
        microbatches: int,
    ) -> None:
        self.program, self.stages, self.parameters, self.batches = program, stages, parameters, batches
        self.schedule, self.placement = program.schedule, program.schedule.placement
        self.microbatches = microbatches
        self.narrow = all(len(team) == 1 for copy in self.placement.teams for teams in copy for team in teams)
        self.store = Store(len(program.values))
        self.tallies: dict[int, Tally] = {}
        self.first_step = self.base = 0
        self._forms: dict[object, dict[int, int]] = {}
        self._shapes: dict[object, int] = {}
        self._token = Bundle((torch.zeros(1, dtype=torch.uint8, device=parameters.device),), (False,))

    def begin(self, first_step: int) -> None:
        """A walk starts at a step of the data."""
        self.first_step, self.base = first_step, first_step * self.microbatches
        self.tallies = {}
        self.parameters.begin(first_step)

    def end(self) -> None:
        """It is over."""
        self.parameters.end()

    # -- what stages do

    def forward(self, step: Step) -> None:
        """Run a stage on its rows; where backwards come in halves, each half has a graph of its own."""
        action, stage = step.action, self.stages[step.action.stage]
        number, local = divmod(self.base + action.mb, self.microbatches)
        batch = self.batches[number]
        rows = self._own(action, batch.rows(local))
        if rows.start == rows.stop:
            return
        saved = step.writes.get(Kind.SAVED) or step.writes.get(Kind.KEPT) or ()
        received = self._gather(step.reads[Kind.ACT]) if Kind.ACT in step.reads else None
        key = Key(number, batch.copy * batch.microbatches + local)
        bundles: list[Bundle] = []
        for index, part in enumerate([rows] if len(saved) < 2 else [rows.cut(i, len(saved)) for i in range(len(saved))]):
            if part.start == part.stop:  # half of a single row: its gradient will not be sent either
                continue
            call = self._call(step, stage, batch, key, part, rows, received)
            bundle, record = stage.forward(call)
            if saved:
                self.store.slots[saved[index]] = record
            if stage.is_last:
                self._tally(number, bundle.tensors[0], call.counts)
            elif part is not rows:
                self._check_rows(bundle, part)
            bundles.append(bundle)
        if Kind.ACT in step.writes:
            self._scatter(step.writes[Kind.ACT], _joined(bundles), rows)

    def _tally(self, number: int, loss: Tensor, weight: float) -> None:
        tally = self.tallies.get(number)
        if tally is None:
            tally = self.tallies[number] = Tally()
        tally.losses.append(loss)
        tally.weight += weight

    def backward(self, step: Step, *, weights: bool) -> None:
        """The gradients of a stage's inputs, and of its weights unless they come later."""
        stage = self.stages[step.action.stage]
        inline = Kind.KEPT in step.reads
        record: Record | None = self.store.pop(step.reads[Kind.KEPT if inline else Kind.SAVED][0])
        if record is None:
            self.parameters.aim(step)  # without rows too this may be the last reader of a version
            return
        gradients = self._gather(step.reads[Kind.GRAD]).tensors if Kind.GRAD in step.reads else ()
        if inline:
            stage.recompute(record)
        self.parameters.aim(step)
        found = stage.backward(record, gradients, weights=weights)
        if Kind.GRAD in step.writes:
            self._scatter(step.writes[Kind.GRAD], Bundle(found, (False,) * len(found)), record.call.rows)
        if weights:
            self.parameters.count(step, record.call.counts)
        else:
            self.store.slots[step.writes[Kind.REST][0]] = record

    def finish(self, step: Step) -> None:
        """The gradients of the weights that were put off."""
        record: Record | None = self.store.pop(step.reads[Kind.REST][0])
        if record is not None:
            self.stages[step.action.stage].finish(record)
            self.parameters.count(step, record.call.counts)

    def recompute(self, step: Step) -> None:
        """Bring back what a forward did not keep."""
        record: Record | None = self.store.pop(step.reads[Kind.KEPT][0])
        if record is not None:
            self.stages[step.action.stage].recompute(record)
        self.store.slots[step.writes[Kind.SAVED][0]] = record

    # -- what parameters do

    def sync(self, step: Step) -> None:
        """Add up a unit's gradients, by a collective or along a ring."""
        partial = step.reads.get(Kind.PARTIAL)
        self.parameters.sync(step, self.store.pop(partial[0]).tensors if partial else ())

    def norm(self, step: Step) -> None:
        """The global reduction of a step."""
        self.parameters.norm(step)

    def update(self, step: Step) -> None:
        """Turn a version of a unit into the next."""
        for slot in step.reads.get(Kind.SUM, ()):
            self.store.take(slot)
        self.parameters.update(step)

    # -- messages

    def turn(self, step: Step) -> Bundle:
        """A byte that says: go on."""
        return self._token

    def outgoing(self, step: Step) -> Bundle | None:
        """A bundle from its slot, or the running sum of a unit as it is now."""
        value = step.value
        assert value is not None
        if value.kind is Kind.PARTIAL or value.kind is Kind.SUM:
            self.store.take(step.slot)
            return self.parameters.handed_on(value, last=step.releases)
        found: Bundle | None = self.store.pop(step.slot)
        return found

    def incoming(self, step: Step) -> Bundle | None:
        """Room for a sum; other messages say what they are."""
        value = step.value
        assert value is not None
        if value.kind is Kind.TURN:
            return Bundle((torch.empty_like(self._token.tensors[0]),), (False,))
        return self.parameters.room(value) if value.kind in (Kind.PARTIAL, Kind.SUM) else None

    def shape(self, step: Step) -> object:
        """A number for boundary, piece and shape of the batch; None where no row crosses."""
        value = step.value
        assert value is not None
        if value.kind is not Kind.ACT and value.kind is not Kind.GRAD:
            return value.kind
        batch = self.batches[(self.base + value.mb) // self.microbatches]
        known = batch.shapes
        if known is None:
            known = batch.shapes = self._forms.setdefault(batch.form, {})
        found = known.get(step.slot)
        if found is None:
            found = known[step.slot] = self._shape(value)
        return found or None

    def _shape(self, value: Value) -> int:
        """0 where no row crosses; otherwise equal numbers are equal shapes on a channel."""
        batch, rows = self._crossing(value)
        if rows.start == rows.stop:
            return 0
        what = (value.stage, value.part, value.piece, rows.stop - rows.start, batch.form[1:])
        return self._shapes.setdefault(what, len(self._shapes) + 1)

    # -- rows

    def _own(self, action: Action, rows: Rows) -> Rows:
        """What this worker has of the rows of an action's microbatch."""
        if action.part != NONE:
            rows = rows.cut(action.part, self.schedule.parts)
        if self.narrow:
            return rows
        team = self.placement.team(action.replica, action.stage, action.mb)
        return rows.cut(team.index(self.program.worker), len(team))

    def _crossing(self, value: Value) -> tuple[Batch, Rows]:
        """The rows that cross the boundary behind `value.stage` in this value."""
        number, local = divmod(self.base + value.mb, self.microbatches)
        batch = self.batches[number]
        rows = batch.rows(local)
        if value.part != NONE:
            rows = rows.cut(value.part, self.schedule.parts)
        if value.piece == NONE:
            return batch, rows
        before = self.placement.team(value.replica, value.stage, value.mb)
        behind = self.placement.team(value.replica, value.stage + 1, value.mb)
        return batch, rows.piece(value.piece, len(before), len(behind))

    def _call(self, step: Step, stage: Stage, batch: Batch, key: Key, rows: Rows, whole: Rows, received: Bundle | None) -> Call:
        named: Mapping[str, Tensor] = {}
        if received is None:
            inputs, named = batch.inputs(rows)
        else:
            tensors = received.tensors
            if rows is not whole:
                self._check_rows(received, whole)
                tensors = tuple(t[rows.start - whole.start : rows.stop - whole.start] for t in tensors)
            inputs = tuple([leaf(t, flag) for t, flag in zip(tensors, received.flags, strict=True)])
        target = batch.targets(rows) if stage.is_last else None
        weight = batch.weight(rows, stage.objective)
        columns = batch.named(stage.columns, rows) if stage.columns else {}
        weights = self.parameters.versions(step) if self.parameters.versioned else None
        return Call(inputs, named, target, rows, key, weight.items, weight.counts, weights, columns)

    def _check_rows(self, bundle: Bundle, rows: Rows) -> None:
        """Only what has a row per row of the batch can be cut by rows."""
        for tensor in bundle.tensors:
            if not tensor.dim() or tensor.shape[0] != rows.stop - rows.start:
                raise MeshwrightError(
                    f"a tensor of shape {tuple(tensor.shape)} crosses stages and is to be cut by rows, "
                    f"but its first dimension is not the {rows.stop - rows.start} rows of the microbatch",
                    fix="rows first in everything that crosses, or a plan without width and halves",
                )

    def _gather(self, slots: tuple[int, ...]) -> Bundle:
        """The pieces of a bundle put together; pieces without rows were never sent."""
        pieces: list[Bundle] = []
        for slot in slots:
            if (bundle := self.store.pop(slot)) is not None:
                pieces.append(bundle)
        return _joined(pieces)

    def _scatter(self, slots: tuple[int, ...], bundle: Bundle, own: Rows) -> None:
        """Put a bundle into its slots, cut into pieces where the next team is another."""
        if self.narrow:
            for slot in slots:
                self.store.slots[slot] = bundle
            return
        self._check_rows(bundle, own)
        for slot in slots:
            _, rows = self._crossing(self.program.values[slot])
            if rows.start < rows.stop:
                start, stop = rows.start - own.start, rows.stop - own.start
                self.store.slots[slot] = Bundle(tuple(t[start:stop].contiguous() for t in bundle.tensors), bundle.flags)


def _joined(pieces: list[Bundle]) -> Bundle:
    """Rows of several bundles, one after another."""
    if len(pieces) == 1:
        return pieces[0]
    return Bundle(tuple(torch.cat(t) for t in zip(*(piece.tensors for piece in pieces), strict=True)), pieces[0].flags)
