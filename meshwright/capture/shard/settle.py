"""Settles a flat graph under a tensor mode: chooses layouts and parameter cuts, and makes local programs and a report.

The result is data and is equal on all ranks.

settled = settle(line, ties, scheme, grid)       one program for the whole model
settled = settle(..., places=places)             one per layer between these places
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

from meshwright.capture.cut.liveness import Line
from meshwright.capture.shard.layouts.dry_steps import DryRun
from meshwright.capture.shard.layouts.layout import Layout, local_shape, whole
from meshwright.capture.shard.layouts.learning_values import learning_values
from meshwright.capture.shard.layouts.refusals import MisfitError, SharedParameterError, indivisible, no_rule
from meshwright.capture.shard.layouts.sizes import Sizes, example_sizes
from meshwright.capture.shard.layouts.steps import ExtraMove, ParameterCut, Product, Step, StepKind
from meshwright.capture.shard.layouts.walk import ShardWalk
from meshwright.capture.shard.layouts.walk_task import Findings, Task, locals_in, operation
from meshwright.capture.shard.layouts.without_writes import without_writes
from meshwright.capture.shard.rules.rule_table import PUSHES, RULES, WHOLE
from meshwright.capture.shard.rules.rule_tables import is_table, token_values
from meshwright.capture.trace.graph import Node, NodeKind, refs
from meshwright.costs.declared import CollectiveKind, Phase, SentWords, transfer
from meshwright.costs.scheme import Grid, Save, Scheme
from meshwright.errors import MeshwrightError, did_you_mean


@dataclass(frozen=True)
class LocalProgram:
    """The program of a rank for a range of operations. Inputs and outputs have the names of the flat graph."""

    steps: tuple[Step, ...]
    given: tuple[str, ...]
    results: tuple[str, ...]
    """The steps that compute the outputs."""
    layouts: tuple[Layout, ...]
    """The layouts of the outputs."""


@dataclass(frozen=True)
class Settled:
    """A model under a mode. `cuts` are by the first name of a parameter."""

    line: Line
    scheme: Scheme
    grid: Grid
    sizes: Sizes
    places: tuple[int, ...]
    programs: tuple[LocalProgram, ...]
    layouts: dict[str, Layout]
    cuts: dict[str, ParameterCut]
    products: tuple[Product, ...]
    extra: tuple[ExtraMove, ...]
    replicated: dict[str, str]
    """Parameters that stay whole on every rank because an operation has no rule, and that operation."""

    def transfers(self) -> list[SentWords]:
        """Returns the transfers of a rank, forward and backward."""
        return [t for number in range(len(self.programs)) for t in self.layer_transfers(number)]

    def layer_transfers(self, number: int, *, weights: bool = True) -> list[SentWords]:
        """Returns the transfers of a rank for a layer. `weights=False` leaves out weights, which a second half shares.

        Only values that the loss (the first result) depends on have gradients.
        """
        found, saves = list[SentWords](), self.scheme.save is Save.SHARDS
        for step in self.programs[number].steps:
            if step.move is not None and (weights or not step.weight):
                learns = step.learns and step.name in self._leading[number]
                found += step.move.transfers(self.grid, learns=learns, again=saves and (step.weight or step.learns))
        return found

    @cached_property
    def _leading(self) -> list[set[str]]:
        """Returns for each program the steps that the loss depends on through differentiable steps."""
        found: list[set[str]] = []
        wanted = set(self.programs[-1].results[:1])
        for number in range(len(self.programs) - 1, -1, -1):
            program, here = self.programs[number], set[str]()
            for step in reversed(program.steps):
                tuples = {f"tuple {step.node.name}"} if step.node is not None else set()
                if step.learns and not wanted.isdisjoint({step.name} | tuples):
                    here.add(step.name)
                    wanted |= _read_by(step)
            found.insert(0, here)
            if number:
                pairs = zip(self.programs[number - 1].results, program.given, strict=True)
                wanted = {result for result, given in pairs if given in wanted}
        return found

    def sums(self) -> list[SentWords]:
        """Returns the transfers of a rank in the reduction of parameter gradients."""
        return [found for cut in self.cuts.values() for found in self._sum(cut)]

    def sum_words(self) -> dict[str, Fraction]:
        """Returns the words of `sums` for each parameter."""
        return {name: sum((found.words for found in self._sum(cut)), Fraction(0)) for name, cut in self.cuts.items()}

    def _sum(self, cut: ParameterCut) -> list[SentWords]:
        axes, words = self.grid.wide(cut.unsummed), math.prod(local_shape(cut.layout, self.grid))
        return [transfer(Phase.SYNC, CollectiveKind.TOTAL, axes, words, self.grid)] if axes else []


def settle(
    line: Line,
    ties: Mapping[str, str],
    scheme: Scheme,
    grid: Grid,
    *,
    sizes: Sizes | None = None,
    places: Sequence[int] | None = None,
    replicate: Sequence[str] = (),
    frozen: Collection[str] = (),
    whole_outputs: bool = False,
) -> Settled:
    """Settles the layouts of a model for batches of one shape.

    Args:
        line: The flat graph of the model, with its parameters known.
        ties: The first name of every parameter, by all of its names.
        scheme: Which axes of the grid cut which dimensions.
        grid: The ranks of the box.
        sizes: The sizes for one batch; those of the example if not given.
        places: Where layers begin and end; one layer if not given.
        replicate: Modules that run whole on every rank.
        frozen: Parameters that need no gradient, by their first names.
        whole_outputs: Gather the outputs of the model, so that every rank has all of them.

    Raises:
        MeshwrightError: A size does not divide, or an operation has no rule.
    """
    _refuse_written_buffers(line)
    sizes = sizes or example_sizes(line.flat)
    places = tuple(places) if places is not None else (0, len(line.work))
    line, sizes, places = without_writes(line, sizes, places)
    _known(line, replicate)
    scheme = _fitting(scheme, grid, sizes.rows)
    values = token_values(line.flat.nodes, line.needs)
    users: dict[str, list[Node]] = {}
    for node in line.work:
        for name in node.reads:
            users.setdefault(name, []).append(node)
    light = _light(line, sizes, scheme, grid, values, places, replicate)
    kept = {name: tuple(nodes) for name, nodes in users.items()}
    learning = learning_values(line, {name for name, first in ties.items() if first not in frozen})
    task = Task(line, sizes, scheme, grid, ties, tuple(replicate), RULES, PUSHES, light, kept, learning, values, WHOLE)
    while True:
        try:
            return _walked(task, places, whole_outputs=whole_outputs)
        except SharedParameterError as error:  # moved to each reader instead
            if error.parameter in task.shared:
                raise
            task = replace(task, shared=task.shared | {error.parameter})
        except MisfitError as error:  # runs on whole values instead
            if error.node in task.misfits:
                raise no_rule(line.flat.by_name[error.node], error.why) from error
            task = replace(task, misfits={**task.misfits, error.node: error.why})


def _refuse_written_buffers(line: Line) -> None:
    """Raises if the forward writes into a buffer, besides running statistics of norms and counters that nothing reads.

    Local programs make new tensors in place of writes, so that the buffer would keep its old value.
    """
    readers: dict[str, list[Node]] = {}
    for node in line.flat.nodes:
        for name in node.reads:
            readers.setdefault(name, []).append(node)
    states = {node.target: node for node in line.flat.nodes if node.kind is NodeKind.STATE}
    for node in line.flat.nodes:
        for buffer in node.changes:
            if operation(node).endswith("_norm"):
                continue
            state = states.get(buffer)
            counts = state is not None and state.size is not None and not state.size.learns
            if not counts or any(buffer not in other.changes for other in readers.get(state.name if state else "", ())):
                where = node.path or "the model"
                raise MeshwrightError(
                    f"{node.target} in {where} writes into {buffer}: tensor modes do not support that yet", fix="tp=1"
                )


def _walked(task: Task, places: Sequence[int], *, whole_outputs: bool) -> Settled:
    """Returns one program for each range between places."""
    line, layouts, found, programs = task.line, dict[str, Layout](), Findings(), list[LocalProgram]()
    for first, last in pairwise(places):
        walk = ShardWalk(task, layouts)
        walk.found = found
        for node in line.work[first:last]:
            walk.node(node)
        program = _program(line, walk, first, last, whole_outputs=whole_outputs)
        if problem := DryRun(task, layouts).failing(program.steps):
            raise MisfitError(problem[0].name.rpartition("__")[0], problem[1])
        programs.append(program)
    lists = tuple(found.products), tuple(found.extra)
    scheme, grid = task.scheme, task.grid
    return Settled(line, scheme, grid, task.sizes, tuple(places), tuple(programs), layouts, found.cuts, *lists, found.replicated)


def _program(line: Line, walk: ShardWalk, first: int, last: int, *, whole_outputs: bool) -> LocalProgram:
    ends = last == len(line.work)
    names = [ref.name for ref in refs(line.flat.result)] if ends else list(line.crossings[last])
    if ends and whole_outputs:
        layouts = tuple(whole(walk.shape(name)) for name in names)
        results = tuple(walk.read(name, want, planned=True).name for name, want in zip(names, layouts, strict=True))
    else:
        results = tuple(walk.read(name).name for name in names)
        layouts = tuple(walk.layout(name) for name in names)
    return LocalProgram(_needed(walk.program, results), line.crossings[first], results, layouts)


def _needed(steps: Sequence[Step], results: Sequence[str]) -> tuple[Step, ...]:
    """Returns the steps that a result depends on."""
    wanted, found = set(results), []
    for step in reversed(steps):
        native = step.node if step.kind is StepKind.NATIVE else None
        if step.name in wanted or (native is not None and (native.changes or f"tuple {native.name}" in wanted)):
            found.append(step)
            wanted |= _read_by(step)
    return tuple(reversed(found))


def _read_by(step: Step) -> set[str]:
    """Returns the steps that a step reads, and the nodes with several results, which have other names."""
    tuples = {f"tuple {name}" for name in step.node.reads} if step.node is not None else set()
    return {local.name for local in locals_in((step.args, step.kwargs))} | tuples


def _fitting(scheme: Scheme, grid: Grid, rows: int) -> Scheme:
    """Returns the scheme for this many rows. If they do not divide, axes of the residual stream cut the sequence instead."""
    if rows % grid.size(scheme.residual.rows) and scheme.movable:
        scheme = scheme.along_sequence()
    for spread in (scheme.residual, scheme.inner):
        if rows % grid.size(spread.rows):
            raise indivisible("the rows of a microbatch", rows, spread.rows, grid)
    return scheme


def _known(line: Line, replicate: Sequence[str]) -> None:
    paths = {node.path for node in line.flat.nodes}
    for name in replicate:
        if not any(path == name or path.startswith(f"{name}.") for path in paths):
            raise MeshwrightError(
                f"replicate names {name!r}, which is not a module of the captured model{did_you_mean(name, paths)}",
                fix="a module that meshwright inspect lists, or leave it out",
            )


def _light(
    line: Line,
    sizes: Sizes,
    scheme: Scheme,
    grid: Grid,
    values: frozenset[str],
    places: tuple[int, ...],
    replicate: Sequence[str],
) -> frozenset[str]:
    """Returns the values that depend only on parameters and free values and that stay inside one layer."""
    crossing = {name for place in places[1:-1] for name in line.crossings[place]}
    found: set[str] = set()
    for node in line.work:
        if node.random or node.writes or node.name not in sizes.shapes or operation(node) not in PUSHES or node.name in crossing:
            continue
        if any(node.path == part or node.path.startswith(f"{part}.") for part in replicate):
            continue
        names = [name for name in node.reads if name in sizes.shapes]
        soft = [name in line.free or name in found or _is_parameter(line, name) for name in names]
        if not all(soft) or not names or (operation(node) == "aten.embedding" and is_table(node, sizes, scheme, grid, values)):
            continue
        found.add(node.name)
    return frozenset(found)


def _is_parameter(line: Line, name: str) -> bool:
    node = line.flat.by_name[name]
    return node.kind is NodeKind.STATE and node.target in line.parameters
