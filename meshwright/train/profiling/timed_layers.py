"""Times layers one by one, as a stage runs them: forward, the input half of the backward, and the weight half.

A layer gets weights of its own for this, which are dropped after it: the model is never in memory. Equal layers are timed once.
Values that come from the batch alone (masks, positions) are computed before and not timed: a stage makes them once for all its
layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture.cut.dry_walk import DryLayer, TensorSize
from meshwright.capture.cut.liveness import Line
from meshwright.capture.cut.stage_modules import Captured, States, stage
from meshwright.costs.roofline import HalfTimes
from meshwright.ir.placement import Rows
from meshwright.runtime.stage.batch import Cut
from meshwright.runtime.stage.objective import Objective
from meshwright.runtime.stage.precision import Precision
from meshwright.runtime.stage.stage import Record, Stage, leaves

LONG_ENOUGH_S = 0.05
MOST = 10
"""A layer that takes less than `LONG_ENOUGH_S` is repeated up to `MOST` times as often as asked for."""
SCALE = 0.02
"""The size of the random weights: about that of new models."""


@dataclass(frozen=True)
class TimedLayer:
    """The times of one layer in each repetition."""

    runs: tuple[HalfTimes, ...]

    @property
    def best(self) -> HalfTimes:
        """The shortest times, because other processes can only make them longer."""
        return HalfTimes(*(min(getattr(run, name) for run in self.runs) for name in ("forward_s", "input_s", "weight_s")))

    @property
    def spread_s(self) -> float:
        """How much longer a good run took, at the lower quartile, than the sum of the shortest times."""
        sums = sorted(run.forward_s + run.input_s + run.weight_s for run in self.runs)
        best = self.best
        return sums[-(-len(sums) // 4) % len(sums)] - (best.forward_s + best.input_s + best.weight_s)


class _Prepared(nn.Module):
    """A layer with the values that it takes from its prelude already computed."""

    takes_made_again = False

    def __init__(self, layer: Captured, columns: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.layer, self.batch_columns, self.inplace = layer, layer.batch_columns, layer.inplace
        with torch.no_grad():
            self.made = {} if layer.prelude is None else {id(layer.prelude): layer.prelude(columns)}

    def forward(self, *values: Tensor, **columns: Tensor) -> tuple[Tensor, ...]:
        """Run the layer."""
        found: tuple[Tensor, ...] = self.layer(*values, made_again=self.made, **columns)
        return found


@dataclass(frozen=True)
class LayerTimer:
    """Times layers of a model on a device."""

    line: Line
    places: tuple[int, ...]
    model: nn.Module
    device: torch.device
    precision: Precision
    repeats: int = 5

    def timed(self, number: int, dry: DryLayer, columns: Mapping[str, Tensor]) -> TimedLayer:
        """Times one layer on columns of a batch."""
        (layer,) = stage(self.line, self.places[number : number + 2], States(self.model), self.device)
        with _same_random_state():
            return self._timed(layer, number, dry, columns)

    def _timed(self, layer: Captured, number: int, dry: DryLayer, columns: Mapping[str, Tensor]) -> TimedLayer:
        give_weights(layer, self.device)
        given = {name: columns[name].to(self.device) for name in layer.batch_columns}
        is_last = number == len(self.places) - 2
        objective = Objective(_mean) if is_last and dry.outputs[0].shape else Objective()
        run = Stage([_Prepared(layer, given)], number, self.device, is_last, objective, splits=True, precision=self.precision)
        rows = len(next(iter(columns.values())))
        values = tuple(_filled(size, self.device) for size in dry.inputs)
        self._run(run, values, given, rows)  # a first run is slower, and allocates gradients
        runs, end = list[HalfTimes](), perf_counter() + LONG_ENOUGH_S
        while len(runs) < self.repeats or (perf_counter() < end and len(runs) < MOST * self.repeats):
            runs.append(self._run(run, values, given, rows))
        return TimedLayer(tuple(runs))

    def _run(self, run: Stage, values: tuple[Tensor, ...], columns: Mapping[str, Tensor], rows: int) -> HalfTimes:
        record = Record(
            Cut(Rows(0, rows), items=1.0, counts=1.0, stream=0), leaves(values, map(Tensor.is_floating_point, values))
        )
        record.columns, record.target = columns, torch.zeros((), device=self.device) if run.is_last else None
        with torch.enable_grad():
            start = self._now()
            bundle = run.forward(record)
            forward = self._now()
            gradients = [torch.ones_like(t) for t in compress(bundle.tensors, bundle.flags)]
            begin = self._now()
            run.backward(record, gradients, weights=False)
            middle = self._now()
            run.finish(record)
            return HalfTimes(forward - start, middle - begin, self._now() - middle)

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return perf_counter()


def _mean(output: Tensor, _: Tensor) -> Tensor:
    """A loss for a model that returns none."""
    return output.float().mean()


def give_weights(layer: nn.Module, device: torch.device) -> None:
    """Replaces the parameters and buffers of a layer by new ones on a device: random weights, and zeros for buffers on meta."""
    made: dict[int, Tensor] = {}

    def new(tensor: Tensor, kind: Any) -> Any:
        if id(tensor) not in made:
            if kind is nn.Parameter:
                value = torch.empty_like(tensor, device=device)
                value = value.normal_(0.0, SCALE) if value.is_floating_point() else value.zero_()
                made[id(tensor)] = nn.Parameter(value, tensor.requires_grad)
            else:
                made[id(tensor)] = torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.clone().to(device)
        return made[id(tensor)]

    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, new(parameter, nn.Parameter))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, new(buffer, Tensor))


def _filled(size: TensorSize, device: torch.device) -> Tensor:
    if size.dtype.is_floating_point:
        return torch.randn(size.shape, device=device).to(size.dtype)
    return torch.zeros(size.shape, dtype=size.dtype, device=device)


@contextmanager
def _same_random_state() -> Iterator[None]:
    """Sets the random generator of the CPU back at the end."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
