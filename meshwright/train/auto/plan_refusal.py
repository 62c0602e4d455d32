"""Why a chosen plan cannot run a model: a planner asks before it returns a plan, so that it never returns one that is refused.

Planners know the costs of layers, not what is in them. Whether a tensor mode has rules for all operations, and divides all
sizes, is known only from the captured graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from meshwright.capture.shard.sharded import shard_plan
from meshwright.capture.split import choose_cuts
from meshwright.capture.trace.export import flatten
from meshwright.capture.trace.graph import Flat, NodeKind
from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import Parallel
from meshwright.runtime.stage.batch import Given
from meshwright.train.data.step_rows import microbatch_sizes
from meshwright.train.setup.sharded_layers import tensor_cut

PLAN_KEYS = ("dp", "dp_mode", "microbatches", "tp", "tensor", "box", "sequence")
"""What decides the rows of microbatches, and how tensors are divided."""


@dataclass
class PlanRefusal:
    """Returns why a plan cannot run a model with these rows per microbatch. The model is captured when it is first needed."""

    model: nn.Module
    example: Given
    last_rows: int = 0
    """The rows of the last step of an epoch, if it is short."""

    @property
    def draws(self) -> bool:
        """Whether the model draws random numbers in training (dropout)."""
        return self._flat.random

    @cached_property
    def _flat(self) -> Flat:
        return flatten(self.model, self.example)

    def __call__(self, keywords: Mapping[str, Any], rows: int | None) -> str | None:
        """Returns the reason, None if the plan can run. `keywords` are those of `Parallel`."""
        if keywords.get("tp", 1) == 1:
            return None
        plan = Parallel.of({key: keywords[key] for key in PLAN_KEYS if key in keywords})
        tensor = tensor_cut(plan)
        assert tensor is not None
        flat = self._flat
        columns = {node.target: node.size.shape for node in flat.nodes if node.kind is NodeKind.COLUMN and node.size is not None}
        starts = list(keywords.get("stages") or ())
        places = choose_cuts(self.model, flat, len(starts) + 1, at=starts or None).places
        counts = [rows or next(iter(columns.values()))[0]]
        if self.last_rows:
            short = microbatch_sizes([self.last_rows], copies=plan.copies, microbatches=plan.microbatches)
            counts += sorted(short - set(counts))
        every = [{name: (count, *shape[1:]) for name, shape in columns.items()} for count in counts]
        try:
            found = shard_plan(self.model, flat, tensor, every[0], places=places)
            for short_shapes in every[1:]:
                found.resized(self.model, short_shapes)
        except MeshwrightError as error:
            return error.what
        return None
