"""Elementwise operations: the result has the layout of the operand with the most cuts, and all others follow it."""

from __future__ import annotations

import math
from typing import Any

import torch

from meshwright.capture.shard.layouts.in_place import read_again
from meshwright.capture.shard.layouts.layout import Dim, Layout, axes_of, bare, length, local_shape, whole
from meshwright.capture.shard.layouts.refusals import no_rule
from meshwright.capture.shard.layouts.steps import Local, StepKind
from meshwright.capture.shard.layouts.walk import ShardWalk
from meshwright.capture.shard.layouts.walk_task import Made, operation
from meshwright.capture.trace.graph import Node, Ref, mapped
from meshwright.capture.trace.operations import is_one_of

_NAMES = (
    *("abs", "add", "addcdiv", "addcmul", "alias", "atan", "bitwise_and", "bitwise_not", "bitwise_or", "ceil"),
    *("celu", "clamp", "clamp_max", "clamp_min", "clone", "contiguous", "cos", "detach", "div", "elu", "eq"),
    *("erf", "exp", "expm1", "float", "floor", "fmod", "ge", "gelu", "gt", "hardsigmoid", "hardswish", "hardtanh"),
    *("isinf", "isnan", "le", "leaky_relu", "lerp", "lift_fresh", "lift_fresh_copy", "log", "log1p", "log_sigmoid"),
    *("logical_and", "logical_not", "logical_or", "logit", "lt", "masked_fill", "maximum", "minimum", "mish", "mul"),
    *("nan_to_num", "ne", "neg", "ones_like", "pow", "reciprocal", "relu", "relu6", "remainder", "round", "rsqrt"),
    *("rsub", "selu", "sigmoid", "sign", "silu", "sin", "softplus", "sqrt", "square", "sub", "tanh", "threshold"),
    *("to", "_to_copy", "tan", "trunc", "type_as", "where", "xlogy", "zeros_like", "full_like", "__and__", "__or__"),
)
_SINGULAR = tuple(f"aten.{name}" for name in ("log", "log1p", "logit", "pow", "reciprocal", "rsqrt", "sqrt", "tan", "xlogy"))
_DIVISIONS = tuple(f"aten.{name}" for name in ("addcdiv", "div", "fmod", "remainder"))
SHAPE_ONLY = ("aten.new_ones", "aten.new_zeros", "aten.new_full", "aten.new_empty")
ELEMENTS = tuple(f"aten.{name}" for name in _NAMES)


def broadcast(walk: ShardWalk, names: list[str], shape: tuple[int, ...]) -> Layout:
    """The layout of the result: that of the operand that is cut most, and of others where it is not cut."""
    cut = [name for name in names if not walk.is_soft(name) and axes_of(walk.layout(name))]
    order = sorted(
        cut, key=lambda name: (len(axes_of(bare(walk.layout(name), walk.grid))), math.prod(walk.shape(name))), reverse=True
    )
    found: list[Dim] = list(whole(shape))
    taken: set[str] = set()
    for name in order:
        layout = walk.layout(name)
        pad = len(shape) - len(layout)
        for at, dim in enumerate(layout):
            mine = axes_of((dim,))
            if mine and not mine & taken and length(dim) == shape[at + pad] and not axes_of((found[at + pad],)):
                found[at + pad] = dim
                taken |= mine
    return tuple(found)


def operand(shape: tuple[int, ...], result: Layout) -> Layout:
    """The layout in which an operand of this shape is read, so that the result has its layout."""
    pad = len(result) - len(shape)
    return tuple(
        result[at + pad] if size == length(result[at + pad]) and size != 1 else whole((size,))[0] for at, size in enumerate(shape)
    )


def functional(walk: ShardWalk, node: Node) -> str:
    """The operation that gives a new tensor where the node works in place; refused where the old value is read again."""
    if not node.writes:
        return node.target
    if read_again(walk.flat, node):
        raise no_rule(node, "it works in place on a value that is read again")
    parts = node.target.split(".")
    return ".".join((parts[0], parts[1].rstrip("_"), *parts[2:]))


def element(walk: ShardWalk, node: Node) -> Made | None:
    """All operands in one layout, and the operation on the parts."""
    names = walk.tensors((node.args, node.kwargs))
    layout = broadcast(walk, names, walk.shape(node.name))
    if _is_singular(walk, node, layout):
        layout = _unpadded(layout)
    return Made(_emit(walk, node, layout, frozenset()), layout)


def _is_singular(walk: ShardWalk, node: Node, layout: Layout) -> bool:
    """Whether padding may become infinite: its gradient would then be 0 times infinity, and go into every sum over features."""
    if layout == _unpadded(layout):
        return False
    divisor = node.args[-1] if operation(node) in _DIVISIONS else None
    if isinstance(divisor, Ref) and divisor.name in walk.sizes.shapes:
        mine = operand(walk.shape(divisor.name), layout)
        return mine != _unpadded(mine)
    if operation(node) == "aten.pow" and isinstance(node.args[1], int | float) and node.args[1] >= 1:
        return False
    return operation(node) in _SINGULAR


def _unpadded(layout: Layout) -> Layout:
    """A layout with dimensions whole that are padded."""
    return tuple(whole((length(dim),))[0] if any(f.real is not None for f in dim) else dim for dim in layout)


def _emit(walk: ShardWalk, node: Node, layout: Layout, missing: frozenset[str]) -> str:
    work = axes_of(layout) | missing
    given = {n: walk.read(n, operand(walk.shape(n), layout), work) for n in walk.tensors((node.args, node.kwargs))}

    def leaf(x: Any) -> Any:
        return (given[x.name] if x.name in given else walk.sizes.numbers[x.name]) if isinstance(x, Ref) else x

    args, kwargs = mapped(node.args, leaf), mapped(dict(node.kwargs), leaf)
    return walk.call(functional(walk, node), args, layout, kwargs).step


def copied(walk: ShardWalk, node: Node) -> Made | None:
    """What is written over a value: of that only shape and type are left."""
    old, new, size = node.args[0].name, node.args[1].name, walk.flat.by_name[node.name].size
    if node.writes:
        functional(walk, node)
    assert size is not None
    shape = walk.shape(node.name)
    layout = broadcast(walk, [old, new], shape)
    mine = operand(walk.shape(new), layout)
    given = walk.read(new, mine, axes_of(layout))
    cast = walk.call("aten.to.dtype", (given, getattr(torch, size.dtype)), mine)
    return walk.call("aten.expand.default", (Local(cast.step), list(local_shape(layout, walk.grid))), layout)


def shape_only(walk: ShardWalk, node: Node) -> Made | None:
    """A new tensor with the type of another: whole, and nothing moves."""
    if node.random or node.name not in walk.sizes.shapes:
        return None
    args = (walk.read(node.args[0].name), *walk.plain(node.args[1:]))
    return walk.call(node.target, args, whole(walk.shape(node.name)), walk.plain(dict(node.kwargs)))


def push_element(walk: ShardWalk, node: Node, want: Layout, missing: frozenset[str]) -> str:
    """A light value in a layout: its operands in that layout."""
    if _is_singular(walk, node, want):
        plain = _unpadded(want)
        made = _emit(walk, node, plain, frozenset())  # the move sums its gradient over what is missing
        return walk.moved(made, plain, want, missing=missing, path=node.path)
    return _emit(walk, node, want, missing)


def dropout(walk: ShardWalk, node: Node) -> Made | None:
    """Drawn for the whole tensor, of which every rank takes its part."""
    if not is_one_of(node.target, ("aten.dropout",)) or node.writes:
        raise no_rule(node)
    source, layout = node.args[0].name, _unpadded(walk.layout(node.args[0].name))
    if not node.random:
        return Made(walk.read(source, layout, axes_of(layout)).name, layout)
    given = walk.read(source, layout, axes_of(layout))
    return Made(drop(walk, given, float(node.args[1]), layout, walk.sizes.grows.get(node.name)), layout)


def drop(walk: ShardWalk, x: Any, rate: float, layout: Layout, rows_dim: int | None) -> str:
    """A step that drops elements of a tensor in this layout, whose rows are in a dimension."""
    return walk.step(StepKind.DROPOUT, "dropout", (x,), {"rate": rate, "rows_dim": rows_dim}, layout=layout)
