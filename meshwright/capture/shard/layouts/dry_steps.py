"""Runs a local program on tensors without data, to check that every step returns the shape of its layout.

A step with another shape would fail in the middle of a run. It is found here, before anything is sent, and its operation runs on
whole values instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.capture.shard.layouts.layout import Layout, local_shape
from meshwright.capture.shard.layouts.steps import Local, Offset, Step, StepKind
from meshwright.capture.shard.layouts.walk_task import Task
from meshwright.capture.trace.graph import mapped
from meshwright.capture.trace.operations import function_of
from meshwright.tensor import local_ops


class DryRun:
    """The values of steps so far, on the meta device."""

    def __init__(self, task: Task, layouts: Mapping[str, Layout]) -> None:
        self.task, self.layouts = task, layouts
        self.values: dict[str, Any] = {}

    def failing(self, steps: Sequence[Step]) -> tuple[Step, str] | None:
        """Returns the first step whose shape differs from its layout, and what is wrong."""
        with torch.no_grad():
            for step in steps:
                try:
                    made = self._made(step)
                except Exception as error:  # whatever torch says about these shapes
                    return step, str(error).partition("\n")[0]
                if isinstance(made, Tensor) and step.shape is not None and tuple(made.shape) != step.shape:
                    return step, f"a rank has {tuple(made.shape)} instead of {step.shape}"
                self.values[step.name] = made
        return None

    def _made(self, step: Step) -> Any:
        match step.kind:
            case StepKind.OPERATION:
                return function_of(step.target)(*self._given(step.args), **self._given(dict(step.kwargs)))
            case StepKind.LOCAL:
                return getattr(local_ops, step.target)(*self._given(step.args))
            case StepKind.MOVE:
                assert step.move is not None
                given = self._given(step.args)[0]
                if tuple(given.shape) != step.move.given:
                    raise ValueError(f"a rank moves {tuple(given.shape)} instead of {step.move.given}")
                return given.new_empty(step.move.made)
            case StepKind.DROPOUT:
                return self._given(step.args)[0]
            case StepKind.PARAMETER:
                names = (node for node in self.task.line.flat.nodes if self.task.ties.get(node.target) == step.target)
                return self._empty(next(names).name, step.shape or ())
            case StepKind.NATIVE:
                assert step.node is not None
                return self._empty(step.node.name, step.shape) if step.shape is not None else None

    def _given(self, tree: Any) -> Any:
        return mapped(tree, self._leaf)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Offset):
            return 0
        if isinstance(leaf, torch.device):
            return torch.device("meta")
        if not isinstance(leaf, Local):
            return leaf
        if leaf.name not in self.values:  # an output of another layer, or a free value
            name, shapes = leaf.name, self.task.sizes.shapes
            shape = local_shape(self.layouts[name], self.task.grid) if name in self.layouts else shapes[name]
            self.values[name] = self._empty(name, shape)
        return self.values[leaf.name]

    def _empty(self, name: str, shape: tuple[int, ...]) -> Tensor:
        size = self.task.line.flat.by_name[name].size
        assert size is not None
        return torch.empty(shape, dtype=getattr(torch, size.dtype), device="meta")
