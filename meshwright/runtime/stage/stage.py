"""A stage: runs its layers on one microbatch. Forward, backward (whole or in halves) and recompute.

With recompute the first layers run without a graph and only their input is kept:

    forward     input --no graph--> middle --graph--> output
    recompute   input --graph--> head                             (again, with the same random streams)
    backward    output -> gradient of middle -> head -> gradient of input
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from math import ceil
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.ir.action import Op
from meshwright.ir.placement import Rows
from meshwright.runtime import device as devices
from meshwright.runtime.stage.batch import Cut
from meshwright.runtime.stage.layer_chains import ChainedLayers, Chains
from meshwright.runtime.stage.layer_inputs import Takes, changes_in_place, gradients_of, takes_target, tensors_of
from meshwright.runtime.stage.layers import columns_of
from meshwright.runtime.stage.moving_buffers import Moving, Place, changed_late
from meshwright.runtime.stage.objective import Objective
from meshwright.runtime.stage.precision import Precision, Scaler
from meshwright.runtime.stage.reached_parameters import Leaves, Reached, joint, noting
from meshwright.runtime.stage.split_backward import Deferred, Rest, run
from meshwright.torch_internals import run_backward, write_count

_NOTHING: Mapping[Any, Any] = {}
_takes_gradient = attrgetter("requires_grad")

Weights = Sequence[Mapping[str, Tensor]]
"""Parameters of each layer by name, if they are not the layer's own."""


class Bundle(NamedTuple):
    """The tensors that are sent between stages. `flags` tell which of them take a gradient."""

    tensors: tuple[Tensor, ...]
    flags: tuple[bool, ...]


class Record:
    """A cut of a batch in a stage: the inputs of its forward, and what the forward saves for the backward.

    The last stage sets `times`: the loss that it returns, multiplied by `times`, is the sum over the rows.
    """

    target: Tensor | None = None
    weights: Weights | None = None
    columns: Mapping[str, Tensor] = _NOTHING
    times: float = 1.0
    flags: tuple[bool, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    middle: tuple[Tensor, ...] = ()
    head: tuple[Tensor, ...] = ()
    rest: Rest | None = None
    moved: Mapping[Place, Tensor] = _NOTHING
    reached: Reached | None = None
    """The parameters that the backward of this cut has reached, if the stage records every backward."""

    def __init__(self, cut: Cut, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor] = _NOTHING) -> None:
        self.cut, self.inputs, self.named = cut, inputs, named


@dataclass
class Stage:
    """A run of layers. The last stage ends with the objective, and its only output is the loss."""

    layers: Sequence[nn.Module]
    first_layer: int
    device: torch.device
    is_last: bool = False
    objective: Objective = field(default_factory=Objective)
    seed: int = 0
    share: float = 0.0
    splits: bool = False
    keep: Callable[[Rows, Any], None] | None = None
    """Called with the rows and the output of the last layer, before the objective reduces it to a loss."""
    precision: Precision = field(default_factory=Precision)
    scaler: Scaler | None = None
    is_captured: bool = True
    """Whether the layers come from a captured graph, whose backwards all reach the same parameters."""

    def __post_init__(self) -> None:
        self.recomputed = ceil(self.share * len(self.layers) - 1e-9)
        self._all = range(len(self.layers))
        self.moving = Moving(self.layers[: self.recomputed])
        self.deferred = Deferred(nn.ModuleList(self.layers)) if self.splits else None
        self.chains = Chains(self.layers)
        # A layer that changes its input in place must not change what is kept for the backward, nor the batch. A layer declares
        # this with `inplace`. If it does not, the first run from the start of a graph shows it.
        self.takes_target = takes_target(self.layers[-1])
        mine = [name for layer in self.layers for name in columns_of(layer)]
        self.takes = [Takes.of(layer) for layer in self.layers]
        self.end = len(self.layers) - 1 if self.is_last else None
        self.columns = tuple(dict.fromkeys([*mine, *self.objective.columns]))
        self.inplace = changes_in_place(self.layers)
        self.untouched: set[int] = set()
        self.mixed = self.precision.mixed
        self.salts = [devices.salt(self.first_layer + index) for index in range(len(self.layers))]
        self.draw_from = devices.seeder(self.device)
        self.reached: dict[Op, Reached] = {}
        """The parameters of each unit that B, I and W reach, recorded at their first run; or what any of their runs reached."""

    def forward(self, record: Record) -> Bundle:
        """Runs the layers and saves what the backward needs."""
        if self.recomputed:
            values = self._forward_to_recompute(record)
        else:
            record.outputs = values = self._layers(self._all, record, record.inputs)
            record.flags = tuple(map(_takes_gradient, values))
        if not all(map(_takes_gradient, values)):
            return Bundle(self.moving.apart(values, graph=self.recomputed < len(self.layers)), record.flags)
        return Bundle(tuple(map(Tensor.contiguous, map(Tensor.detach, values))), record.flags)

    def _forward_to_recompute(self, record: Record) -> tuple[Tensor, ...]:
        """Runs the first layers without a graph and the others with one."""
        count = self.recomputed
        before = self.moving.copied()
        given = list(map(write_count, record.inputs))
        with torch.no_grad():
            values = self._layers(range(count), record, record.inputs)
        if given != list(map(write_count, record.inputs)):
            raise changed_late(self.first_layer)
        record.moved = self.moving.moved(before)
        if count == len(self.layers):
            record.flags = tuple(map(_differentiable, values))
        else:
            record.middle = leaves(values, map(_differentiable, values))
            record.outputs = values = self._layers(range(count, len(self.layers)), record, record.middle)
            record.flags = tuple(map(_takes_gradient, values))
        return values

    def recompute(self, record: Record) -> None:
        """Runs the first layers again, now with a graph. Their buffers count the data only once."""
        with self.moving.as_before(record.moved):
            head = self._layers(range(self.recomputed), record, record.inputs)
        if self.recomputed == len(self.layers):
            record.outputs = head
        else:
            record.head = head

    def backward(
        self,
        record: Record,
        gradients: Sequence[Tensor | None],
        *,
        weights: bool = True,
        first: Leaves | None = None,
        known: Reached | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns the gradients of the inputs. Accumulates the gradients of the weights, or defers them until `finish`.

        The `first` backward of its kind records which leaves it reaches besides `known` ones, unless no row counts.
        """
        if first is None or (self.is_last and not record.cut.items):
            return self._backward(record, gradients, weights)
        op = Op.B if weights else Op.I
        run_it = partial(self._backward, record, gradients, weights)
        found, reached = noting(first, lambda seen: self.chains.noting(seen, run_it), known)
        self._note(record, op, reached)
        return found

    def _note(self, record: Record, op: Op, reached: Reached) -> None:
        if not self.is_captured:
            record.reached = reached
        self.reached[op] = joint(self.reached.get(op), reached)

    def _backward(self, record: Record, gradients: Sequence[Tensor | None], weights: bool) -> tuple[Tensor, ...]:
        deferred = None if weights else self.deferred
        if deferred is not None:
            deferred.begin()
        outputs = tuple(compress(record.outputs, record.flags))
        if self.is_last:
            gradients = [self._start(t, record.times) for t in outputs]
        if self.recomputed:
            _backward(outputs, gradients)
            _backward(tuple(compress(record.head, map(_takes_gradient, record.middle))), gradients_of(record.middle))
        elif outputs:
            run_backward(outputs, gradients)
        if deferred is not None:
            record.rest = deferred.end()
        record.outputs = record.middle = record.head = ()
        return gradients_of(record.inputs)

    def finish(self, record: Record, first: Leaves | None = None) -> None:
        """Computes the weight gradients that a split backward has deferred. `reached` of W includes what its I has reached."""
        before = self.reached.get(Op.I) if self.is_captured else record.reached
        if first is not None and before is not None:
            rest = record.rest or []
            _, reached = noting(first, lambda seen: self.chains.noting(seen, partial(run, rest, seen)), before)
            self._note(record, Op.W, reached)
        elif record.rest is not None:
            run(record.rest)
        record.rest = None

    def _start(self, loss: Tensor, times: float) -> Tensor | None:
        """Returns the gradient of the loss that the backward starts with, so that it computes the gradient of the sum."""
        factor = times if self.scaler is None else times * self.scaler.factor
        return None if factor == 1.0 else torch.full_like(loss, factor)

    def _layers(self, which: range, record: Record, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Runs some of the layers, one after another. The loss is computed after the last layer of the model."""
        start, first, end = which.start, self.first_layer, self.end
        named: Mapping[str, Any] = record.named if start == 0 else {}
        watched: tuple[Tensor, ...] = ()
        if self.inplace or start not in self.untouched or first + start == 0:
            values = tuple(map(Tensor.clone, values))
            named = {name: t.clone() for name, t in named.items()} if named else named
            watched = () if start in self.untouched else values
        target = record.target if record.target is None or self.recomputed < len(self.layers) else record.target.clone()
        chain = self.chains.of(which)
        if chain is None:
            values = self._one_by_one(which, record, values, named, target)
        else:
            values = self._as_one(chain, which, record, values)
        if watched and not any(map(write_count, watched)):
            self.untouched.add(start)
        if end is not None and which.stop == len(self.layers):
            loss, record.times = self.objective.mean(values[0], target, record.cut.items)
            return (loss,)
        return values

    def _as_one(self, chain: ChainedLayers, which: range, record: Record, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Runs layers that offer to run as one."""
        assert record.weights is None, "layers that share tensors with other ranks have one version of their weights"
        seeds = [record.cut.stream ^ self.salts[index] for index in which]
        with self.precision.autocast(self.device):
            found = chain(values, record.columns, seeds=seeds, draw=self.draw_from)
        if self.end is not None and self.end in which and self.keep is not None:
            self.keep(record.cut.rows, found)
        return found

    def _one_by_one(
        self, which: range, record: Record, values: tuple[Tensor, ...], named: Mapping[str, Any], target: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Runs layers one after another."""
        plain, stream, end = record.weights is None and not self.mixed, record.cut.stream, self.end
        again: dict[int, Any] = {}
        for index in which:
            takes = self.takes[index]
            if takes is not None:
                named = {**named, **takes.from_batch(record.columns)}
                if takes.shares:
                    named["made_again"] = again
            if index == end and target is not None and self.takes_target(len(values)):
                values = (*values, target)
            self.draw_from(stream ^ self.salts[index])
            output = self.layers[index](*values, **named) if plain else self._apply(index, record, values, named)
            if index == end and self.keep is not None:
                self.keep(record.cut.rows, output)
            values, named = (output,) if isinstance(output, Tensor) else tensors_of(output, self.first_layer + index), {}
        return values

    def _apply(self, index: int, record: Record, values: tuple[Tensor, ...], named: Mapping[str, Any]) -> Any:
        """Runs a layer in another precision than that of its weights, or with weights of another version."""
        layer = self.layers[index]
        with self.precision.autocast(self.device):
            if record.weights is None:
                return layer(*values, **named)
            return functional_call(layer, dict(record.weights[index]), values, dict(named))


def own_leaves(tensors: Iterable[Tensor], flags: Iterable[bool]) -> tuple[Tensor, ...]:
    """Makes tensors that no one else uses into leaves of a new graph."""
    return tuple(map(Tensor.requires_grad_, tensors, flags))


def leaves(tensors: Iterable[Tensor], flags: Iterable[bool]) -> tuple[Tensor, ...]:
    """Returns received tensors as leaves of a new graph."""
    return own_leaves(map(Tensor.detach, tensors), flags)


def _backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Runs a backward from the outputs that take a gradient. For recomputed outputs this is known only now."""
    learn = [t.requires_grad for t in outputs]
    if any(learn):
        run_backward(list(compress(outputs, learn)), list(compress(gradients, learn)))


def _differentiable(tensor: Tensor) -> bool:
    """Returns whether a gradient can flow through a tensor."""
    return tensor.is_floating_point() or tensor.is_complex()
