"""Halves of a microbatch: the number of rows of each, and whether a model computes the same if its rows run in two halves.

A model can run in halves if every operation that depends on parameters works on each row separately, except for the loss, which
is a mean or a sum over rows. Values that depend only on columns are computed for all rows and then cut, so they need no check.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.capture.shard.layouts.bound_arguments import bound
from meshwright.capture.shard.layouts.steps import StepKind
from meshwright.capture.shard.layouts.walk_task import operation
from meshwright.capture.shard.rules.rule_along import BY_DIM
from meshwright.capture.shard.rules.rule_elements import ELEMENTS
from meshwright.capture.shard.settle import LocalProgram, Settled
from meshwright.capture.trace.graph import Node, Ref, refs
from meshwright.capture.trace.operations import CHECKS, is_one_of
from meshwright.costs.scheme import Grid, Scheme
from meshwright.errors import MeshwrightError

MEAN, SUM = 1, 2
"""torch's numbers for the reductions of a loss."""

_RESHAPES = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
_FREE = ("permute", "transpose", "t", "numpy_T", "T", "mT", "swapaxes", "expand", "expand_as", "dropout", "stack")
_BY_ROW = ("linear", "addmm", "mm", "matmul", "bmm", "baddbmm", "embedding")
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_KNOWN = frozenset((*BY_DIM, *_CONVOLUTIONS, "gather", "repeat_interleave"))
_DIM = {
    **dict.fromkeys(("slice", "narrow", "select", "cumsum", "cat", "unbind"), (1, 0)),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), (2, 0)),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), (1, -1)),
}
"""Operations along a dimension: which argument it is, and its default."""
_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd")
_ELEMENT_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits")
_SCALINGS = ("aten.mul", "aten.div", "aten.neg", "aten.to", "aten._to_copy", "aten.clone", "aten.alias", "aten.detach")


@dataclass(frozen=True, slots=True)
class RowLoss:
    """How the only reduction over rows works: a sum, a mean over the labels that count, or a mean over rows."""

    adds: bool = False
    counts_labels: bool = False


def half_rows(rows: int, scheme: Scheme, grid: Grid) -> tuple[int, int] | None:
    """Returns the rows of two halves, each divisible by the cuts of rows, the larger half first; None if that is not possible."""
    fixed = tuple(axis for axis in scheme.residual.rows if axis not in scheme.movable)
    unit = math.lcm(grid.size(fixed), grid.size(scheme.inner.rows))
    count = rows // unit
    if rows % unit or count < 2:
        return None
    first = (count + 1) // 2 * unit
    return first, rows - first


def zero_where_nothing_counts(half: Settled) -> Settled:
    """Makes the loss of a half without labels 0 instead of 0 / 0."""
    programs = []
    for program in half.programs:
        means = [step.kind is StepKind.LOCAL and step.target == "loss_of" for step in program.steps]
        steps = tuple(replace(s, target="loss_or_zero") if mean else s for s, mean in zip(program.steps, means, strict=True))
        programs.append(LocalProgram(steps, program.given, program.results, program.layouts))
    return replace(half, programs=tuple(programs))


def row_loss(whole: Settled, half: Settled) -> RowLoss:
    """Returns how a model reduces its rows.

    Raises:
        MeshwrightError: The result of two halves would differ from that of all rows.
    """
    found, reduced = RowLoss(), set[str]()
    for node in whole.line.work:
        if is_one_of(node.target, CHECKS) or node.name in whole.sizes.numbers:
            continue
        if late := reduced.intersection(node.reads):
            if operation(node) not in _SCALINGS or len(whole_reads(whole, node)) != len(late) or _other_number(whole, half, node):
                raise _mixed(node)
            reduced.add(node.name)
        elif (loss := _reduction(whole, node)) is not None:
            if reduced:
                raise _mixed(node, "a second reduction over rows")
            found = loss
            reduced.add(node.name)
        elif _reads_pairs(whole, half, node):
            raise _mixed(node, "it reads a value with a place for every two rows")
        elif not _by_row(whole, node) or (operation(node) in ELEMENTS and _other_number(whole, half, node)):
            raise _mixed(node)
    _refuse_places(whole, reduced)
    _refuse_draws(whole)
    return found


def _refuse_draws(whole: Settled) -> None:
    """Raises if an operation draws random numbers on whole values: for half of the rows it would draw others."""
    for step in (step for program in whole.programs for step in program.steps):
        if step.kind is StepKind.NATIVE and step.node is not None and step.node.random:
            raise _mixed(step.node, "it draws random numbers, and has no rule that draws them for all rows")


def whole_reads(settled: Settled, node: Node) -> list[str]:
    """Returns the tensors that a node reads."""
    return [name for name in node.reads if name in settled.sizes.shapes]


def _mixed(node: Node, why: str = "") -> MeshwrightError:
    where = node.path or "the model"
    name = operation(node).removeprefix("aten.")
    known = name in (*_RESHAPES, *_FREE, *_BY_ROW, *_DIM, *_KNOWN, *_LOSSES, *_ELEMENT_LOSSES) or f"aten.{name}" in ELEMENTS
    why = why or ("rows are mixed" if known else "nothing says that it works on each row by itself")
    return MeshwrightError(
        f"overlap=True runs a microbatch as two halves, and {node.target} in {where} may give another result then: {why}",
        fix="overlap=False",
    )


def _carrying(settled: Settled, node: Node) -> list[str]:
    return [name for name in whole_reads(settled, node) if name in settled.sizes.grows]


def _reduction(settled: Settled, node: Node) -> RowLoss | None:
    """Returns how a node reduces rows; None if it does not."""
    name, made = operation(node).removeprefix("aten."), node.name in settled.sizes.grows
    if made or node.name not in settled.sizes.shapes or not _carrying(settled, node):
        return None
    if name in _LOSSES:
        kind = node.argument(3, "reduction", MEAN)
        return RowLoss(adds=kind == SUM, counts_labels=kind == MEAN) if kind in (MEAN, SUM) else None
    if name in _ELEMENT_LOSSES:
        kind = node.argument(4 if "binary" in name else 2, "reduction", MEAN)
        return RowLoss(adds=kind == SUM) if kind in (MEAN, SUM) else None
    shape = settled.sizes.shapes[node.name]
    return RowLoss(adds=name == "sum") if name in ("mean", "sum") and not shape else None


def _by_row(settled: Settled, node: Node) -> bool:
    """Whether each row of the result depends only on the same row of the inputs, or no input has rows."""
    carrying, grows, shapes = _carrying(settled, node), settled.sizes.grows, settled.sizes.shapes
    name = operation(node).removeprefix("aten.")
    if node.target == "operator.getitem":
        return True  # an output of a split, which was checked
    if (node.random and name != "dropout" and name != "scaled_dot_product_attention") or node.changes:
        return False
    if name == "embedding" and (node.argument(3, "scale_grad_by_freq", False) or node.args[0].name in carrying):
        return False  # its gradient counts ids over all rows, or rows are looked up
    if not carrying:
        return node.name not in grows or name in _FREE
    if name in _DIM:
        place, default = _DIM[name]
        dim, source = node.argument(place, "dim", default), carrying[0]
        same = shapes.get(node.name) == shapes[source] and name in ("slice", "narrow")  # a slice of all rows
        return same or (isinstance(dim, int) and all(dim % len(shapes[each]) != grows[each] for each in carrying))
    if name in BY_DIM:
        return _along_others(settled, node)
    if node.name not in grows:
        return False
    if name == "gather":  # a row of the result reads its own row of both
        dim, rank = node.argument(1, "dim", 0), len(shapes[node.name])
        tensors = whole_reads(settled, node)
        return isinstance(dim, int) and all(grows.get(each) == grows[node.name] != dim % rank for each in tensors)
    at, rank = grows[node.name], len(shapes[node.name])
    if f"aten.{name}" in ELEMENTS:
        return all(len(shapes[each]) - grows[each] == rank - at for each in carrying)
    if name in _RESHAPES:
        return math.prod(shapes[carrying[0]][: grows[carrying[0]]]) == math.prod(shapes[node.name][:at])
    if name == "scaled_dot_product_attention":
        return all(grows[each] < len(shapes[each]) - 2 for each in carrying)
    if name in _CONVOLUTIONS:
        return carrying == [node.args[0].name] and grows[carrying[0]] == 0 == at  # rows are neither channels nor places
    if name == "repeat_interleave":
        dim = node.argument(2, "dim", None)
        return isinstance(node.args[1], int) and isinstance(dim, int) and dim % rank != grows[carrying[0]]
    if name in ("layer_norm", "rms_norm"):
        return at < rank - len(node.args[1])
    if name in ("mean", "sum", "amax", "amin"):
        return True  # over other dimensions: its result has rows
    return name in (*_FREE, *_BY_ROW, *_LOSSES, *_ELEMENT_LOSSES)


def _along_others(settled: Settled, node: Node) -> bool:
    """Whether an operation along dimensions does not work along the rows."""
    given, [source, *others] = bound(node), whole_reads(settled, node)
    dims = given.get("dim", given.get("dims", given.get("dimension")))
    dims = dims if isinstance(dims, list | tuple) else [dims]
    if others or not dims or not all(isinstance(dim, int) for dim in dims):
        return False
    return settled.sizes.grows[source] not in [dim % len(settled.sizes.shapes[source]) for dim in dims]


def _reads_pairs(whole: Settled, half: Settled, node: Node) -> bool:
    """Whether it reads a value that grows with the rows in several dimensions, such as a mask of pairs of rows."""
    shapes, halved = whole.sizes.shapes, half.sizes.shapes
    return any(shapes[name] != halved.get(name) and name not in whole.sizes.grows for name in whole_reads(whole, node))


def _other_number(whole: Settled, half: Settled, node: Node) -> bool:
    """Whether it computes with a number that differs for a half, such as the number of rows."""
    names = [ref.name for ref in refs((node.args, node.kwargs)) if isinstance(ref, Ref)]
    numbers = whole.sizes.numbers
    return any(name in numbers and numbers[name] != half.sizes.numbers[name] for name in names)


def _refuse_places(whole: Settled, reduced: set[str]) -> None:
    """Raises if the rows of a value between layers, or of an output of the model, are not in the first dimension."""
    line, sizes = whole.line, whole.sizes
    crossing: Sequence[str] = [name for place in whole.places[1:-1] for name in line.crossings[place]]
    results: Sequence[str] = [ref.name for ref in refs(line.flat.result)]
    for name in (*crossing, *results):
        shape, dim = sizes.shapes.get(name, (1,)), sizes.grows.get(name)
        loss = name in reduced and name not in crossing
        if not loss and (not shape or name in reduced or dim not in (0, None) or (dim is None and name in results)):
            raise _mixed(line.flat.by_name[name], "its rows are not in the first dimension")
