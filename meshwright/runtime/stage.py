"""A stage at work: its layers on one microbatch, forward, backward whole or in halves, and recompute.

With recompute the first layers run without a graph and only their input is kept:

    forward     input --no graph--> middle --graph--> output
    recompute   input --graph--> head                             (again, with the same random streams)
    backward    output -> gradient of middle -> head -> gradient of input
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter as Argument
from inspect import signature
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.errors import MeshwrightError
from meshwright.ir.columns import TARGETS
from meshwright.ir.placement import Rows
from meshwright.runtime import device as devices
from meshwright.runtime.batch import Objective
from meshwright.runtime.layers import columns_of
from meshwright.runtime.moving import Moving, Place
from meshwright.runtime.precision import Precision, Scaler
from meshwright.runtime.split import Deferred, Rest, run

Weights = Sequence[Mapping[str, Tensor]]
"""Parameters of each layer by name, where they are not the layer's own."""


class Key(NamedTuple):
    """Which random streams a microbatch draws from: step, and its number in the whole batch."""

    step: int
    microbatch: int


class Bundle(NamedTuple):
    """What crosses a boundary; `flags` say which tensors take a gradient."""

    tensors: tuple[Tensor, ...]
    flags: tuple[bool, ...]


@dataclass(slots=True)
class Call:
    """What a stage is called with for one microbatch or a part of it."""

    inputs: tuple[Tensor, ...]
    named: Mapping[str, Tensor]
    target: Tensor | None
    rows: Rows
    key: Key
    items: float = 0.0
    counts: float = 0.0
    weights: Weights | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Record:
    """What a forward leaves for its backward."""

    call: Call
    flags: tuple[bool, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    middle: tuple[Tensor, ...] = ()
    head: tuple[Tensor, ...] = ()
    rest: Rest | None = None
    moved: Mapping[Place, Tensor] = field(default_factory=dict)


class Takes(NamedTuple):
    """What a layer says it takes beside the values that cross to it; `shares`: what other layers of its stage have made."""

    columns: tuple[str, ...]
    inplace: bool
    shares: bool

    @classmethod
    def of(cls, layer: nn.Module) -> Takes:
        """Asked once: a module answers slowly for what it does not have."""
        return cls(columns_of(layer), bool(getattr(layer, "inplace", False)), bool(getattr(layer, "shares", False)))

    def from_batch(self, call: Call) -> dict[str, Tensor]:
        """Columns of the batch by name; a layer that changes tensors in place gets copies."""
        found = {name: call.columns[name] for name in self.columns}
        return {name: t.clone() for name, t in found.items()} if self.inplace else found


@dataclass
class Stage:
    """A run of layers; the last stage ends in the objective, whose sum it returns as its one output."""

    layers: Sequence[nn.Module]
    first_layer: int
    device: torch.device
    is_last: bool = False
    objective: Objective = field(default_factory=Objective)
    seed: int = 0
    share: float = 0.0
    splits: bool = False
    keep: Callable[[Rows, Any], None] | None = None
    """Shown what the last layer returns for some rows, before the objective makes one number of it."""
    precision: Precision = field(default_factory=Precision)
    scaler: Scaler | None = None

    def __post_init__(self) -> None:
        self.recomputed = ceil(self.share * len(self.layers) - 1e-9)
        self.moving = Moving(self.layers[: self.recomputed])
        self.deferred = Deferred(nn.ModuleList(self.layers)) if self.splits else None
        # What changes its input in place must not change what is kept for the backward, nor the batch. A layer says so by its
        # `inplace`; whether it does so without a word is seen at the first run from where a graph starts.
        self.takes_target = takes_target(self.layers[-1])
        mine = [name for layer in self.layers for name in columns_of(layer)]
        self.takes = [Takes.of(layer) for layer in self.layers]
        self.columns = tuple(dict.fromkeys([*mine, *self.objective.columns]))
        self.inplace = changes_in_place(self.layers)
        self.untouched: set[int] = set()
        self.mixed = self.precision.mixed
        self.draw_from = devices.seeder(self.device)

    def forward(self, call: Call) -> tuple[Bundle, Record]:
        """Run the layers and keep what the backward will need."""
        count, record = self.recomputed, Record(call)
        values = call.inputs
        if count:
            before = self.moving.copied()
            with torch.no_grad():
                values = self._layers(range(count), call, values)
            record.moved = self.moving.moved(before)
            if count < len(self.layers):
                record.middle = values = tuple([leaf(t, _learns(t)) for t in values])
        if count < len(self.layers):
            record.outputs = values = self._layers(range(count, len(self.layers)), call, values)
        record.flags = tuple([_learns(t) if count == len(self.layers) else t.requires_grad for t in values])
        return Bundle(tuple([t.detach().contiguous() for t in values]), record.flags), record

    def recompute(self, record: Record) -> None:
        """Run the first layers again, now with a graph; what they count of the data they have counted before."""
        with self.moving.as_before(record.moved):
            head = self._layers(range(self.recomputed), record.call, record.call.inputs)
        if self.recomputed == len(self.layers):
            record.outputs = head
        else:
            record.head = head

    def backward(self, record: Record, gradients: Sequence[Tensor], *, weights: bool = True) -> tuple[Tensor, ...]:
        """The gradients of the inputs; those of the weights are added up, or put off until `finish`."""
        if not weights and self.deferred is not None:
            self.deferred.begin()
        outputs = [t for t, flag in zip(record.outputs, record.flags, strict=True) if flag]
        _backward(outputs, [self._start(t) for t in outputs] if self.is_last else gradients)
        if record.middle:
            leaves = [t for t in record.middle if t.requires_grad]
            flagged = [t for t, leaf in zip(record.head, record.middle, strict=True) if leaf.requires_grad]
            _backward(flagged, [_gradient(t) for t in leaves])
        if not weights and self.deferred is not None:
            record.rest = self.deferred.end()
        found = tuple([_gradient(t) for t in record.call.inputs if t.requires_grad])
        record.outputs = record.middle = record.head = ()
        return found

    def finish(self, record: Record) -> None:
        """The gradients of the weights that a split backward has put off."""
        if record.rest is not None:
            run(record.rest)
            record.rest = None

    def _start(self, loss: Tensor) -> Tensor | None:
        """What the backward of a loss begins with."""
        return None if self.scaler is None else torch.full_like(loss, self.scaler.factor)

    def _layers(self, which: range, call: Call, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        named: dict[str, Any] = dict(call.named) if which.start == 0 else {}
        watched: tuple[Tensor, ...] = ()
        of_batch = self.first_layer == 0 and which.start == 0
        again: dict[int, Any] = {}
        stream = devices.stream(self.seed, *call.key)
        last = len(self.layers) - 1 if self.is_last else None
        if self.inplace or of_batch or which.start not in self.untouched:
            watched = values = tuple([t.clone() for t in values])
            named = {name: t.clone() for name, t in named.items()}
        for index in which:
            layer, number = self.layers[index], self.first_layer + index
            takes = self.takes[index]
            if takes.columns:
                named = {**named, **takes.from_batch(call)}
            if takes.shares:
                named["made_again"] = again
            self.draw_from(devices.stream(stream, number))
            if index == last and call.target is not None and self.takes_target(len(values)):
                values = (*values, call.target)
            if call.weights is None and not self.mixed:
                output = layer(*values, **named)
            else:
                output = self._apply(index, call, values, named)
            if index == last and self.keep is not None:
                self.keep(call.rows, output)
            values, named = tensors_of(output, number), {}
        if watched and not any(t._version for t in watched):
            self.untouched.add(which.start)
        if self.is_last and which.stop == len(self.layers):
            return (self.objective(values[0], call.target, call.rows, call.items),)
        return values

    def _apply(self, index: int, call: Call, values: tuple[Tensor, ...], named: dict[str, Any]) -> Any:
        """A layer in another precision than its weights have, or with weights of another version."""
        layer = self.layers[index]
        with self.precision.autocast(self.device):
            if call.weights is None:
                return layer(*values, **named)
            return functional_call(layer, dict(call.weights[index]), values, dict(named))


def changes_in_place(layers: Sequence[nn.Module]) -> bool:
    """May one of these layers change what it is given?"""
    return any(getattr(m, "inplace", False) for at in layers for m in at.modules())


def leaf(tensor: Tensor, flag: bool) -> Tensor:
    """A fresh start of a graph for what has come over a boundary."""
    return tensor.detach().requires_grad_(flag)


_run_backward = torch.ops.aten.backward.TensorList
"""What `torch.autograd.backward` ends in; for a small stage its checks in Python cost half as much as the backward."""


def _backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    starts: list[Tensor] = []
    given: list[Tensor | None] = []
    for tensor, gradient in zip(outputs, gradients, strict=True):
        if tensor.requires_grad:
            starts.append(tensor)
            given.append(gradient)
    if starts:
        _run_backward(starts, given)


def _gradient(tensor: Tensor) -> Tensor:
    gradient = tensor.grad
    return torch.zeros_like(tensor) if gradient is None else gradient.contiguous()


def tensors_of(output: Any, layer: int) -> tuple[Tensor, ...]:
    """What a layer returned, as the next one takes it."""
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(loss := getattr(output, "loss", None), Tensor):
        return (loss,)
    if isinstance(output, tuple | list) and output and all(isinstance(t, Tensor) for t in output):
        return tuple(output)
    raise MeshwrightError(
        f"layer {layer} returned {type(output).__name__}; what crosses stages is a tensor or a tuple of tensors",
        fix="return tensors, or put this layer and the next into one",
    )


def takes_target(layer: nn.Module) -> Callable[[int], bool]:
    """Does a last layer compute the loss itself? Asked with how many values it is given.

    It does where its next argument is named as targets are, or where it needs one more than is given.
    """
    forward: Callable[..., Any] = layer.forward
    arguments = [a for a in signature(forward).parameters.values() if a.kind is Argument.POSITIONAL_OR_KEYWORD]
    needed = sum(a.default is Argument.empty for a in arguments)
    names = [a.name for a in arguments]
    return lambda given: (names[given : given + 1] != [] and names[given] in TARGETS) or needed == given + 1


def _learns(tensor: Tensor) -> bool:
    """Can a gradient flow through it?"""
    return tensor.is_floating_point() or tensor.is_complex()
