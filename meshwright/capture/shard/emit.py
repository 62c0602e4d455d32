"""Builds modules from local programs: layers like those of any run, with the sizes of this rank and collectives inside."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn

from meshwright.capture.cut.stage_modules import Captured, GraphBuilder, Prelude, States, changes_late, free_graph, free_reads
from meshwright.capture.shard.layouts.layout import length
from meshwright.capture.shard.layouts.steps import Local, Offset, Step, StepKind
from meshwright.capture.shard.settle import LocalProgram, Settled
from meshwright.capture.trace.graph import NodeKind, Ref, mapped
from meshwright.capture.trace.operations import function_of
from meshwright.errors import MeshwrightError
from meshwright.tensor import local_ops
from meshwright.tensor.global_dropout import GlobalDropout
from meshwright.tensor.moves import Moved
from meshwright.tensor.wires.wires import Wires


class LocalBuilder(GraphBuilder):
    """Builds an fx graph step by step."""

    def __init__(self, settled: Settled, states: States, wires: Wires, device: torch.device | None = None) -> None:
        super().__init__(settled.line, states, device)
        self.settled, self.wires = settled, wires
        self.values: dict[str, fx.Node] = {}
        self.moved: frozenset[str] = frozenset()
        nodes = [node for node in self.line.flat.nodes if node.kind is NodeKind.STATE and node.target in states.parameters]
        self.parameters = {states.first[states.parameters[node.target]]: node for node in nodes}

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Local):
            return self.value_of(leaf.name)
        if isinstance(leaf, Offset):
            index = 0
            for axis in leaf.axes:
                index = index * self.wires.grid.size((axis,)) + self.wires.at[axis]
            return index * leaf.block
        return super()._leaf(leaf)

    def value_of(self, name: str) -> fx.Node:
        """Returns the fx node of a step, or of an input."""
        if name in self.values:
            return self.values[name]
        self.read((Ref(name),))
        return self.made[name]

    def state(self, argument: Any) -> nn.Parameter | None:
        """Returns the parameter that a reference points to; None if the node reads a moved parameter."""
        return None if isinstance(argument, Ref) and argument.name in self.moved else super().state(argument)

    def run(self, step: Step) -> None:
        """Adds a step."""
        match step.kind:
            case StepKind.OPERATION:
                self.values[step.name] = self._call(function_of(step.target), step)
            case StepKind.LOCAL:
                self.values[step.name] = self._call(getattr(local_ops, step.target), step)
            case StepKind.MOVE:
                assert step.move is not None
                self.values[step.name] = self._module(step, Moved(step.move, self.wires, weight=step.weight, learns=step.learns))
            case StepKind.DROPOUT:
                self.values[step.name] = self._module(step, self._dropout(step))
            case StepKind.PARAMETER:
                node = self.parameters[step.target]
                if node.name not in self.made:
                    self.attribute(node)
                self.values[step.name] = self.made[node.name]
            case StepKind.NATIVE:
                self._native(step)

    def _call(self, function: Any, step: Step) -> fx.Node:
        args, kwargs = mapped(step.args, self._leaf), mapped(dict(step.kwargs), self._leaf)
        return self.graph.call_function(function, args, kwargs)

    def _module(self, step: Step, module: nn.Module) -> fx.Node:
        name = f"at_{len(self.root)}_{step.name}"
        self.root[name] = module
        return self.graph.call_module(name, mapped(step.args, self._leaf))

    def _dropout(self, step: Step) -> GlobalDropout:
        assert step.layout is not None
        factors = tuple((factor.size, factor.axes) for dim in step.layout for factor in dim)
        shape = tuple(length(dim) for dim in step.layout)
        more = dict(step.kwargs)
        return GlobalDropout(more["rate"], factors, shape, self.wires, rows_dim=more["rows_dim"])

    def _native(self, step: Step) -> None:
        assert step.node is not None
        before = dict(self.made)
        self.made |= {name: self.value_of(given.name) for name, given in step.kwargs}
        self.moved = frozenset(name for name, _ in step.kwargs if self.made[name].op != "get_attr")
        self.add(step.node)
        self.moved = frozenset()
        self.values[step.name] = self.made[step.node.name]
        self.made = before | {step.node.name: self.made[step.node.name]}


def shard_layers(settled: Settled, states: States, wires: Wires, device: torch.device | None = None) -> list[Captured]:
    """Returns the layers of a settled model on one rank. One prelude computes all values that depend on no parameter."""
    line, places = settled.line, list(pairwise(settled.places))
    if changes_late(line):
        raise MeshwrightError(
            "the model writes in place into values that earlier layers have read, which tensor modes do not support yet"
        )
    free = {(a, b): free_reads(line, a, b) for a, b in places}
    every = tuple(dict.fromkeys(name for names in free.values() for name in names))
    body, columns, names = free_graph(line, every, states, device) if every else (None, (), {})
    prelude = Prelude(body, columns, every) if body is not None else None
    found = []
    for (first, last), program in zip(places, settled.programs, strict=True):
        layer = _layer(LocalBuilder(settled, states, wires, device), program, _columns(settled, first, last), free[first, last])
        found.append(layer if prelude is None else layer.after(prelude, free[first, last], names))
    return found


def _columns(settled: Settled, first: int, last: int) -> tuple[str, ...]:
    """Returns the columns that a range of operations reads."""
    flat = settled.line.flat
    reads = dict.fromkeys(name for node in settled.line.work[first:last] for name in node.reads)
    return tuple(name for name in reads if flat.by_name[name].kind is NodeKind.COLUMN and not settled.line.is_written(name))


def _layer(builder: LocalBuilder, program: LocalProgram, columns: Sequence[str], free: Sequence[str]) -> Captured:
    for name in (*program.given, *columns, *free):
        builder.made[name] = builder.graph.placeholder(name)
    for step in program.steps:
        builder.run(step)
    builder.graph.output(tuple(builder.value_of(name) for name in program.results))
    direct = tuple(builder.line.flat.by_name[name].target for name in columns)
    return Captured(builder.module(), direct, builder.names, inplace=False)
