"""The run of `numbers.py`, one process to compare it with, and the verdict."""

from __future__ import annotations

from meshwright import Action, Op, Schedule, Transfer
from tests.support.whole_numbers import (
    Buffer,
    Key,
    Lists,
    Rows,
    Shape,
    Worker,
    WrongError,
    data,
    entries_of,
    loss_grad,
    normed,
    stage_back,
    stage_out,
    stage_weight,
    start,
    updated,
)

Saved = tuple[Rows, Rows]
"""What a forward keeps: inputs and outputs."""


def verdict(schedule: Schedule) -> str:
    """Why a lowered schedule is wrong; empty if it ends and gives what one process gives."""
    try:
        run = Run(schedule)
        run.to_the_end()
        one = OneProcess(schedule, run.shape, run.lists)
        return run.compare(one)
    except WrongError as error:
        return str(error)
    except RecursionError:
        return "a version is made of itself"


class Run:
    """All workers of a lowered schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.shape = schedule, Shape(schedule)
        self.lists = Lists(schedule, self.shape)
        self.workers = [Worker(number) for number in range(self.shape.workers)]
        self.losses: dict[tuple[int, int], int] = {}
        for unit, held in self.shape.holders.items():
            for worker in held:
                self.workers[worker].params[unit, 0] = start(unit)

    def to_the_end(self) -> None:
        """Go down all lists; whoever needs a partner waits until the partner waits for it."""
        rows = self.schedule.lists
        moved = True
        while moved:
            moved = False
            for worker in self.workers:
                while worker.at < len(rows[worker.number]) and self._step(worker, rows[worker.number][worker.at]):
                    moved = True
        stuck = {w.number: str(rows[w.number][w.at]) for w in self.workers if w.at < len(rows[w.number])}
        if stuck:
            raise WrongError(f"stuck: {stuck}")

    def _step(self, worker: Worker, entry: object) -> bool:
        if isinstance(entry, Transfer):
            return self._message(worker, entry)
        if isinstance(entry, Action) and (entry.op is Op.N or (entry.op is Op.S and not self.schedule.ring)):
            return self._together(entry)
        for action in entries_of(entry):
            for key in self.lists.waits.get(action, ()):
                worker.take(key)
            self._act(worker, action)
            for key in self.lists.signals.get(action, ()):
                worker.store[key] = 0
        worker.at += 1
        return True

    def _next(self, worker: int) -> object:
        at, row = self.workers[worker].at, self.schedule.lists[worker]
        return row[at] if at < len(row) else None

    # -- messages

    def _message(self, worker: Worker, entry: Transfer) -> bool:
        other = self._next(entry.peer)
        if not isinstance(other, Transfer) or other.peer != worker.number or other.sends == entry.sends:
            return False
        if other.value.kind is not entry.value.kind:
            return False
        sender, receiver = (worker.number, entry.peer) if entry.sends else (entry.peer, worker.number)
        out, into = (entry, other) if entry.sends else (other, entry)
        load = self._load(self.workers[sender], out)
        self._land(self.workers[receiver], into, load)
        self.workers[sender].at += 1
        self.workers[receiver].at += 1
        return True

    def _key(self, entry: Transfer) -> Key:
        value = entry.value
        if value.kind.value == "turn":
            return ("turn", value.stage, value.mb, value.replica, value.part, value.piece)
        return (value.kind.value, value.stage, value.mb, value.replica, value.part, value.piece)

    def _load(self, worker: Worker, entry: Transfer) -> object:
        kind, key = entry.value.kind.value, (entry.value.stage, entry.value.version)
        if kind in ("act", "grad", "turn"):
            found = worker.take(self._key(entry))
            if isinstance(found, tuple):
                raise WrongError(f"worker {worker.number} hands on what it has received: {entry}")
            return found
        if kind == "param" and self.schedule.owners:
            return self._parameters(worker, entry.value.stage, entry.value.version, entry.value.part, str(entry))
        if kind not in ("partial", "sum") or not self.schedule.ring or worker.number not in self.shape.runners[key[0]]:
            raise WrongError(f"nothing carries {entry}")
        return worker.handed[key] if key in worker.handed else worker.buffers[key].copy()

    def _land(self, worker: Worker, entry: Transfer, load: object) -> None:
        value, kind = entry.value, entry.value.kind.value
        if kind in ("act", "grad", "turn"):
            worker.store[self._key(entry)] = ("received", load)
        elif kind == "param" and worker.number not in self.shape.holders[value.stage]:
            assert isinstance(load, int)
            worker.lent[value.stage, value.version, value.part] = load
        elif kind == "param" or worker.number not in (self.shape.holders if kind == "sum" else self.shape.runners)[value.stage]:
            raise WrongError(f"worker {worker.number} has no place for {entry}")
        elif kind == "partial":
            worker.store["partial", value.stage, value.version, value.piece] = load
        else:
            assert isinstance(load, Buffer)
            worker.buffers[value.stage, value.version] = load.copy()

    # -- what a group does

    def _together(self, entry: Action) -> bool:
        group = sorted(self.shape.holders[entry.stage]) if entry.op is Op.S else list(range(self.shape.workers))
        if any(self._next(member) != entry for member in group):
            return False
        members = [self.workers[member] for member in group]
        if entry.op is Op.S:
            total = Buffer()
            for member in members:
                mine = member.buffers[entry.stage, entry.version]
                total.add(mine.total, mine.count)
            for member in members:
                member.buffers[entry.stage, entry.version] = total.copy()
        else:
            units = sorted(self.shape.holders)
            first = {unit: self.workers[min(self.shape.holders[unit])] for unit in units}
            norm = normed([first[unit].buffers[unit, entry.version].total for unit in units])
            for member in members:
                member.norm = norm
        for member in members:
            member.at += 1
        return True

    # -- what a worker does

    def _weights(self, worker: Worker, action: Action) -> list[int]:
        found = []
        for unit in self.shape.units[action.stage]:
            version = 0
            if not self.schedule.flush:
                version = action.version
                if unit >= self.shape.stages:
                    version = self.lists.version[self.schedule.ties[unit - self.shape.stages][0], action.mb]
            found.append(self._parameters(worker, unit, version, int(action.op is not Op.F), str(action)))
        return found

    def _parameters(self, worker: Worker, unit: int, version: int, way: int, reader: str) -> int:
        """A version that a worker holds, or that it was lent for forwards (0) or backwards (1)."""
        if worker.number in self.shape.holders[unit]:
            found = worker.params.get((unit, version))
        else:
            found = worker.lent.get((unit, version, way))
        if found is None:
            raise WrongError(f"{reader} on worker {worker.number}: there is no version {version} of unit {unit}")
        return found

    def _act(self, worker: Worker, action: Action) -> None:
        if action.op is Op.F:
            self._forward(worker, action)
        elif action.op is Op.R:
            own = (action.stage, action.replica, action.mb, action.part)
            x = worker.take(("kept", *own))
            assert isinstance(x, dict)
            weights = self._weights(worker, action)
            worker.store["saved", *own] = (x, {row: stage_out(action.stage, weights, v) for row, v in x.items()})
        elif action.op in (Op.B, Op.I):
            self._backward(worker, action)
        elif action.op is Op.W:
            x, out, grad = worker.take(("rest", action.stage, action.replica, action.mb, action.part))  # type: ignore[misc]
            self._accumulate(worker, action, x, out, grad)
        elif action.op is Op.S:
            self._ring(worker, action)
        elif action.op is Op.U:
            self._update(worker, action)
        else:
            raise WrongError(f"nobody does {action}")

    def _collect(self, worker: Worker, kind: str, action: Action, cut: int, rows: frozenset[int]) -> Rows:
        """The rows that an action reads at a cut between stages, from all pieces that bring some."""
        found: Rows = {}
        here = 2 if kind == "act" else 1
        for piece in self.shape.pieces(action.replica, cut, action.mb, action.part):
            key = (kind, cut, action.mb, action.replica, action.part, piece[0])
            if piece[here] == worker.number and (piece[3] or key in worker.store):
                load = worker.take(key)
                load = load[1] if isinstance(load, tuple) else load
                assert isinstance(load, dict)
                found |= load
        if set(found) != rows:
            raise WrongError(f"{action} on worker {worker.number} has rows {sorted(found)} of {sorted(rows)}")
        return found

    def _hand_out(self, worker: Worker, kind: str, action: Action, cut: int, found: Rows) -> None:
        here = 1 if kind == "act" else 2
        for piece in self.shape.pieces(action.replica, cut, action.mb, action.part):
            if piece[here] == worker.number:
                key = (kind, cut, action.mb, action.replica, action.part, piece[0])
                worker.store[key] = {row: found[row] for row in piece[3]}

    def _recompute(self, stage: int) -> tuple[bool, bool]:
        how = self.schedule.recompute[stage] if self.schedule.recompute else None
        return (how is not None and how.share > 0, how is not None and how.early)

    def _forward(self, worker: Worker, action: Action) -> None:
        stage, halves = action.stage, self.shape.halves(action.part)
        shares = {half: self.shape.own(action, worker.number, half) for half in halves}
        rows = frozenset().union(*shares.values())
        x = {r: data(action.mb, r) for r in rows} if stage == 0 else self._collect(worker, "act", action, stage - 1, rows)
        weights = self._weights(worker, action)
        out = {row: stage_out(stage, weights, value) for row, value in x.items()}
        if stage == self.shape.stages - 1:
            for row, value in out.items():
                self.losses[action.mb, row] = value
        else:
            self._hand_out(worker, "act", action, stage, out)
        for half, mine in shares.items() if self.lists.trains else ():
            own = (stage, action.replica, action.mb, half)
            inputs = {row: x[row] for row in mine}
            if self._recompute(stage)[0]:
                worker.store["kept", *own] = inputs
            else:
                worker.store["saved", *own] = (inputs, {row: out[row] for row in mine})

    def _backward(self, worker: Worker, action: Action) -> None:
        stage, own = action.stage, (action.stage, action.replica, action.mb, action.part)
        weights = self._weights(worker, action)
        drops, early = self._recompute(stage)
        if drops and not early:
            x = worker.take(("kept", *own))
            assert isinstance(x, dict)
            out = {row: stage_out(stage, weights, value) for row, value in x.items()}
        else:
            x, out = worker.take(("saved", *own))  # type: ignore[misc]
        if stage == self.shape.stages - 1:
            grad = {row: loss_grad(action.mb, value) for row, value in out.items()}
        else:
            grad = self._collect(worker, "grad", action, stage, self.shape.own(action, worker.number, action.part))
        if stage:
            found = {row: stage_back(stage, weights, x[row], out[row], grad[row]) for row in x}
            self._hand_out(worker, "grad", action, stage - 1, found)
        if action.op is Op.B:
            self._accumulate(worker, action, x, out, grad)
        else:
            worker.store["rest", *own] = (x, out, grad)

    def _accumulate(self, worker: Worker, action: Action, x: Rows, out: Rows, grad: Rows) -> None:
        stage, weights = action.stage, self._weights(worker, action)
        for unit in self.shape.units[stage]:
            total = sum(stage_weight(stage, unit, weights, x[row], out[row], grad[row]) for row in x)
            worker.buffers[unit, action.mb // self.schedule.microbatches].add(total, len(x))

    def _ring(self, worker: Worker, action: Action) -> None:
        ring = self.lists.ring(action.stage, action.version)
        if worker.number in ring[1:]:
            before = ring[ring.index(worker.number) - 1]
            partial = worker.take(("partial", action.stage, action.version, before))
            assert isinstance(partial, Buffer)
            worker.buffers[action.stage, action.version].add(partial.total, partial.count)

    def _update(self, worker: Worker, action: Action) -> None:
        unit, k = action.stage, action.version
        old, new = ((unit, 0), (unit, 0)) if self.schedule.flush else ((unit, k), (unit, k + 1))
        if old not in worker.params:
            raise WrongError(f"{action} on worker {worker.number}: there is no version {k}")
        norm = worker.norm if (worker.number, k) in self.lists.normed else 0
        worker.params[new] = updated(worker.params[old], worker.buffers[unit, k], norm)
        worker.handed[unit, k] = worker.buffers.pop((unit, k))

    def compare(self, one: OneProcess) -> str:
        """The first thing that differs from one process."""
        for mb in range(self.lists.rounds * self.schedule.microbatches):
            for row in range(self.shape.rows):
                if self.losses.get((mb, row)) != one.forward(self.shape.stages - 1, mb, row):
                    return f"the loss of row {row} of microbatch {mb} differs"
        if not self.lists.trains:
            return ""
        for unit, held in self.shape.holders.items():
            for worker in held:
                version = 0 if self.schedule.flush else self.lists.rounds
                if self.workers[worker].params.get((unit, version)) != one.param(unit, self.lists.rounds):
                    return f"unit {unit} differs on worker {worker}"
        return ""


class OneProcess:
    """The same numbers in one process: every microbatch once, on the versions that the schedule's rule names."""

    def __init__(self, schedule: Schedule, shape: Shape, lists: Lists) -> None:
        self.schedule, self.shape, self.lists = schedule, shape, lists
        self._out: dict[tuple[int, int, int], int] = {}
        self._back: dict[tuple[int, int, int], int] = {}
        self._params: dict[tuple[int, int], int] = {}

    def version(self, unit: int, stage: int, mb: int) -> int:
        if self.schedule.flush:
            return mb // self.schedule.microbatches
        first = stage if unit < self.shape.stages else self.schedule.ties[unit - self.shape.stages][0]
        if (first, mb) not in self.lists.version:
            raise WrongError(f"stage {first} of microbatch {mb} never runs")
        return self.lists.version[first, mb]

    def weights(self, stage: int, mb: int) -> list[int]:
        if not self.lists.trains:
            return [start(unit) for unit in self.shape.units[stage]]
        return [self.param(unit, self.version(unit, stage, mb)) for unit in self.shape.units[stage]]

    def forward(self, stage: int, mb: int, row: int) -> int:
        key = (stage, mb, row)
        if key not in self._out:
            value = data(mb, row) if stage == 0 else self.forward(stage - 1, mb, row)
            self._out[key] = stage_out(stage, self.weights(stage, mb), value)
        return self._out[key]

    def backward(self, stage: int, mb: int, row: int) -> int:
        """The gradient behind a stage."""
        key = (stage, mb, row)
        if key not in self._back:
            if stage == self.shape.stages - 1:
                self._back[key] = loss_grad(mb, self.forward(stage, mb, row))
            else:
                later = stage + 1
                inputs, out = self.forward(stage, mb, row), self.forward(later, mb, row)
                self._back[key] = stage_back(later, self.weights(later, mb), inputs, out, self.backward(later, mb, row))
        return self._back[key]

    def gradient(self, unit: int, round_: int) -> Buffer:
        found, count = Buffer(), self.schedule.microbatches
        for mb in range(round_ * count, (round_ + 1) * count):
            for stage in (s for s in range(self.shape.stages) if unit in self.shape.units[s]):
                for row in range(self.shape.rows):
                    inputs = data(mb, row) if stage == 0 else self.forward(stage - 1, mb, row)
                    words = (self.weights(stage, mb), inputs, self.forward(stage, mb, row), self.backward(stage, mb, row))
                    found.add(stage_weight(stage, unit, *words), 1)
        return found

    def param(self, unit: int, version: int) -> int:
        if version == 0:
            return start(unit)
        if version < 0:
            raise WrongError(f"version {version} of unit {unit} is read")
        if (unit, version) not in self._params:
            round_ = version - 1
            has_norm = bool(self.lists.normed)
            norm = normed([self.gradient(u, round_).total for u in sorted(self.shape.holders)]) if has_norm else 0
            self._params[unit, version] = updated(self.param(unit, round_), self.gradient(unit, round_), norm)
        return self._params[unit, version]
