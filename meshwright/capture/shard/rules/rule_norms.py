"""Norms, means and sums: if the reduced dimension is cut, a move adds up the partial sums."""

from __future__ import annotations

import math
from typing import Any

import torch

from meshwright.capture.shard.layouts.layout import Factor, Layout, axes_of, bare, whole
from meshwright.capture.shard.layouts.refusals import no_rule
from meshwright.capture.shard.layouts.steps import Local
from meshwright.capture.shard.layouts.walk import ShardWalk
from meshwright.capture.shard.layouts.walk_task import Made, operation
from meshwright.capture.shard.rules.rule_rows import by_rows
from meshwright.capture.trace.graph import Node, Ref


def _padded(layout: Layout) -> bool:
    return any(factor.real is not None for dim in layout for factor in dim)


def _dims(walk: ShardWalk, node: Node, count: int) -> list[int]:
    given = walk.plain(node.args[1]) if len(node.args) > 1 else None
    if given is None or given == [] or operation(node) == "default":
        return list(range(count))
    return [dim % count for dim in (given if isinstance(given, list | tuple) else [given])]


def reduction(walk: ShardWalk, node: Node) -> Made | None:
    """A mean or a sum: of this rank's part, then of all parts."""
    source = node.args[0].name
    layout = walk.layout(source)
    scalar = node.target.endswith(".default")
    dims = list(range(len(layout))) if scalar else _dims(walk, node, len(layout))
    keep = bool(walk.plain(node.args[2])) if len(node.args) > 2 and not scalar else bool(dict(node.kwargs).get("keepdim", False))
    if _padded(layout) or any(key != "keepdim" and value is not None for key, value in node.kwargs):
        raise no_rule(node)
    parts = axes_of(bare(tuple(layout[dim] for dim in dims), walk.grid))
    result = tuple(whole((1,))[0] if k in dims else dim for k, dim in enumerate(layout) if keep or k not in dims)
    total = walk.call("aten.sum.dim_IntList", (walk.read(source), dims, keep), result)
    step = walk.moved(total.step, result, result, parts=parts, path=node.path)
    if operation(node) == "aten.sum":
        return Made(step, result)
    count = math.prod(walk.shape(source)[dim] for dim in dims)
    return walk.call("aten.div.Tensor", (Local(step), float(count)), result)


def _arguments(walk: ShardWalk, node: Node) -> tuple[str, str | None, str | None, Any]:
    args = node.args
    weight = args[2].name if len(args) > 2 and isinstance(args[2], Ref) else None
    if operation(node) == "aten.rms_norm":
        return args[0].name, weight, None, args[3] if len(args) > 3 else None
    bias = args[3].name if len(args) > 3 and isinstance(args[3], Ref) else None
    return args[0].name, weight, bias, args[4] if len(args) > 4 else 1e-5


def norm(walk: ShardWalk, node: Node) -> Made | None:
    """LayerNorm and RMSNorm over the features. If features are cut, sums go over their axes, and values are centred first.

    A norm over several dimensions has them whole.
    """
    source, weight, bias, eps = _arguments(walk, node)
    layout, width = walk.layout(source), walk.shape(source)[-1]
    if len(node.args[1]) > 1 and not node.kwargs:
        return by_rows(walk, node)
    if list(walk.plain(node.args[1])) != [width] or _padded(layout) or node.kwargs:
        raise no_rule(node)
    work = axes_of(layout)
    names = [name for name in (weight, bias) if name is not None]
    given = {name: walk.read(name, layout[-1:], work) for name in names}
    x = walk.read(source, layout, work)
    cut = axes_of(bare(layout[-1:], walk.grid))
    if not cut:
        args = [given.get(a.name, x) if isinstance(a, Ref) else a for a in node.args]
        return walk.call(node.target, tuple(args), layout)
    one: Layout = (*layout[:-1], (Factor(1),))
    centred = x
    if operation(node) == "aten.layer_norm":
        total = walk.call("aten.sum.dim_IntList", (x, [-1], True), one)
        shared = walk.moved(total.step, one, one, parts=cut, missing=cut, path=node.path)
        centred = Local(walk.local("centred", (x, Local(shared), width), layout).step)
    squares = walk.call(
        "aten.sum.dim_IntList", (Local(walk.call("aten.square.default", (centred,), layout).step), [-1], True), one
    )
    shared = walk.moved(squares.step, one, one, parts=cut, missing=cut, path=node.path)
    if eps is None:
        size = walk.flat.by_name[source].size
        assert size is not None
        eps = torch.finfo(getattr(torch, size.dtype)).eps
    made = walk.local("normed", (centred, Local(shared), width, eps), layout)
    for name, operation_ in ((weight, "aten.mul.Tensor"), (bias, "aten.add.Tensor")):
        if name is not None:
            made = walk.call(operation_, (Local(made.step), given[name]), layout)
    return made
