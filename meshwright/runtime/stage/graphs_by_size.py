"""The graphs of a captured model on one rank: the first one, and others for sizes that the first one is not valid for.

A trace unrolls loops and decides branches, so a graph is valid for some sizes only. When a batch of another size arrives, the
model is captured again. The new graph is cut at the same modules, so every stage keeps its parameters. Every rank does this on
its own and gets the same result, because only shapes matter. At most eight graphs are kept; the oldest is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.runtime.recent import Recent
from meshwright.runtime.stage.batch import Batch
from meshwright.runtime.stage.layers import Layers, Shapes
from meshwright.runtime.stage.stage import Stage

log = logging.getLogger(__name__)

MOST = 8
"""The number of graphs that are kept."""

SIZES = 1024
"""The number of sizes whose graph is remembered. For other sizes it is looked up again, with the same result."""

_FIX = "batches of one size: padding to one length, drop_last"


class Graphs:
    """Chooses the graph of every microbatch by its shapes. A `versioned` schedule only has the first graph."""

    def __init__(self, layers: Layers, stages: Mapping[int, Stage], device: torch.device, *, versioned: bool = False) -> None:
        self.layers, self.first, self.device, self.versioned = layers, stages, device, versioned
        self._layers: dict[int, Layers] = {}
        self._stages: dict[int, dict[int, Stage]] = {}
        self._chosen = Recent[object, int](SIZES)
        self._made = 0

    @property
    def stages(self) -> list[tuple[int, Stage]]:
        """The stages of this rank in all graphs, with their numbers."""
        return [found for stages in (self.first, *self._stages.values()) for found in stages.items()]

    @property
    def modules(self) -> list[nn.Module]:
        """The layers of the stages of this rank in all graphs."""
        return [layer for _, stage in self.stages for layer in stage.layers]

    def stage(self, number: int, graph: int) -> Stage:
        """Returns a stage of another graph, with the current objective and mode of the first graph."""
        found, first = self._stages[graph][number], self.first[number]
        found.objective, found.keep = first.objective, first.keep
        if found.layers[0].training != first.layers[0].training:
            for layer in found.layers:
                layer.train(first.layers[0].training)
        return found

    def choose(self, batch: Batch) -> None:
        """Sets the graphs of the microbatches of a batch. Raises for sizes that cannot be captured."""
        if self.layers.refusal is None:
            return
        batch.graph_for = lambda rows: self._number(batch, rows)
        for rows in {cut.stop - cut.start for cut in batch.cuts} - {0}:
            self._number(batch, rows)

    def _number(self, batch: Batch, rows: int) -> int:
        key = rows, batch.form[1:]
        found = self._chosen.get(key)
        if found is None:
            found = self._chosen[key] = self._find(batch.columns, rows) if rows else 0
        return found

    def _find(self, columns: Mapping[str, Tensor], rows: int) -> int:
        """Returns the number of a graph that is valid for these sizes, and captures one if there is none."""
        shapes = {name: (rows, *t.shape[1:]) for name, t in columns.items()}
        dtypes = {name: str(t.dtype).removeprefix("torch.") for name, t in columns.items()}
        reasons = {number: _refusal(layers, shapes, dtypes) for number, layers in {0: self.layers, **self._layers}.items()}
        for number, why in reasons.items():
            if why is None:
                return number
        given = ", ".join(f"{name} {'x'.join(map(str, shape))} {dtypes[name]}" for name, shape in shapes.items())
        what = f"the model was captured for batches with {reasons[0]}; a microbatch has {given}"
        if self.layers.again is None or self.versioned:
            raise MeshwrightError(what, fix=f"{_FIX}, or an example batch of the size that is to come")
        log.info("%s: it is captured again", what)
        try:
            found = self.layers.again({name: t[:rows] for name, t in columns.items()})
        except MeshwrightError as error:
            raise MeshwrightError(f"{what}. For that it cannot be captured: {error}", fix=_FIX) from error
        if (why := _refusal(found, shapes, dtypes)) is not None:
            raise MeshwrightError(f"{what}. Captured again it would be for {why}", fix=_FIX)
        return self._keep(found, what)

    def _keep(self, layers: Layers, what: str) -> int:
        self._made += 1
        self._stages[self._made] = {number: self._other(number, stage, layers, what) for number, stage in self.first.items()}
        self._layers[self._made] = layers
        if len(self._layers) == MOST:
            oldest = next(iter(self._layers))
            del self._layers[oldest], self._stages[oldest]
            for key in [key for key, number in self._chosen.items() if number == oldest]:
                del self._chosen[key]
        return self._made

    def _other(self, number: int, stage: Stage, layers: Layers, what: str) -> Stage:
        found = replace(stage, layers=[layer.to(self.device) for layer in layers.of_stage(number)])
        if more := set(found.columns) - set(stage.columns):
            raise MeshwrightError(f"{what}. For that stage {number} reads {sorted(more)[0]!r}, which it was not given", fix=_FIX)
        return found


def _refusal(layers: Layers, shapes: Shapes, dtypes: Mapping[str, str]) -> str | None:
    for name, dtype in dtypes.items():
        if layers.dtypes.get(name, dtype) != dtype:
            return f"{name} as {layers.dtypes[name]}"
    return None if layers.refusal is None else layers.refusal(shapes)
