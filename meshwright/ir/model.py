"""A model as a chain of layers, with the cost of each layer, what crosses each cut, and which weights are tied.

A planner may cut between any two layers. Sizes and operation counts are those of one example batch. `output` is everything
that crosses a cut after a layer: the hidden state, and skip connections that pass over the cut. Masks, positions and labels
are recomputed on each stage and are not part of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from math import prod

from meshwright.errors import MeshwrightError
from meshwright.ir.partition import partition

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that crosses a cut; `since` is the layer that made it."""

    name: str
    shape: tuple[int, ...]
    bytes: int
    since: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, under its first name."""

    name: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Layer:
    """A run of operations that is not cut. `modules` begin in it; `saved_bytes` is what its backward needs."""

    name: str
    flops: float
    parameters: tuple[str, ...]
    parameter_bytes: int
    output: tuple[Crossing, ...]
    saved_bytes: int
    columns: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    @property
    def output_bytes(self) -> int:
        """Total size of the tensors that cross a cut after this layer."""
        return sum(value.bytes for value in self.output)


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several layers use."""

    name: str
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A stage of a cut model: layers `first` up to but not including `last`, and the tensors that cross after it."""

    first: int
    last: int
    layers: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    flops: float
    saved_bytes: int
    boundary: tuple[Crossing, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where a model is cut into stages, and why there.

    Attributes:
        starts: The first layer of each stage, and at the end the number of layers.
        parts: The stages: layers, parameters, operations, what crosses after each.
        best: The operations of the heaviest stage in the best possible cut.

    Examples:
        >>> import meshwright as mw
        >>> from torch import nn, zeros
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        ...     def forward(self, x):
        ...         for layer in self.layers:
        ...             x = layer(x).relu()
        ...         return x.sum()
        >>> cuts = mw.capture(Model(), (zeros(2, 8),)).cuts(2)
        >>> len(cuts.parts), round(cuts.heaviest / cuts.best, 2)
        (2, 1.0)
    """

    starts: tuple[int, ...]
    parts: tuple[Part, ...]
    best: float

    @property
    def heaviest(self) -> float:
        """The operation count of the heaviest stage."""
        return max(part.flops for part in self.parts)

    @property
    def digest(self) -> str:
        """A short hash that depends only on the cuts, not on descriptions or the names that a trace gives to values."""
        parts = [replace(part, why="", boundary=tuple(replace(v, name="") for v in part.boundary)) for part in self.parts]
        return sha256(repr((self.starts, parts)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ModelGraph:
    """A model as a chain of layers that it may be cut between. `meshwright.capture` makes one.

    Attributes:
        name: The class of the model.
        layers: The layers: operations, parameters, what crosses after each.
        weights: All parameters, under their first names.

    Examples:
        ```python
        graph = meshwright.capture(model, example_batch)
        print(graph.flops, [tie.name for tie in graph.ties])
        for part in graph.cuts(4).parts:
            print(part.layers, part.why)
        ```
    """

    name: str
    layers: tuple[Layer, ...]
    weights: tuple[Weight, ...]

    @cached_property
    def ties(self) -> tuple[Tie, ...]:
        """Parameters that several layers use."""
        users: dict[str, list[int]] = {}
        for index, layer in enumerate(self.layers):
            for name in layer.parameters:
                users.setdefault(name, []).append(index)
        return tuple(Tie(name, tuple(found)) for name, found in users.items() if len(found) > 1)

    @property
    def flops(self) -> float:
        """The operation count of one forward."""
        return sum(layer.flops for layer in self.layers)

    def cuts(self, stages: int, *, at: Sequence[str | int] | None = None) -> Cuts:
        """Cut the model into stages.

        Minimizes the heaviest stage; within a tolerance it then minimizes the bytes that cross. With `at`, cuts where these
        modules begin.
        """
        costs = [layer.flops for layer in self.layers]
        if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
            raise MeshwrightError(f"a model is cut into at least 1 stage, got {stages!r}", fix="stages=2")
        if len(costs) < stages:
            raise MeshwrightError(
                f"{self.name} has {len(costs)} layer{'s' if len(costs) > 1 else ''} and cannot be cut into {stages} stages",
                fix=f"{len(costs)} stages or fewer",
            )
        best, starts = partition(costs, [layer.output_bytes for layer in self.layers], stages)
        if at is not None:
            starts = self._chosen(stages, at)
        parts = tuple(self._part(a, b, best, chosen=at is not None) for a, b in itertools.pairwise(starts))
        return Cuts(starts, parts, best)

    def _chosen(self, stages: int, at: Sequence[str | int]) -> tuple[int, ...]:
        """Returns the starts of the stages, from module names or layer numbers."""
        found = [self._layer_of(name) if isinstance(name, str) else name for name in at]
        starts = (0, *found, len(self.layers))
        if len(found) != stages - 1 or any(b <= a for a, b in itertools.pairwise(starts)):
            raise MeshwrightError(
                f"{stages} stages need {stages - 1} cuts in order, after the first layer and before the end; "
                f"got {list(at)}, which are layers {found} of {len(self.layers)}",
                fix="each cut names the module that begins the next stage",
            )
        return starts

    def _layer_of(self, module: str) -> int:
        for index, layer in enumerate(self.layers):
            if module in layer.modules:
                return index
        known = [name for layer in self.layers[1:] for name in layer.modules[:1]]
        raise MeshwrightError(
            f"no layer of {self.name} begins with the module {module!r}",
            fix=f"one of {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}",
        )

    def _part(self, first: int, last: int, best: float, *, chosen: bool) -> Part:
        layers = self.layers[first:last]
        names = {name for layer in layers for name in layer.parameters}
        mine = [weight for weight in self.weights if weight.name in names]
        numbers = [prod(weight.shape) for weight in mine]
        boundary = layers[-1].output if last < len(self.layers) else ()
        flops = sum(layer.flops for layer in layers)
        return Part(
            first=first,
            last=last,
            layers=tuple(layer.name for layer in layers),
            parameters=sum(numbers),
            parameter_bytes=sum(weight.bytes for weight in mine),
            flops=flops,
            saved_bytes=sum(layer.saved_bytes for layer in layers),
            boundary=boundary,
            why=_why(self, last, flops, best, boundary, chosen=chosen),
        )


def _why(graph: ModelGraph, last: int, flops: float, best: float, boundary: Sequence[Crossing], *, chosen: bool) -> str:
    """Explains a cut in one sentence."""
    share = f"{flops / best:.2f} of the optimal heaviest stage" if best else "no operations"
    if last == len(graph.layers):
        return f"ends with the model; {share}"
    skips = [value.name for value in boundary if value.since < last - 1]
    carried = f", carrying {len(skips)} skip{'s' if len(skips) > 1 else ''} over it" if skips else ""
    least = min(layer.output_bytes for layer in graph.layers[:-1])
    size = sum(value.bytes for value in boundary)
    bytes_ = "the fewest bytes of any cut" if size == least else f"{size / max(least, 1):.1f} times the fewest bytes of any cut"
    return f"{'asked for; ' if chosen else ''}{share}; {bytes_}{carried}"
