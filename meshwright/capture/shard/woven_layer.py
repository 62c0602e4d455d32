"""Sharded layers that run in pieces: called like any captured layer, one node of autograd, collectives started and awaited.

    layers = woven_layers(settled, states, wires)          one run per layer, save="shards" | "gathered" as the scheme says
    stage = halved_layer(whole, halves, states, wires)     overlap=True: two halves of a microbatch in turn

A halved layer takes and gives values of the whole microbatch: on a rank, the rows of the first half, then those of the second.
Both ends of an edge between stages see it so, and batch columns come whole. A loss that is a mean is put together from the halves
by what they count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshwright.capture.cut.stage_modules import Captured, States
from meshwright.capture.shard.emit import shard_layers
from meshwright.capture.shard.settle import LocalProgram, Settled
from meshwright.capture.shard.steps import StepKind
from meshwright.costs.scheme import Save
from meshwright.tensor.global_dropout import GlobalDropout, RowWindow
from meshwright.tensor.pieces import PieceGraph, cut
from meshwright.tensor.weave import Rest, Weave
from meshwright.tensor.wires import Wires

_ANCHOR = torch.zeros((), requires_grad=True)
Weights = Callable[[dict[str, Tensor]], float]
"""What the loss of some rows counts."""


@dataclass
class SplitSlot:
    """Where a backward pass leaves its weight gradients, if there is a list: each run with what it still owes."""

    rests: list[tuple[Weave, Rest]] | None = None

    def finish(self) -> None:
        """The W of a split backward."""
        rests, self.rests = self.rests or [], None
        for weave, rest in rests:
            weave.finish(rest)


@dataclass(frozen=True, slots=True)
class _Given:
    """What every half takes by name, and the names of what came from other layers."""

    values: list[dict[str, Any]]
    names: list[list[str]]


class _Run(Function):
    """A pass over pieces as one node."""

    @staticmethod
    def forward(ctx: Any, weave: Weave, given: _Given, slot: SplitSlot, *values: Tensor) -> Any:
        """The outputs of all halves, one after another."""
        with torch.enable_grad():
            results = weave.forward(given.values)
        ctx.call = weave, given.names, slot, [len(each) for each in results]
        ctx.set_materialize_grads(False)
        found = [out.view_as(out) for each in results for out in each]
        ctx.mark_non_differentiable(*(out for out in found if not out.is_floating_point()))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """The gradients of the given values."""
        weave, names, slot, counts = ctx.call
        parts, at = [], 0
        for count in counts:
            parts.append(gradients[at : at + count])
            at += count
        rest: Rest | None = None if slot.rests is None else []
        found = weave.backward(parts, rest)
        if slot.rests is not None and rest is not None:
            slot.rests.append((weave, rest))
        values = [half.get(name) for half, own in zip(found, names, strict=True) for name in own]
        return None, None, None, *values, None


_run: Callable[..., tuple[Tensor, ...]] = _Run.apply


@dataclass
class _Part:
    """One half, or all: its layer, pieces and rows."""

    layer: Captured
    pieces: PieceGraph
    window: RowWindow
    local_rows: tuple[int, ...] = field(default=())
    """For every given value, how many of its local rows are this half's."""

    def given(self, values: Sequence[Tensor], columns: dict[str, Tensor], again: dict[int, Any]) -> dict[str, Any]:
        """What the graph takes, by name."""
        layer = self.layer
        free: list[Any] = []
        if layer.prelude is not None:
            if (key := id(layer.prelude)) not in again:
                again[key] = layer.prelude(columns)
            free = [again[key][name] for name in layer.free]
        return dict(zip(self.pieces.inputs, (*values, *(columns[name] for name in layer.direct), *free), strict=True))


class WovenLayer(Captured):
    """A sharded layer in pieces, of a whole microbatch or of its two halves."""

    def __init__(self, whole: Captured, parts: list[_Part], *, keep: bool, weigh: Weights | None = None) -> None:
        super().__init__(whole.body, whole.direct, whole.original, inplace=False)
        if whole.prelude is not None:
            self.after(whole.prelude, whole.free, {})
        self.parts, self.keep, self.weigh = parts, keep, weigh
        self.slot = SplitSlot()
        for number, part in enumerate(parts):
            for k, piece in enumerate(part.pieces.pieces):
                self.add_module(f"piece_{number}_{k}", piece.body)  # so that train() and eval() reach them

    def forward(self, *values: Tensor, made_again: dict[int, Any] | None = None, **columns: Tensor) -> tuple[Tensor, ...]:
        """Run the pieces."""
        again = {} if made_again is None else made_again
        own = [columns] if len(self.parts) == 1 else [self._rows(columns, part.window) for part in self.parts]
        cuts = [list(values)] if len(self.parts) == 1 else self._split(values)
        given = [p.given(v, c, again) for p, v, c in zip(self.parts, cuts, own, strict=True)]
        names = [list(part.pieces.inputs[: len(values)]) for part in self.parts]
        weave = Weave([part.pieces for part in self.parts], keep=self.keep)
        with self._streams():
            if torch.is_grad_enabled():
                flat = _run(weave, _Given(given, names), self.slot, *(value for half in cuts for value in half), _ANCHOR)
            else:
                flat = tuple(out for half in weave.forward(given) for out in half)
        count = len(flat) // len(self.parts)
        halves = [flat[k * count : (k + 1) * count] for k in range(len(self.parts))]
        return halves[0] if len(halves) == 1 else self._joined(halves, own)

    def _rows(self, columns: dict[str, Tensor], window: RowWindow) -> dict[str, Tensor]:
        return {name: t[window.start : window.start + window.rows] for name, t in columns.items()}

    def _split(self, values: Sequence[Tensor]) -> list[list[Tensor]]:
        parts: list[list[Tensor]] = [[] for _ in self.parts]
        for k, value in enumerate(values):
            pieces = value.split([part.local_rows[k] for part in self.parts])
            for part, piece in zip(parts, pieces, strict=True):
                part.append(piece)
        return parts

    def _joined(self, halves: list[tuple[Tensor, ...]], columns: list[dict[str, Tensor]]) -> tuple[Tensor, ...]:
        found = []
        for outs in zip(*halves, strict=True):
            if outs[0].dim():
                found.append(torch.cat(outs))
                continue
            rows = [float(part.window.rows) for part in self.parts]
            counts = rows if self.weigh is None else [self.weigh(own) for own in columns]
            total = sum(counts)
            found.append(torch.stack([out * (count / total) for out, count in zip(outs, counts, strict=True)]).sum())
        return tuple(found)

    def _streams(self) -> _Streams:
        return _Streams(self.parts)


class _Streams:
    """While halves run: each draws from its own copy of torch's stream, for all rows; the stream then goes on behind them."""

    def __init__(self, parts: list[_Part]) -> None:
        self.drops = [[m for m in _modules(part) if isinstance(m, GlobalDropout)] for part in parts]
        self.windows = [part.window for part in parts]
        self.on = len(parts) > 1 and any(self.drops)

    def __enter__(self) -> None:
        if self.on:
            for drops, window in zip(self.drops, self.windows, strict=True):
                stream = torch.Generator()
                stream.set_state(torch.get_rng_state())
                for drop in drops:
                    drop.generator, drop.window = stream, window

    def __exit__(self, *error: object) -> None:
        if self.on:
            stream = next(drop.generator for drops in self.drops for drop in drops)
            assert stream is not None
            torch.set_rng_state(stream.get_state())


def _modules(part: _Part) -> list[torch.nn.Module]:
    return [module for piece in part.pieces.pieces for module in piece.body.modules()]


def woven_layers(settled: Settled, states: States, wires: Wires, device: torch.device | None = None) -> list[WovenLayer]:
    """The layers of a settled model on one rank, each in pieces."""
    keep, rows = settled.scheme.save is Save.GATHERED, settled.sizes.rows
    layers = shard_layers(settled, states, wires, device)
    whole = RowWindow(0, rows, rows)
    return [WovenLayer(layer, [_Part(layer, cut(layer.body, wires), whole)], keep=keep) for layer in layers]


def halved_layer(
    whole: Settled, halves: Sequence[Settled], states: States, wires: Wires, *, weigh: Weights | None = None, index: int = 0
) -> WovenLayer:
    """A layer that runs as two halves of its rows, each settled for its own number of rows."""
    layer = shard_layers(whole, states, wires)[index]
    parts, start = [], 0
    for half in halves:
        own = shard_layers(_zero_where_nothing_counts(half), states, wires)[index]
        window = RowWindow(start, half.sizes.rows, whole.sizes.rows)
        start += half.sizes.rows
        names = half.programs[index].given
        rows = tuple(_local_rows(half, name) for name in names)
        parts.append(_Part(own, cut(own.body, wires), window, rows))
    return WovenLayer(layer, parts, keep=whole.scheme.save is Save.GATHERED, weigh=weigh)


def _local_rows(half: Settled, name: str) -> int:
    size = 1
    for factor in half.layouts[name][0]:
        size *= factor.size // half.grid.size(factor.axes)
    return size


def _zero_where_nothing_counts(half: Settled) -> Settled:
    """Of a half without a label that counts, the loss is 0 and not 0 / 0."""
    programs = []
    for program in half.programs:
        means = [step.kind is StepKind.LOCAL and step.target == "loss_of" for step in program.steps]
        steps = tuple(replace(s, target="loss_or_zero") if mean else s for s, mean in zip(program.steps, means, strict=True))
        programs.append(LocalProgram(steps, program.given, program.results, program.layouts))
    return replace(half, programs=tuple(programs))
