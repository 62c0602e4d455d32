"""Attention by whole heads, and products of two activations: batch dimensions may be cut, the matrices are whole."""

from __future__ import annotations

from typing import Any

from meshwright.capture.shard.layouts.layout import Dim, Factor, Layout, axes_of, bare, length, whole
from meshwright.capture.shard.layouts.refusals import no_rule
from meshwright.capture.shard.layouts.steps import Local
from meshwright.capture.shard.layouts.walk import ShardWalk
from meshwright.capture.shard.layouts.walk_task import Made
from meshwright.capture.shard.rules.rule_elements import drop
from meshwright.capture.shard.rules.rule_products import product
from meshwright.capture.trace.graph import Node, Ref


def _lead(walk: ShardWalk, names: list[str]) -> str:
    return max(names, key=lambda name: len(axes_of(bare(walk.layout(name), walk.grid)[:-2])))


def _batch(walk: ShardWalk, node: Node, names: list[str]) -> tuple[Dim, ...]:
    """The batch dimensions of the result: those of the operand whose batch is cut most."""
    lead = walk.layout(_lead(walk, names))
    shape = walk.shape(node.name)
    pad = len(shape) - len(lead)
    return tuple(
        lead[k - pad] if k >= pad and length(lead[k - pad]) == size else whole((size,))[0] for k, size in enumerate(shape[:-2])
    )


def _operand(walk: ShardWalk, name: str, batch: tuple[Dim, ...]) -> Layout:
    shape = walk.shape(name)
    pad = len(batch) + 2 - len(shape)
    lead = tuple(
        batch[k + pad] if length(batch[k + pad]) == size and size > 1 else whole((size,))[0] for k, size in enumerate(shape[:-2])
    )
    return (*lead, *whole(shape[-2:]))


def matmul(walk: ShardWalk, node: Node) -> Made | None:
    """A product with a weight, or of two activations."""
    if (made := product(walk, node)) is not None:
        return made
    names = [arg.name for arg in node.args if isinstance(arg, Ref)]
    if any(len(walk.shape(name)) < 3 for name in names) and any(axes_of(bare(walk.layout(n), walk.grid)) for n in names):
        raise no_rule(node, "a matrix that is no parameter")
    if any(len(walk.shape(name)) < 2 for name in names):
        return None
    batch = _batch(walk, node, names)
    result: Layout = (*batch, *whole(walk.shape(node.name)[-2:]))
    given = {name: walk.read(name, _operand(walk, name, batch), axes_of(batch)) for name in names}
    args = [given[arg.name] if isinstance(arg, Ref) and arg.name in given else walk.plain(arg) for arg in node.args]
    return walk.call(node.target, tuple(args), result, walk.plain(dict(node.kwargs)))


def _given(node: Node) -> dict[str, Any]:
    """Returns the arguments after q, k and v by name."""
    names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    return dict(zip(names, node.args[3:], strict=False)) | dict(node.kwargs)


def attention(walk: ShardWalk, node: Node) -> Made | None:
    """Every rank has whole heads and whole sequences."""
    names = [arg.name for arg in node.args[:3]]
    if any(len(walk.shape(name)) != 4 for name in names):
        return None if not any(axes_of(bare(walk.layout(n), walk.grid)) for n in names) else _refuse(node)
    more = _given(node)
    lead = walk.layout(names[0])
    batch = lead[:2]
    work = axes_of(batch)
    given = [_heads(walk, node, name, batch) for name in names]
    result: Layout = (*batch, *whole(walk.shape(node.name)[2:]))
    mask = more.get("attn_mask")
    seen = None
    if isinstance(mask, Ref):
        seen = walk.read(mask.name, _operand(walk, mask.name, batch), work)
    if node.random:
        return _dropped(walk, node, given, seen, more, batch)
    kwargs = {key: walk.plain(value) for key, value in more.items() if key not in ("attn_mask", "dropout_p")}
    return walk.call(node.target, (*given, seen, 0.0), result, kwargs)


def _refuse(node: Node) -> Made | None:
    raise no_rule(node, "attention over tensors of other than four dimensions")


def _heads(walk: ShardWalk, node: Node, name: str, batch: tuple[Dim, ...]) -> Local:
    """Keys and values have the rows of the queries, and their own number of heads cut by the same axes.

    Where they have fewer heads than the axes have ranks, every rank gets those that its queries read.
    """
    shape, heads, work = walk.shape(name), batch[1], axes_of(batch)
    rows = batch[0] if length(batch[0]) == shape[0] else whole(shape[:1])[0]
    rest = whole(shape[2:])
    axes = tuple(axis for factor in heads for axis in factor.axes)
    if length(heads) == shape[1]:
        return walk.read(name, (rows, heads, *rest), work)
    if shape[1] % walk.grid.size(axes) == 0 and len(heads) == 1:
        return walk.read(name, (rows, (Factor(shape[1], axes),), *rest), work)
    if length(heads) % shape[1]:
        raise no_rule(node, f"{length(heads)} heads read {shape[1]}")
    wide: Layout = (rows, *whole((length(heads),)), *rest)
    given = walk.read(name, (rows, *whole((shape[1],)), *rest), axes_of((rows,)))
    made = walk.call("aten.repeat_interleave.self_int", (given, length(heads) // shape[1], 1), wide)
    return Local(walk.moved(made.step, wide, (rows, heads, *rest), path=name))


def _for_every_head(walk: ShardWalk, name: str, given: Local, batch: tuple[Dim, ...]) -> Local:
    """Keys or values as `_heads` gives them, repeated for the queries that share them."""
    shape, heads = walk.shape(name), batch[1]
    if length(heads) == shape[1] or len(heads) != 1 or shape[1] % walk.grid.size(heads[0].axes):
        return given  # every rank has one for each of its queries
    rows = batch[0] if length(batch[0]) == shape[0] else whole(shape[:1])[0]
    wide: Layout = (rows, heads, *whole(shape[2:]))
    return Local(walk.call("aten.repeat_interleave.self_int", (given, length(heads) // shape[1], 1), wide).step)


def _dropped(
    walk: ShardWalk, node: Node, given: list[Local], mask: Local | None, more: dict[str, Any], batch: tuple[Dim, ...]
) -> Made:
    """Attention with dropout, step by step: the mask of dropout is drawn for all heads and rows."""
    names = [arg.name for arg in node.args[:3]]
    q, k, v = given[0], *(_for_every_head(walk, name, one, batch) for name, one in zip(names[1:], given[1:], strict=True))
    queries, keys = walk.shape(names[0])[2], walk.shape(names[1])[2]
    scale = more.get("scale")
    scale = walk.plain(scale) if scale is not None else walk.shape(names[0])[3] ** -0.5
    scores: Layout = (*batch, *whole((queries, keys)))
    turned = walk.call("aten.transpose.int", (k, -2, -1), (*batch, *whole((walk.shape(names[1])[3], keys))))
    found = walk.call("aten.matmul.default", (q, Local(turned.step)), scores)
    found = walk.call("aten.mul.Tensor", (Local(found.step), scale), scores)
    if mask is not None:
        size = walk.flat.by_name[more["attn_mask"].name].size
        assert size is not None
        kind = "hidden" if size.dtype == "bool" else "added"
        found = walk.local(kind, (Local(found.step), mask), scores)
    if more.get("is_causal"):
        found = walk.local("causal", (Local(found.step),), scores)
    softmax = "aten._safe_softmax.default" if mask is not None else "aten.softmax.int"  # a query that sees no key gives zeros
    found = walk.call(softmax, (Local(found.step), -1), scores)
    dropped = drop(walk, Local(found.step), float(walk.plain(more["dropout_p"])), scores, walk.sizes.grows.get(names[0]))
    return walk.call("aten.matmul.default", (Local(dropped), v), (*batch, *whole(walk.shape(node.name)[2:])))
