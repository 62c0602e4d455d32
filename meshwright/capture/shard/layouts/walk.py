"""One pass over the operations of a flat graph: replaces them by local operations, with moves where layouts change.

Every value has a layout. Columns and values that depend on no parameter (*free* values) are whole and have no gradient; readers
take slices of them. Values that depend only on parameters and free values (position embeddings, relative biases) are *light*:
they are computed where they are read, in the layout of the reader, so that their parameters are cut. All other values have the
layout that their rule gave them, and are moved if a reader needs another.

If a value is whole over an axis, its gradient is whole too, and equal on all ranks. Work that is cut over an axis makes partial
gradients. So a reader declares the axes that cut its work, and a value that is whole over one of them is read through a `copy`
move, whose adjoint is a sum. Only parameters keep partial gradients, until gradients are reduced.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from meshwright.capture.shard.layouts.bound_arguments import positional
from meshwright.capture.shard.layouts.in_place import read_again
from meshwright.capture.shard.layouts.layout import Dim, Layout, axes_of, bare, length, local_shape, text, whole
from meshwright.capture.shard.layouts.refusals import MisfitError, NoRuleError, SharedParameterError, indivisible, no_rule
from meshwright.capture.shard.layouts.relay import relaid
from meshwright.capture.shard.layouts.steps import ExtraMove, Local, ParameterCut, Step, StepKind
from meshwright.capture.shard.layouts.walk_task import Findings, Made, Task, locals_in, operation
from meshwright.capture.trace.graph import Node, NodeKind, Ref, mapped, refs
from meshwright.capture.trace.operations import CHECKS, is_one_of
from meshwright.errors import MeshwrightError
from meshwright.tensor.moves import MoveKind

_LOGGER = logging.getLogger(__name__)


class ShardWalk:
    """A pass over some nodes. The layouts of their inputs are given."""

    def __init__(self, task: Task, layouts: dict[str, Layout]) -> None:
        self.task, self.layouts = task, layouts
        self.line, self.flat, self.sizes, self.grid, self.scheme = task.line, task.line.flat, task.sizes, task.grid, task.scheme
        self.program: list[Step] = []
        self.found = Findings()
        self.here: dict[str, str] = {}
        self.pieces: dict[str, tuple[str, list[Layout]]] = {}
        self.whole_weights: dict[Any, str] = {}
        self._again: dict[Any, str] = {}
        self._steps: dict[str, Step] = {}
        self._node: Node | None = None

    # what is known of a value

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the whole shape of a value."""
        return self.sizes.shapes[name]

    def is_parameter(self, name: str) -> bool:
        """Whether it is a parameter."""
        node = self.flat.by_name[name]
        return node.kind is NodeKind.STATE and node.target in self.line.parameters

    def parameter(self, name: str) -> str:
        """Returns the first name of a parameter."""
        return self.task.ties[self.flat.by_name[name].target]

    def is_free(self, name: str) -> bool:
        """Whether it depends on no parameter."""
        return name in self.line.free

    def is_soft(self, name: str) -> bool:
        """Whether it can be made in any layout: light values, parameters, and buffers that change."""
        return self.is_free(name) or name in self.task.light or self.flat.by_name[name].kind is NodeKind.STATE

    def layout(self, name: str) -> Layout:
        """Returns the layout of a value."""
        return whole(self.shape(name)) if self.is_soft(name) else self.layouts[name]

    def learns(self, name: str) -> bool:
        """Whether it needs a gradient."""
        return name in self.task.learning

    def wide(self, axes: Iterable[str]) -> frozenset[str]:
        """Returns the axes with more than one rank."""
        return frozenset(self.grid.wide(axes))

    def tensors(self, tree: Any) -> list[str]:
        """Returns the tensors among arguments."""
        return [ref.name for ref in refs(tree) if ref.name in self.sizes.shapes]

    def plain(self, tree: Any) -> Any:
        """Returns arguments that contain no tensors, with numbers of this batch."""
        return mapped(tree, lambda leaf: self.sizes.numbers[leaf.name] if isinstance(leaf, Ref) else leaf)

    # steps

    def step(
        self,
        kind: StepKind,
        target: str,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        layout: Layout | None = None,
        learns: bool = True,
        **more: Any,
    ) -> str:
        """Adds a step and returns its name."""
        base = self._node.name if self._node is not None else "given"
        name = f"{base}__{len(self.program)}"
        shape = more.pop("shape", local_shape(layout, self.grid) if layout is not None else None)
        path = self._node.path if self._node is not None else ""
        rest = tuple((kwargs or {}).items())
        learns = learns and (self._node is None or self.learns(self._node.name))
        self._steps[name] = made = Step(name, kind, target, tuple(args), rest, shape, learns, path, layout=layout, **more)
        self.program.append(made)
        return name

    def call(self, target: str, args: Any, layout: Layout, kwargs: Mapping[str, Any] | None = None) -> Made:
        """Adds a torch operation on local tensors."""
        learns = any(self.program_learns(arg.name) for arg in locals_in((args, kwargs or {})))
        return Made(self.step(StepKind.OPERATION, target, args, kwargs, layout=layout, learns=learns), layout)

    def local(self, target: str, args: Any, layout: Layout) -> Made:
        """Adds a function of `tensor/local_ops.py` on local tensors."""
        learns = any(self.program_learns(arg.name) for arg in locals_in(args))
        return Made(self.step(StepKind.LOCAL, target, args, layout=layout, learns=learns), layout)

    def program_learns(self, step: str) -> bool:
        """Whether a step or an input needs a gradient."""
        made = self._steps.get(step)
        return made.learns if made is not None else self.learns(step)

    # reading

    def read(self, name: str, want: Layout | None = None, work: Iterable[str] = (), *, planned: bool = False) -> Local:
        """Returns a value in a layout, for work that is cut over these axes. Moves are reported unless the scheme plans them."""
        want = self.layout(name) if want is None else want
        missing = self.wide(work) - axes_of(want) if self.learns(name) else frozenset[str]()
        key = (name, bare(want, self.grid), missing)
        if key not in self._again:
            count = len(self.program)
            self._again[key] = self._read(name, want, missing)
            if not planned and not self.is_soft(name):
                self._report(self.program[count:])
        return Local(self._again[key])

    def _report(self, steps: list[Step]) -> None:
        """Reports changes of layout that the scheme does not plan."""
        kinds = [str(step.move.kind) for step in steps if step.move is not None and step.move.kind is not MoveKind.COPY]
        if kinds and self._node is not None:
            self.found.extra.append(ExtraMove(self._node.path, self._node.target, ", ".join(kinds)))

    def _read(self, name: str, want: Layout, missing: frozenset[str]) -> str:
        if self.is_parameter(name):
            self.own(name, want, missing)
            return self.shared(name, want, missing) if self.parameter(name) in self.task.shared else self.stored(name)
        if name in self.task.light:
            node = self.flat.by_name[name]
            return self.task.pushes[operation(node)](self, node, want, missing)
        source = self.here.get(name, name)
        return self.moved(source, self.layout(name), want, missing=missing, path=name)

    def moved(
        self,
        source: str,
        have: Layout,
        want: Layout,
        *,
        missing: Iterable[str] = (),
        parts: Iterable[str] = (),
        path: str = "",
        weight: bool = False,
    ) -> str:
        """Returns the value of a step in another layout. `parts` are the axes over which it is still a partial sum."""
        learns = self.program_learns(source)
        if any(_repads(h, w) for h, w in zip(bare(have, self.grid), bare(want, self.grid), strict=True)):
            plain = whole(length(dim) for dim in have)  # padding is removed before new cuts
            source = self.moved(source, have, plain, missing=set(missing) - axes_of(want), parts=parts, path=path, weight=weight)
            have, parts = plain, ()
            missing = set(missing) & axes_of(want)
        moves = relaid(have, want, self.grid, missing=self.wide(missing), parts=self.wide(parts), name=path)
        for target, move, args in moves:
            if move is None:
                source = self.step(StepKind.OPERATION, target, (Local(source), *args), learns=learns, shape=None)
            else:
                source = self.step(
                    StepKind.MOVE, str(move.kind), (Local(source),), move=move, learns=learns, shape=move.made, weight=weight
                )
        return source

    def own(self, name: str, layout: Layout, unsummed: Iterable[str]) -> None:
        """Stores a parameter in a layout. Its gradient is a partial sum over some axes."""
        first = self.parameter(name)
        if first in self.task.shared:
            if first not in self.found.cuts:
                self.divisible(layout, first)
                self.found.cuts[first] = ParameterCut(layout, frozenset())
            return
        cut = ParameterCut(layout, self.wide(unsummed))
        self.divisible(layout, first)
        before = self.found.cuts.setdefault(first, cut)
        if bare(before.layout, self.grid) != bare(cut.layout, self.grid) or before.unsummed != cut.unsummed:
            raise SharedParameterError(first)

    def shared(self, name: str, want: Layout, missing: Iterable[str]) -> str:
        """Reads a parameter whose readers need different layouts: it is moved to each, and the adjoints sum its gradient."""
        have = self.found.cuts[self.parameter(name)].layout
        return self.moved(self.stored(name), have, want, missing=missing, path=self.parameter(name))

    def stored(self, name: str) -> str:
        """Returns this rank's part of a parameter."""
        first = self.parameter(name)
        if ("parameter", first) not in self._again:
            layout = self.found.cuts[first].layout
            self._again["parameter", first] = self.step(StepKind.PARAMETER, first, layout=layout, learns=self.learns(name))
        return self._again["parameter", first]

    def divisible(self, layout: Layout, what: str) -> None:
        """Raises if the sizes of a layout do not divide."""
        for dim in layout:
            for factor in dim:
                if factor.size % self.grid.size(factor.axes):
                    raise indivisible(what, factor.size, factor.axes, self.grid)

    # nodes

    def node(self, node: Node) -> None:
        """Adds an operation of the flat graph."""
        self._node = node = positional(node)
        if node.name in self.sizes.unknown:
            raise MeshwrightError(
                self.sizes.unknown[node.name], fix="a tensor mode needs sizes that follow from the shapes of the batch"
            )
        if node.name in self.sizes.numbers or node.name in self.task.light or is_one_of(node.target, CHECKS):
            return
        made = self._made(node)
        if made is not None:
            if tuple(map(length, made.layout)) != self.shape(node.name):
                raise MisfitError(node.name, f"it gives {text(made.layout)} instead of {self.shape(node.name)}")
            self.divisible(made.layout, node.path or node.name)
            self.here[node.name], self.layouts[node.name] = made.step, made.layout

    def _made(self, node: Node) -> Made | None:
        replicated = any(node.path == part or node.path.startswith(f"{part}.") for part in self.task.replicate)
        if replicated or node.changes:  # operations on statistics and counters of norms write into the buffer itself
            return self.native(node)
        made, problem = self._ruled(node)
        if made is not None or node.name in self.pieces:
            return made
        names = self.tensors((node.args, node.kwargs))
        cut = any(axes_of(bare(self.layout(name), self.grid)) for name in names)
        taken = any(ref.name in self.pieces for ref in refs((node.args, node.kwargs)))
        if taken or (cut and any(map(self.is_parameter, names)) and operation(node) not in self.task.whole):
            raise problem or no_rule(node)
        return self.native(node)

    def _ruled(self, node: Node) -> tuple[Made | None, NoRuleError | None]:
        """Returns the result of the rule of an operation, or why the rule does not apply."""
        if node.name in self.task.misfits:
            return None, no_rule(node, self.task.misfits[node.name])
        known, rule = len(self.found.extra), self.task.rules.get(operation(node))
        try:
            return rule(self, node) if rule is not None else None, None
        except NoRuleError as error:
            problem = error
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            problem = no_rule(node, f"its rule does not know these arguments ({type(error).__name__}: {error})")
            _LOGGER.debug("%s", problem, exc_info=True)
        del self.found.extra[known:]
        self.pieces.pop(node.name, None)
        return None, problem

    def native(self, node: Node) -> Made | None:
        """Runs a node on whole values, equally on every rank. Inputs that are cut are gathered, as extra moves."""
        names = self.tensors((node.args, node.kwargs))
        given = {name: self.read(name, whole(self.shape(name))) for name in names}
        if node.writes and not node.changes:
            if read_again(self.flat, node):
                raise no_rule(node, "it works in place on a value that is read again")
            for name in names:
                if not set(self.flat.by_name[name].memory).isdisjoint(node.writes):
                    given[name] = Local(self.call("aten.clone.default", (given[name],), whole(self.shape(name))).step)
        for name in filter(self.is_parameter, names):
            self.found.replicated.setdefault(self.parameter(name), node.target)
        layout = whole(self.shape(node.name)) if node.name in self.sizes.shapes else None
        numbers = self.sizes.numbers
        plain = mapped((node.args, node.kwargs), lambda x: numbers.get(x.name, x) if isinstance(x, Ref) else x)
        called = replace(node, args=plain[0], kwargs=plain[1])
        learns = self.learns(node.name)
        step = self.step(StepKind.NATIVE, node.target, given.values(), given, layout=layout, node=called, learns=learns)
        self.here[node.name] = step
        return Made(step, layout) if layout is not None else None


def _repads(have: Dim, want: Dim) -> bool:
    """Whether a padded dimension is needed with other padding."""
    if have == want or not axes_of((want,)):
        return False
    sizes = [[(factor.size, factor.real) for factor in dim] for dim in (have, want)]
    return sizes[0] != sizes[1] and any(factor.real is not None for factor in (*have, *want))
