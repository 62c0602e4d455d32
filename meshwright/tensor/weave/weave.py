"""One loop over the pieces of one or two halves of a microbatch, forward and backward.

    run = Weave([pieces], keep=False)
    outputs = run.forward([inputs])              pieces in order; a move starts after its piece and is awaited before its reader
    inputs' gradients = run.backward([grads])    pieces in reverse order, each with its own call of autograd

Backward computes the gradients of a piece's inputs first and starts their moves. These overlap with the piece's weight gradients,
whose scatters overlap with the next piece. With `rest`, weight gradients are deferred to `finish` (the W of a split backward).
With two halves, the collectives of one overlap with the compute of the other (Merak's sub-pipelining), and weights are gathered
once for both. Without `keep`, gathered inputs are dropped after forward and gathered again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshwright.costs.declared import Phase
from meshwright.tensor.weave.pieces import Border, Piece, PieceGraph
from meshwright.tensor.weave.split_product import Job, autocast_dtype
from meshwright.tensor.weave.whole_weights import WholeWeights, drop, refill
from meshwright.tensor.wires.wires import StartedCollective

_ANCHOR = torch.zeros((), requires_grad=True)
_HELD = Tensor | StartedCollective


class _Enter(Function):
    """The input of a piece. Its autograd graph begins here and does not keep the value; the gradient is put into a box."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, box: list[Tensor]) -> Tensor:
        """Returns the value."""
        ctx.box = box
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """Puts the gradient into the box."""
        ctx.box.append(g)
        return None, None, None


_enter: Callable[[Tensor, Tensor, list[Tensor]], Tensor] = _Enter.apply


@dataclass
class _Trail:
    """The record of a piece that has run, for its backward."""

    boxes: list[list[Tensor] | None]
    edges: list[Any]
    dropped: list[tuple[str, Tensor, Tensor]]
    """Values whose memory was freed: name, the tensor, and the source that it is gathered from again."""


@dataclass
class _Half:
    """The state of one half: values by name, gradients of values so far (`owed`), and the trails of its pieces."""

    pieces: PieceGraph
    values: dict[str, Any] = field(default_factory=dict)
    owed: dict[str, Any] = field(default_factory=dict)
    trails: dict[int, _Trail] = field(default_factory=dict)
    again: dict[str, StartedCollective] = field(default_factory=dict)
    learning: set[str] = field(default_factory=set)
    """Values that need a gradient."""
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """The dtypes that values had before they were cast for a move."""
    moving: dict[str, Tensor] = field(default_factory=dict)
    """The arguments of started moves."""
    at: int = 0

    def owe(self, name: str, gradient: Any) -> None:
        """Adds to the gradient of a value."""
        if name in self.owed:
            gradient = _there(self.owed[name]) + _there(gradient)
        self.owed[name] = gradient


def _there(value: Any) -> Any:
    return value.wait() if isinstance(value, StartedCollective) else value


def _learns(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _handed(value: Tensor, dropped: set[int]) -> Tensor:
    """Returns the detached output of a piece. It is a copy if it is a view of memory that will be freed."""
    found = value.detach()
    return found.clone() if found.untyped_storage().data_ptr() in dropped else found


Rest = list[tuple[list[Job], int, int]]
"""The deferred weight gradients of a split backward: jobs, half, piece."""

Begin = Callable[[int], object]
"""Called with the number of a layer before its first piece runs."""


class Weave:
    """A pass over the pieces of one or two halves. `turns` is the order of their pieces; by default halves alternate."""

    def __init__(self, halves: Sequence[PieceGraph], *, keep: bool, turns: Sequence[int] | None = None) -> None:
        self.halves = [_Half(pieces) for pieces in halves]
        self.wires, self.keep = halves[0].wires, keep
        self.weights = WholeWeights(halves, self.wires, keep=keep)
        self.dtype: torch.dtype | None = None
        counts = [len(pieces.pieces) for pieces in halves]
        self.turns = list(turns) if turns is not None else _alternating(counts)
        assert [self.turns.count(half) for half in range(len(halves))] == counts

    # forward

    def forward(self, given: Sequence[Mapping[str, Any]], begin: Begin | None = None) -> list[tuple[Any, ...]]:
        """Runs all pieces and returns the outputs of each half. Inputs are given by name."""
        self.wires.log.phase = Phase.FORWARD
        device = next((v.device.type for values in given for v in values.values() if isinstance(v, Tensor)), "cpu")
        self.dtype = self.weights.dtype = autocast_dtype(device)
        for half, values in zip(self.halves, given, strict=True):
            half.learning = {name for name, value in values.items() if isinstance(value, Tensor) and value.requires_grad}
            half.values = {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}
            self._cross(half, half.pieces.early)
        for turn in self.turns:
            self._piece(turn, begin)
        results = []
        for half in self.halves:
            results.append(tuple(_there(half.values[name]) for name in half.pieces.outputs))
            half.values = {name: half.values[name] for name in half.pieces.inputs if name in half.values}
        return results

    def learns(self) -> list[list[bool]]:
        """Returns for each half and output whether it needs a gradient."""
        return [[name in half.learning for name in half.pieces.outputs] for half in self.halves]

    def _cross(self, half: _Half, borders: Sequence[Border]) -> None:
        """Starts moves."""
        for border in borders:
            source = half.values[border.source]
            if self.dtype is not None and border.narrow and _learns(source):
                half.dtypes[border.name] = source.dtype
                source = source.to(self.dtype)
            half.values[border.name] = started = border.route.start(source, self.wires)
            if border.route.silent:  # it may be a view of its source
                half.values[border.name] = started.wait()
            half.moving[border.name] = source
            if border.learns and border.source in half.learning:
                half.learning.add(border.name)

    def _piece(self, number: int, begin: Begin | None) -> None:
        half = self.halves[number]
        piece, at = half.pieces.pieces[half.at], half.at
        half.at += 1
        learning = torch.is_grad_enabled()
        if begin is not None and at in half.pieces.begins:
            begin(half.pieces.begins[at])
        read, boxes = self._enter(half, piece, learning)
        dropped = self._to_drop(half, piece) if learning and not self.keep else set()
        outputs = piece.body(*read, *self.weights.get(number, at))
        del read
        edges = [torch.autograd.graph.get_gradient_edge(v) if _learns(v) and v.requires_grad else None for v in outputs]
        for name, value, edge in zip(piece.writes, outputs, edges, strict=True):
            half.values[name] = _handed(value, dropped) if isinstance(value, Tensor) else value
            if edge is not None:
                half.learning.add(name)
        del outputs
        self._cross(half, piece.borders)
        self.weights.forwarded(number, at)
        trail = _Trail(boxes, edges if learning else [], [])
        self._leave(half, at, trail if learning else None)
        if learning:
            half.trails[at] = trail

    def _enter(self, half: _Half, piece: Piece, learning: bool) -> tuple[list[Any], list[list[Tensor] | None]]:
        read: list[Any] = []
        boxes: list[list[Tensor] | None] = []
        for name in piece.reads:
            value = half.values[name] = _there(half.values[name])
            box: list[Tensor] | None = [] if learning and _learns(value) and name in half.learning else None
            boxes.append(box)
            read.append(value if box is None else _enter(_ANCHOR, value, box))
        return read, boxes

    def _to_drop(self, half: _Half, piece: Piece) -> set[int]:
        """Returns the storages of the gathered values that a piece reads. They are freed after their last reader."""
        borders = [half.pieces.borders[name] for name in piece.reads if name in half.pieces.borders and name in half.learning]
        return {half.values[each.name].untyped_storage().data_ptr() for each in borders if each.route.gathers}

    def _leave(self, half: _Half, at: int, trail: _Trail | None) -> None:
        """Drops values that no later piece reads. Gathered values can be gathered again."""
        gone = [(name, half.values.pop(name), half.pieces.borders.get(name)) for name in half.pieces.releases[at]]
        sources = {name: value for name, value, _ in gone}
        here = [v if isinstance(v, Tensor) else half.moving[n] for n, v in half.values.items() if isinstance(v, _HELD)]
        kept = {value.untyped_storage().data_ptr() for value in here}  # views share storage
        for name, value, border in gone:
            if trail is None or self.keep or border is None or not border.route.gathers or name not in half.learning:
                continue
            source = sources[border.source] if border.source in sources else half.values[border.source]
            place = value.untyped_storage().data_ptr()
            if place != source.untyped_storage().data_ptr() and place not in kept:
                drop(value)
                trail.dropped.append((name, value, source))

    # backward

    def backward(
        self, gradients: Sequence[Sequence[Tensor | None]], rest: Rest | None = None, reached: set[int] | None = None
    ) -> list[dict[str, Tensor]]:
        """Takes the gradients of the outputs of each half and returns those of its inputs, by name.

        Weight gradients are added to `rest` if it is given. The ids of parameters that get a gradient are added to `reached`.
        """
        self.wires.log.phase, self.weights.reached = Phase.BACKWARD, reached
        for half, given in zip(self.halves, gradients, strict=True):
            for name, gradient in zip(half.pieces.outputs, given, strict=True):
                if gradient is not None:
                    half.owe(name, gradient)
            for name in [name for name in half.pieces.outputs if name in half.owed]:
                border = half.pieces.borders.get(name)
                if border is not None and name not in half.pieces.first:  # no piece reads it, so none sends it back
                    half.owed[name] = border.route.start_back(half.owed[name], self.wires)
        for turn in reversed(self.turns):
            self._back(turn, rest)
        found = []
        for half in self.halves:
            for border in half.pieces.early:
                self._repay(half, border)
            found.append({name: _there(half.owed[name]) for name in half.pieces.inputs if name in half.owed})
        if rest is None:
            self.weights.settle()
        return found

    def _back(self, number: int, rest: Rest | None) -> None:
        half = self.halves[number]
        half.at -= 1
        at, piece, trail = half.at, half.pieces.pieces[half.at], half.trails.pop(half.at)
        self._gather_again(half, trail)
        for name, value, _ in trail.dropped:
            refill(value, half.again.pop(name).wait())
        if at - 1 in half.trails:
            self._gather_again(half, half.trails[at - 1])
        self.weights.get(number, at, back=True)
        for border in piece.borders:
            self._repay(half, border)
        jobs: list[Job] = []
        roots = [
            (e, _there(half.owed.pop(n)))
            for n, e in zip(piece.writes, trail.edges, strict=True)
            if n in half.owed and e is not None
        ]
        if roots:
            half.pieces.slot.rest = jobs
            torch.autograd.backward([edge for edge, _ in roots], [gradient for _, gradient in roots])
            half.pieces.slot.rest = None
        for name, box in zip(piece.reads, trail.boxes, strict=True):
            if box:
                half.owe(name, box.pop() if len(box) == 1 else torch.stack(box).sum(0))
            crossed = half.pieces.borders.get(name)
            if crossed is not None and half.pieces.first[name] == at and name in half.owed:
                half.owed[name] = crossed.route.start_back(_there(half.owed[name]), self.wires)
        self.weights.read_back(number, at)
        if rest is None:
            self.weights.work(jobs)
            self.weights.backwarded(number, at)
        else:
            rest.append((jobs, number, at))

    def _repay(self, half: _Half, border: Border) -> None:
        """Adds the gradient of a move's result to that of its argument."""
        if border.name in half.owed:
            gradient = half.owed.pop(border.name)
            if border.name in half.dtypes:
                gradient = _there(gradient).to(half.dtypes[border.name])
            half.owe(border.source, gradient)

    def _gather_again(self, half: _Half, trail: _Trail) -> None:
        for name, value, source in trail.dropped:
            if name not in half.again:
                half.again[name] = half.pieces.borders[name].route.start(source.to(value.dtype), self.wires)

    def finish(self, rest: Rest, reached: set[int] | None = None) -> None:
        """Computes the weight gradients that a backward has deferred."""
        self.wires.log.phase, self.weights.reached = Phase.BACKWARD, reached
        while rest:
            jobs, half, at = rest.pop(0)
            self.weights.work(jobs)
            self.weights.backwarded(half, at)
        self.weights.settle()


def _alternating(counts: Sequence[int]) -> list[int]:
    """Returns the order in which halves alternate, piece by piece."""
    return [half for k in range(max(counts)) for half in range(len(counts)) if k < counts[half]]
