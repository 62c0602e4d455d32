"""Computes the weight of the loss of some rows: the number of labels in a mean cross entropy that are not ignored, else rows.

The target of that operation depends on no parameter. Any rank can compute it from the batch columns alone, including the shift.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.capture.cut.liveness import Line
from meshwright.capture.cut.stage_modules import States, free_graph
from meshwright.capture.trace.graph import Ref
from meshwright.capture.trace.operations import is_one_of

MEAN = 1
"""The number that torch uses for `reduction="mean"`."""


@dataclass(frozen=True)
class LabelCounter:
    """Counts labels. `columns` are the batch columns that it reads."""

    columns: tuple[str, ...]
    targets: fx.GraphModule
    ignored: int
    classes: Tensor | None = None

    def __call__(self, columns: Mapping[str, Tensor]) -> float:
        """Returns how many labels count; if classes have weights, the sum of the weights of these labels."""
        found: Tensor = self.targets(*(columns[name] for name in self.columns))[0]
        counts = found != self.ignored
        return float(counts.sum() if self.classes is None else self.classes[found[counts]].double().sum())


def label_counter(line: Line, states: States, device: torch.device | None = None) -> LabelCounter | None:
    """Returns the counter of the only mean over labels in the loss; None if there is no such mean, or more than one."""
    found = [
        node for node in line.work if is_one_of(node.target, ("aten.cross_entropy_loss", "aten.nll_loss", "aten.nll_loss_nd"))
    ]
    if len(found) != 1 or ("loss" not in line.flat.outputs[:1] and line.flat.outputs[:1] != ("output",)):
        return None
    node = found[0]
    target, weights = node.argument(1, "target", None), node.argument(2, "weight", None)
    if not isinstance(target, Ref) or target.name not in line.free:
        return None
    classes = _fixed(line, weights, states, device)
    if weights is not None and classes is None:
        return None
    size = line.flat.by_name[target.name].size
    if size is None or size.learns or node.argument(3, "reduction", MEAN) != MEAN:
        return None
    graph, columns, _ = free_graph(line, [target.name], states, device)
    return LabelCounter(columns, graph, int(node.argument(4, "ignore_index", -100)), classes)


def _fixed(line: Line, weights: Any, states: States, device: torch.device | None) -> Tensor | None:
    """Return class weights if they are computed from buffers and constants only, else None."""
    if not isinstance(weights, Ref) or weights.name not in line.free:
        return None
    graph, columns, _ = free_graph(line, [weights.name], states, device)
    if columns or any(t.is_meta for t in graph.buffers()):
        return None
    with torch.no_grad():
        found: Tensor = graph()[0]
    return found.clone() if found.dim() == 1 else None
