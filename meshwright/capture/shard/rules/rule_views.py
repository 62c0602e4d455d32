"""Operations that only rearrange: views, permutations, slices, pieces, joins."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.capture.shard.layouts.layout import (
    CannotRegroup,
    Dim,
    Factor,
    Layout,
    axes_of,
    bare,
    joined,
    length,
    local,
    local_shape,
    regrouped,
    whole,
)
from meshwright.capture.shard.layouts.refusals import indivisible, no_rule
from meshwright.capture.shard.layouts.steps import Local, StepKind
from meshwright.capture.shard.layouts.walk import ShardWalk
from meshwright.capture.shard.layouts.walk_task import Made, operation
from meshwright.capture.shard.rules.made_by import widest
from meshwright.capture.shard.rules.rule_elements import broadcast
from meshwright.capture.trace.graph import Node

LAST = 9223372036854775807


def reshape(walk: ShardWalk, node: Node) -> Made | None:
    """A view, of whatever kind: the factors of the layout are regrouped; where that cannot be, what is in the way is gathered.

    Heads that do not divide are refused, unless they are fewer than others that are made from the same input: keys and values.
    """
    source = node.args[0].name
    layout = walk.layout(source)
    while True:
        try:
            regrouped(layout, walk.shape(node.name), walk.grid)
            break
        except CannotRegroup as error:
            axes = walk.grid.wide(error.axes)
            if any(map(_is_padded, layout)):  # padding is in the way, not a size that does not divide
                layout = tuple(whole((length(dim),))[0] if _is_padded(dim) else dim for dim in layout)
                continue
            features = axes_of(layout[-1:]) & {*walk.scheme.inner.features}  # rows may be cut by the same axes
            if axes and features.issuperset(axes) and widest(walk, source):
                raise indivisible(node.path or node.name, error.size, error.axes, walk.grid) from error
            if layout == whole(walk.shape(source)):
                raise no_rule(node) from error
            less = tuple(_without(dim, axes) for dim in layout)
            layout = less if axes and less != layout else whole(walk.shape(source))
    return _reshaped(walk, node, walk.read(source, layout, axes_of(layout)), layout)


def _is_padded(dim: Dim) -> bool:
    return any(factor.real is not None for factor in dim)


def _without(dim: Dim, axes: Sequence[str]) -> Dim:
    """A dimension that some axes no longer cut."""
    return tuple(Factor(f.size, tuple(axis for axis in f.axes if axis not in axes)) for f in dim)


def _reshaped(walk: ShardWalk, node: Node, given: Local, layout: Layout) -> Made:
    try:
        result = regrouped(layout, walk.shape(node.name), walk.grid)
    except CannotRegroup as error:
        raise indivisible(node.path or node.name, error.size, error.axes, walk.grid) from error
    walk.divisible(result, node.path or node.name)
    return walk.call("aten.reshape.default", (given, list(local_shape(result, walk.grid))), result)


def push_reshape(walk: ShardWalk, node: Node, want: Layout, missing: frozenset[str]) -> str:
    """A light view: what it is a view of, in the layout that fits."""
    source = node.args[0].name
    try:
        before = regrouped(want, walk.shape(source), walk.grid)
    except CannotRegroup:
        before = whole(walk.shape(source))
    if axes_of(before) != axes_of(want):
        given = walk.read(source, whole(walk.shape(source)))
        made = _reshaped(walk, node, given, whole(walk.shape(source)))
        return walk.moved(made.step, made.layout, want, missing=missing, path=node.path)
    return _reshaped(walk, node, walk.read(source, before, axes_of(before) | missing), before).step


def _order(walk: ShardWalk, node: Node) -> list[int]:
    count = len(walk.shape(node.name))
    order = list(range(count))
    name = operation(node)
    if name == "aten.permute":
        return [dim % count for dim in walk.plain(node.args[1])]
    if name in ("aten.t", "aten.numpy_T", "aten.T"):
        return order[::-1]
    a, b = (-1, -2) if name == "aten.mT" else walk.plain(node.args[1:3])
    order[a], order[b] = order[b], order[a]
    return order


def permute(walk: ShardWalk, node: Node) -> Made | None:
    """Dimensions in another order."""
    source, order = node.args[0].name, _order(walk, node)
    layout = walk.layout(source)
    return walk.call("aten.permute.default", (walk.read(source), order), tuple(layout[k] for k in order))


def push_permute(walk: ShardWalk, node: Node, want: Layout, missing: frozenset[str]) -> str:
    """The same, of a light value."""
    source, order = node.args[0].name, _order(walk, node)
    before = tuple(want[order.index(k)] for k in range(len(order)))
    return walk.call("aten.permute.default", (walk.read(source, before, axes_of(want) | missing), order), want).step


def expand(walk: ShardWalk, node: Node) -> Made | None:
    """Dimensions of size 1 repeated."""
    source, shape = node.args[0].name, walk.shape(node.name)
    layout = walk.layout(source)
    pad = len(shape) - len(layout)
    result = tuple(
        layout[k - pad] if k >= pad and length(layout[k - pad]) == size else whole((size,))[0] for k, size in enumerate(shape)
    )
    given = walk.read(source, None, axes_of(result))
    return walk.call("aten.expand.default", (given, list(local_shape(result, walk.grid))), result)


def push_expand(walk: ShardWalk, node: Node, want: Layout, missing: frozenset[str]) -> str:
    """The same, of a light value: only what is repeated may be cut here."""
    source = node.args[0].name
    shape = walk.shape(source)
    pad = len(want) - len(shape)
    before = tuple(want[k + pad] if size == length(want[k + pad]) else whole((size,))[0] for k, size in enumerate(shape))
    given = walk.read(source, before, axes_of(want) | missing)
    return walk.call("aten.expand.default", (given, list(local_shape(want, walk.grid))), want).step


def piece(dim: Dim, start: int, stop: int, walk: ShardWalk) -> tuple[Dim, int, int] | None:
    """A range of a dimension: its layout and where it is on a rank; None where the cut does not allow it."""
    if (start, stop) == (0, length(dim)):
        return dim, 0, local(dim, walk.grid)
    if not axes_of(bare((dim,), walk.grid)):
        return (Factor(stop - start),), start, stop
    first, rest = dim[0], dim[1:]
    unit = length(rest)
    if walk.grid.wide(first.axes) or start % unit or stop % unit or not rest:
        return None
    mine = local(rest, walk.grid)
    return joined((Factor((stop - start) // unit), *rest)), start // unit * mine, stop // unit * mine


def _uncut(layout: Layout, dim: int) -> Layout:
    """A layout with one dimension gathered."""
    return (*layout[:dim], whole((length(layout[dim]),))[0], *layout[dim + 1 :])


def _range(walk: ShardWalk, node: Node) -> tuple[int, int, int, int]:
    """Dimension, start, stop and step of a slice, all as they are."""
    args = walk.plain(node.args[1:])
    shape = walk.shape(node.args[0].name)
    dim = (args[0] if args else 0) % len(shape)
    start = args[1] if len(args) > 1 and args[1] is not None else 0
    stop = args[2] if len(args) > 2 and args[2] is not None else LAST
    if operation(node) == "aten.narrow":
        stop = start + stop
    size = shape[dim]
    start, stop = (min(max(k + size if k < 0 else k, 0), size) for k in (start, stop))
    return dim, start, max(start, stop), args[3] if len(args) > 3 else 1


def slices(walk: ShardWalk, node: Node) -> Made | None:
    """A range of a dimension."""
    source = node.args[0].name
    dim, start, stop, step = _range(walk, node)
    layout = walk.layout(source)
    found = piece(layout[dim], start, stop, walk) if step == 1 else None
    if found is None:
        layout = _uncut(layout, dim)
        found = (Factor(walk.shape(node.name)[dim]),), start, stop
    result = (*layout[:dim], found[0], *layout[dim + 1 :])
    given = walk.read(source, layout, axes_of(layout))
    if bare(result, walk.grid) == bare(layout, walk.grid):
        return Made(given.name, result)
    return walk.call("aten.slice.Tensor", (given, dim, found[1], found[2], step), result)


def push_slices(walk: ShardWalk, node: Node, want: Layout, missing: frozenset[str]) -> str:
    """The same for a light value. If the sliced dimension must be cut, it is cut after the slice."""
    source = node.args[0].name
    dim, start, stop, step = _range(walk, node)
    if walk.shape(source) == walk.shape(node.name):
        return walk.read(source, want, axes_of(want) | missing).name
    between = (*want[:dim], whole((length(want[dim]),))[0], *want[dim + 1 :])
    before = (*want[:dim], whole((walk.shape(source)[dim],))[0], *want[dim + 1 :])
    later = axes_of(bare((want[dim],), walk.grid))
    given = walk.read(source, before, axes_of(before) | (missing if not later else frozenset()))
    made = walk.call("aten.slice.Tensor", (given, dim, start, stop, step), between)
    return walk.moved(made.step, between, want, missing=missing, path=node.path) if later else made.step


def select(walk: ShardWalk, node: Node) -> Made | None:
    """One place of a dimension, which goes."""
    source = node.args[0].name
    dim, index = walk.plain(node.args[1:3])
    layout = walk.layout(source)
    dim %= len(layout)
    layout = _uncut(layout, dim)
    given = walk.read(source, layout, axes_of(layout))
    return walk.call("aten.select.int", (given, dim, index), (*layout[:dim], *layout[dim + 1 :]))


def split(walk: ShardWalk, node: Node) -> Made | None:
    """Pieces of a dimension: `getitem` finds them."""
    source, name = node.args[0].name, operation(node)
    layout = walk.layout(source)
    args = walk.plain(node.args[1:])
    place = {"aten.unbind": 0}.get(name, 1)
    dim = (args[place] if len(args) > place else dict(node.kwargs).get("dim", 0)) % len(layout)
    size = length(layout[dim])
    sizes = _sizes(name, args, size)
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    found = [piece(layout[dim], start, start + n, walk) for start, n in zip(starts, sizes, strict=True)]
    if any(each is None for each in found) or name == "aten.unbind":
        layout = _uncut(layout, dim)
        found = [((Factor(n),), start, start + n) for start, n in zip(starts, sizes, strict=True)]
    given = walk.read(source, layout, axes_of(layout))
    kept = [each for each in found if each is not None]
    if name == "aten.unbind":
        step = walk.step(StepKind.OPERATION, "aten.unbind.int", (given, dim))
        pieces = [(*layout[:dim], *layout[dim + 1 :])] * len(sizes)
    else:
        local_sizes = [stop - start for _, start, stop in kept]
        step = walk.step(StepKind.OPERATION, "aten.split_with_sizes.default", (given, local_sizes, dim))
        pieces = [(*layout[:dim], part, *layout[dim + 1 :]) for part, _, _ in kept]
    walk.pieces[node.name] = step, pieces
    return None


def _sizes(name: str, args: Sequence[object], size: int) -> list[int]:
    if name == "aten.unbind":
        return [1] * size
    given = args[0]
    if isinstance(given, list | tuple):
        return list(given)
    assert isinstance(given, int)
    each = given if name == "aten.split" else -(-size // given)
    return [min(each, size - start) for start in range(0, size, each)]


def getitem(walk: ShardWalk, node: Node) -> Made | None:
    """One of several pieces."""
    source = node.args[0].name
    if source not in walk.pieces:
        return None
    step, pieces = walk.pieces[source]
    index = node.args[1]
    return walk.call("operator.getitem", (Local(step), index), pieces[index])


def cat(walk: ShardWalk, node: Node) -> Made | None:
    """Tensors joined along a dimension, which must be whole; the others are as in the one that is cut most."""
    names = [ref.name for ref in node.args[0]]
    dim = (walk.plain(node.args[1]) if len(node.args) > 1 else dict(node.kwargs).get("dim", 0)) % len(walk.shape(node.name))
    cut = [name for name in names if not walk.is_soft(name)]
    if not cut:
        return None
    lead = walk.layout(max(cut, key=lambda name: len(axes_of(bare(walk.layout(name), walk.grid)))))
    lead = _uncut(lead, dim)
    wants = [(*lead[:dim], whole((walk.shape(name)[dim],))[0], *lead[dim + 1 :]) for name in names]
    given = [walk.read(name, want, axes_of(lead)) for name, want in zip(names, wants, strict=True)]
    result = (*lead[:dim], whole((walk.shape(node.name)[dim],))[0], *lead[dim + 1 :])
    return walk.call("aten.cat.default", (given, dim), result)


def stack(walk: ShardWalk, node: Node) -> Made | None:
    """Tensors joined along a new dimension."""
    names = [ref.name for ref in node.args[0]]
    layout = broadcast(walk, names, walk.shape(names[0]))
    dim = (walk.plain(node.args[1]) if len(node.args) > 1 else 0) % len(walk.shape(node.name))
    given = [walk.read(name, layout, axes_of(layout)) for name in names]
    return walk.call("aten.stack.default", (given, dim), (*layout[:dim], (Factor(len(names)),), *layout[dim:]))


def repeat_interleave(walk: ShardWalk, node: Node) -> Made | None:
    """Every place of a dimension several times in a row."""
    args = walk.plain(node.args[1:])
    if not isinstance(args[0], int) or len(args) < 2 or args[1] is None:
        raise no_rule(node)
    source, dim = node.args[0].name, args[1] % len(walk.shape(node.name))
    layout = walk.layout(source)
    result = (*layout[:dim], joined((*layout[dim], Factor(args[0]))), *layout[dim + 1 :])
    return walk.call("aten.repeat_interleave.self_int", (walk.read(source), args[0], dim), result)
