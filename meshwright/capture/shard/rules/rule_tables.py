"""Embedding lookups and convolutions: a table of tokens is cut by its rows, a table of positions by its features."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.capture.shard.layouts.layout import Factor, Layout, axes_of, whole
from meshwright.capture.shard.layouts.sizes import Sizes
from meshwright.capture.shard.layouts.spreads import only, padded, spread_layout
from meshwright.capture.shard.layouts.steps import Local, Offset, Product
from meshwright.capture.shard.layouts.walk import ShardWalk
from meshwright.capture.shard.layouts.walk_task import Made, operation
from meshwright.capture.shard.rules.rule_rows import by_rows
from meshwright.capture.trace.graph import Node, NodeKind, Ref, refs
from meshwright.costs.scheme import Grid, Scheme


def lookup(walk: ShardWalk, node: Node) -> Made | None:
    """Rows of a table that is cut by its rows: each rank looks up its own, and the parts are added."""
    table, ids = node.args[0].name, node.args[1].name
    if not walk.is_parameter(table) or node.kwargs or len(node.args) > 3:
        return None
    scheme, grid = walk.scheme, walk.grid
    if node.name in walk.task.light or not is_table(node, walk.sizes, scheme, grid, walk.task.values):
        return None
    vocabulary, width = walk.shape(table)
    axes = scheme.table
    held = tuple(axis for axis in axes.out if axis in scheme.inner.features)
    features = tuple(axis for axis in axes.into if axis in scheme.residual.features)
    result = spread_layout(walk, node.name, scheme.residual, (Factor(width, scheme.residual.features),))
    rows = tuple(a for a in (*scheme.residual.rows, *scheme.residual.sequence) if a not in held and a in axes_of(result))
    made: Layout = (*(only(dim, rows) for dim in result[:-1]), (Factor(width, features),))
    out = padded(walk, vocabulary, axes.out)
    stored: Layout = ((out,), (Factor(width, axes.into),))
    gathered = {*axes.out, *axes.into} - {*held, *features}
    walk.own(table, stored, [axis for axis in rows if axis not in gathered])
    own: Layout = (only(stored[0], held), only(stored[1], features))
    name = walk.parameter(table)
    if name in walk.task.shared:
        weight = walk.shared(table, own, {*rows, *held, *features} - axes_of(own))
    else:
        weight = walk.moved(walk.stored(table), stored, own, missing={*rows} & gathered, path=name, weight=True)
    given = walk.read(ids, made[:-1])
    block = out.size // grid.size(held)
    padding = node.args[2] if len(node.args) > 2 else -1
    y = walk.local("lookup", (Local(weight), given, Offset(held, block), padding), made)
    walk.found.products.append(Product(node.path, "table", name, walk.found.cuts[name].layout))
    return Made(walk.moved(y.step, made, result, parts=held, path=node.path), result)


def push_lookup(walk: ShardWalk, node: Node, want: Layout, missing: frozenset[str]) -> str:
    """A table of positions or of buckets, in a layout: its features are cut, not its rows."""
    table, ids = node.args[0].name, node.args[1].name
    work = axes_of(want) | missing
    weight = walk.read(table, (whole(walk.shape(table))[0], want[-1]), work)
    given = walk.read(ids, want[:-1])
    padding = node.args[2] if len(node.args) > 2 else -1
    return walk.call("aten.embedding.default", (weight, given, padding), want).step


def convolution(walk: ShardWalk, node: Node) -> Made | None:
    """Rows are cut as in the residual stream, channels that come out as its features; all channels go in."""
    x, weight = node.args[0].name, node.args[1].name
    bias = node.args[2].name if len(node.args) > 2 and isinstance(node.args[2], Ref) else None
    rest = list(walk.plain(node.args[3:]))
    if not walk.is_parameter(weight) or node.kwargs or walk.sizes.grows.get(x) != 0 or walk.shape(x)[0] != walk.sizes.rows:
        return None
    if len(rest) > 3 and rest[3] != 1:
        return by_rows(walk, node)
    scheme, shape = walk.scheme, walk.shape(node.name)
    axes = scheme.residual.features if shape[1] % walk.grid.size(scheme.residual.features) == 0 else ()
    rows, features = (Factor(walk.sizes.rows, scheme.residual.rows),), (Factor(shape[1], axes),)
    result: Layout = (rows, features, *whole(shape[2:]))
    work = axes_of(result)
    given = walk.read(x, (rows, *whole(walk.shape(x)[1:])), work)
    kernel = walk.read(weight, (features, *whole(walk.shape(weight)[1:])), work)
    added = walk.read(bias, (features,), work) if bias is not None else None
    return walk.call(node.target, (given, kernel, added, *rest), result)


def is_table(node: Node, sizes: Sizes, scheme: Scheme, grid: Grid, values: frozenset[str]) -> bool:
    """Is it a lookup by values of the batch, in a table with enough rows to be cut?"""
    table, ids = node.args[0].name, node.args[1].name
    enough = sizes.shapes[table][0] >= grid.size(scheme.table.out)
    return enough and ids in sizes.grows and ids in values


def _is_shapeonly(node: Node) -> bool:
    """Does it read the shape of a tensor, not what is in it?"""
    name = operation(node)
    return name.startswith(("aten.sym_size", "aten.new_")) or name.endswith("_like")


def token_values(nodes: tuple[Node, ...], needs: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    """The values that depend on what is in a batch, not only on its shape."""
    found: set[str] = set()
    for node in nodes:
        if node.kind is NodeKind.COLUMN or (
            node.kind is NodeKind.CALL and not _is_shapeonly(node) and any(name in found for name in needs[node.name])
        ):
            found.add(node.name)
    for node in nodes:  # what is written into later holds what was written
        if node.writes and any(ref.name in found for ref in refs(node.args)):
            found |= {other.name for other in nodes if not set(other.memory).isdisjoint(node.writes)}
    return frozenset(found)
