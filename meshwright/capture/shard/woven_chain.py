"""Runs consecutive layers in pieces as one: one autograd node, one loop over all pieces of one or two halves.

    chain = WovenLayer.chained(layers)
    outputs = chain(values, columns, seeds=seeds, draw=generator.manual_seed)

No collective has to end at the border of a layer: the first weight of the next layer is gathered early, the last weight
gradient is scattered late, and with two halves the last collective of one overlaps with the compute of the other.

With halves a chain still takes and returns values of the whole microbatch: the rows of the first half, then those of the second.
Both ends of a message between stages use this order. Batch columns have all rows.

A backward reads the slot of its first layer. If the slot has a list `rest` (the W of a split backward), weight gradients are
added to it as one job. The ids of parameters that get a gradient without autograd are added to `reached`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshwright.costs.declared import Phase
from meshwright.tensor.weave.joined_pieces import joined, name_in_joined
from meshwright.tensor.weave.weave import Begin, Rest, Weave

if TYPE_CHECKING:
    from meshwright.capture.shard.woven_layer import WovenLayer

_ANCHOR = torch.zeros((), requires_grad=True)
LateJob = tuple[Callable[[], Sequence[Tensor | None]], Sequence[Tensor | None]]


@dataclass
class BackwardSlot:
    """Requests to a backward: to defer its weight gradients (`rest`), and to record the parameters that it reaches."""

    rest: list[LateJob] | None = None
    reached: set[int] | None = None


@dataclass(frozen=True, slots=True)
class _Given:
    """The inputs of every half by name, and the names of those that come from other layers."""

    values: list[dict[str, Any]]
    names: list[list[str]]


class _Run(Function):
    """A pass over pieces as one autograd function."""

    @staticmethod
    def forward(ctx: Any, weave: Weave, given: _Given, call: _Call, *values: Tensor) -> Any:
        """Returns the outputs of all halves in order."""
        with torch.enable_grad():
            results = weave.forward(given.values, call.begin)
        ctx.call = weave, given.names, call, [len(each) for each in results]
        ctx.set_materialize_grads(False)
        found = [out.view_as(out) for each in results for out in each]
        flags = [flag for each in weave.learns() for flag in each]
        ctx.mark_non_differentiable(*(out for out, learns in zip(found, flags, strict=True) if not learns))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Returns the gradients of the inputs."""
        weave, names, call, counts = ctx.call
        parts, at = [], 0
        for count in counts:
            parts.append(gradients[at : at + count])
            at += count
        slot: BackwardSlot = call.slot
        rest: Rest | None = None if slot.rest is None else []
        weave.wires.log.declare({Phase.BACKWARD: call.words[Phase.BACKWARD]})
        found = weave.backward(parts, rest, slot.reached)
        if slot.rest is not None and rest is not None:
            slot.rest.append((_late(weave, rest, slot), ()))
        values = [half.get(name) for half, own in zip(found, names, strict=True) for name in own]
        return None, None, None, *values, None


def _late(weave: Weave, rest: Rest, slot: BackwardSlot) -> Callable[[], Sequence[Tensor | None]]:
    def finish() -> Sequence[Tensor | None]:
        weave.finish(rest, slot.reached)
        return ()

    return finish


_run: Callable[..., tuple[Tensor, ...]] = _Run.apply


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of a pass besides its values."""

    slot: BackwardSlot
    words: Mapping[Phase, Fraction]
    begin: Begin | None


class WovenChain:
    """Layers that run as one."""

    def __init__(self, layers: Sequence[WovenLayer]) -> None:
        self.layers, first = list(layers), layers[0]
        self.slot, self.keep = first.deferred_slot, first.keep
        self.graphs = [joined([layer.parts[half].pieces for layer in layers]) for half in range(len(first.parts))]
        self.wires = self.graphs[0].wires
        self.words = {phase: sum((layer.words[phase] for layer in layers), Fraction(0)) for phase in Phase}

    def __call__(
        self,
        values: Sequence[Tensor],
        columns: Mapping[str, Tensor],
        *,
        again: dict[int, Any] | None = None,
        seeds: Sequence[int] | None = None,
        draw: Callable[[int], object] | None = None,
    ) -> tuple[Tensor, ...]:
        """Runs all layers.

        Args:
            values: The outputs of the layer before the first one.
            columns: The columns of the batch, by name.
            again: A cache for values that are computed from columns alone, shared by consecutive layers.
            seeds: The seed of the random stream of every layer. By default torch's stream continues.
            draw: Seeds torch's stream.
        """
        again = {} if again is None else again
        cuts = [list(values)] if len(self.graphs) == 1 else self._split(values)
        given = [self._given(half, cuts[half], columns, again) for half in range(len(self.graphs))]
        names = [list(self.graphs[half].inputs[: len(values)]) for half in range(len(self.graphs))]
        learning = torch.is_grad_enabled()
        weave = Weave(self.graphs, keep=self.keep and learning)
        self.wires.log.declare({Phase.FORWARD: self.words[Phase.FORWARD]})
        with self._streams(seeds, draw, _device(values, columns)) as begin:
            if learning:
                call = _Call(self.slot, self.words, begin)
                flat = _run(weave, _Given(given, names), call, *(value for half in cuts for value in half), _ANCHOR)
            else:
                flat = tuple(out for half in weave.forward(given, begin) for out in half)
        count = len(flat) // len(self.graphs)
        halves = [flat[k * count : (k + 1) * count] for k in range(len(self.graphs))]
        return halves[0] if len(halves) == 1 else self._joined(halves, columns)

    def _given(self, half: int, values: Sequence[Tensor], columns: Mapping[str, Tensor], again: dict[int, Any]) -> dict[str, Any]:
        """Returns the inputs of the graph of a half, by name."""
        found: dict[str, Any] = dict(zip(self.graphs[half].inputs, values, strict=False))
        for number, layer in enumerate(self.layers):
            own = layer.parts[half].given(columns, again)
            found |= {name_in_joined(number, name): value for name, value in own.items()}
        return found

    def _rows(self, columns: Mapping[str, Tensor], half: int) -> dict[str, Tensor]:
        window = self.layers[0].parts[half].window
        return {name: t[window.start : window.start + window.rows] for name, t in columns.items()}

    def _split(self, values: Sequence[Tensor]) -> list[list[Tensor]]:
        parts: list[list[Tensor]] = [[] for _ in self.graphs]
        for k, value in enumerate(values):
            pieces = value.split([part.local_rows[k] for part in self.layers[0].parts])
            for part, piece in zip(parts, pieces, strict=True):
                part.append(piece)
        return parts

    def _joined(self, halves: list[tuple[Tensor, ...]], columns: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        last = self.layers[-1]
        rows = [part.window.rows for part in last.parts]
        own = [self._rows({name: columns[name] for name in last.losses.columns}, half) for half in range(len(halves))]
        return tuple(
            torch.cat(outs) if outs[0].dim() else last.losses.joined(outs, own, rows) for outs in zip(*halves, strict=True)
        )

    @contextmanager
    def _streams(
        self, seeds: Sequence[int] | None, draw: Callable[[int], object] | None, device: torch.device
    ) -> Iterator[Begin | None]:
        """The random streams of a pass. Each half draws for all rows, from its own copy of each layer's stream."""
        if len(self.graphs) == 1:
            yield None if seeds is None or draw is None else lambda layer: draw(seeds[layer])
            return
        made: list[torch.Generator] = []
        for half in range(len(self.graphs)):
            stream = torch.Generator(device)
            if seeds is None:
                stream.set_state(torch.get_rng_state())
            for number, layer in enumerate(self.layers):
                if seeds is not None:
                    stream = torch.Generator(device)
                    stream.manual_seed(seeds[number])
                for drop in layer.parts[half].drops():
                    drop.generator, drop.window = stream, layer.parts[half].window
            made.append(stream)
        yield None
        if seeds is None:
            torch.set_rng_state(made[0].get_state())  # the stream continues after the draws for all rows


def _device(values: Sequence[Tensor], columns: Mapping[str, Tensor]) -> torch.device:
    return next((t.device for t in (*values, *columns.values())), torch.device("cpu"))
