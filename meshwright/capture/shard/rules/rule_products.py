"""Products with a weight: a product that reads the residual spread expands, one that reads the inner spread contracts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshwright.capture.shard.layouts.layout import Dim, Factor, Layout, axes_of, bare, length, whole
from meshwright.capture.shard.layouts.spreads import only, padded, present, spread_layout
from meshwright.capture.shard.layouts.steps import Local, Product
from meshwright.capture.shard.layouts.walk import ShardWalk
from meshwright.capture.shard.layouts.walk_task import Made, operation
from meshwright.capture.shard.rules.made_by import ends, taken_apart
from meshwright.capture.shard.rules.rule_elements import ELEMENTS, operand
from meshwright.capture.trace.graph import Node, NodeKind, Ref
from meshwright.costs.declared import Role
from meshwright.costs.product_plan import product_plan
from meshwright.costs.scheme import Axes

VIEWS = ("aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten", "aten.slice", "aten.contiguous")
TRANSPOSES = ("aten.t", "aten.transpose", "aten.permute", "aten.numpy_T", "aten.T", "aten.mT")
LOSSES = ("aten.cross_entropy_loss",)
_NARROW = 4
"""A weight is narrow if it has at most one output per this many inputs."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A product: x, the weight, whether it is stored as (in, out), and a bias."""

    x: str
    weight: str
    transposed: bool
    bias: str | None


def _call(walk: ShardWalk, node: Node) -> _Call | None:
    name, args = operation(node), node.args
    if name == "aten.linear":
        found, flip = (args[0], args[1], args[2] if len(args) > 2 else None), False
    elif name == "aten.addmm":
        found, flip = (args[1], args[2], args[0]), True
    else:
        found, flip = (args[0], args[1], None), True
    if node.kwargs:
        return None
    weight, turned = found[1].name, False
    while operation(walk.flat.by_name[weight]) in TRANSPOSES if walk.flat.by_name[weight].kind is NodeKind.CALL else False:
        view = walk.flat.by_name[weight]
        weight, turned = view.args[0].name, turned != _turns(walk, view)
    if not walk.is_parameter(weight) or len(walk.shape(weight)) != 2:
        return None
    return _Call(found[0].name, weight, flip != turned, found[2].name if isinstance(found[2], Ref) else None)


def _turns(walk: ShardWalk, view: Node) -> bool:
    """Whether a view of a matrix swaps its dimensions: a permutation may leave them as they are."""
    dims = walk.plain(view.args[1:])
    order = list(dims[0]) if operation(view) == "aten.permute" else list(dims[:2])
    return len({dim % 2 for dim in order}) != 1 and (operation(view) != "aten.permute" or order[0] % 2 == 1)


def _role(walk: ShardWalk, call: _Call, cut: Layout | None) -> tuple[Role, Layout | None]:
    """From the layout of x; a weight that is stored already says it itself. Axes of one rank cut nothing and say nothing.

    Returns also how the weight is stored, if that is the cut of a role.
    """
    scheme = walk.scheme

    def real(axes: Iterable[str]) -> frozenset[str]:
        return frozenset(axis for axis in axes if walk.grid.size((axis,)) > 1)

    fits = list[Role]()
    if cut is not None:
        out, into = (cut[1], cut[0]) if call.transposed else (cut[0], cut[1])
        have = real(axes_of((out,))), real(axes_of((into,)))
        fits = [
            role
            for role, axes in ((Role.EXPAND, scheme.expand), (Role.CONTRACT, scheme.contract))
            if have == (real(axes.out), real(axes.into))
        ]
        if len(fits) == 1:
            return fits[0], cut
    inner, residual = real(scheme.inner.features), real(scheme.residual.features)
    features = real(axes_of(walk.layout(call.x)[-1:]))
    return Role.CONTRACT if inner != residual and features == inner else Role.EXPAND, cut if fits else None


def components(walk: ShardWalk, name: str) -> int:
    """Into how many equal parts the features of a value are split right away: fused weights are cut inside each of them."""
    width, found = walk.shape(name)[-1], 1
    for user in walk.task.users.get(name, ()):
        kind = operation(user)
        if kind in ("aten.split", "aten.chunk", "aten.split_with_sizes", "aten.unflatten", *VIEWS) and user.args[0].name == name:
            shape = walk.sizes.shapes.get(user.name, ())
            if kind in VIEWS and shape[-1:] == (width,):
                found = max(found, components(walk, user.name))
            elif kind in ("aten.split", "aten.chunk", "aten.split_with_sizes"):
                found = max(found, _parts(walk, user, width))
            elif kind != "aten.slice":
                found = max(found, _leading(walk, user, width))
    return found


def _parts(walk: ShardWalk, node: Node, width: int) -> int:
    args = walk.plain(node.args[1:])
    dim = args[1] if len(args) > 1 else 0
    if dim % len(walk.shape(node.args[0].name)) != len(walk.shape(node.args[0].name)) - 1:
        return 1
    if operation(node) == "aten.chunk":
        return args[0] if width % args[0] == 0 else 1
    sizes = [args[0]] if isinstance(args[0], int) else list(args[0])
    unit = sizes[0]
    for size in sizes[1:]:
        while size:
            unit, size = size, unit % size
    return width // unit if width % unit == 0 else 1


def _leading(walk: ShardWalk, node: Node, width: int) -> int:
    """A view that takes the features apart, such as (3, heads, width of a head): its first size if that counts components."""
    shape, size = walk.shape(node.name), 1
    for at in range(len(shape) - 1, -1, -1):
        size *= shape[at]
        if size == width:
            counts = (len(shape) - at >= 3 and shape[at] < 4) or taken_apart(walk, node.name, at)
            return shape[at] if counts else 1
    return 1


def _only_scores(walk: ShardWalk, name: str) -> bool:
    """Do all readers of a value lead to the loss or out of the model?"""
    width = walk.shape(name)[-1]
    for user in walk.task.users.get(name, ()):
        kind = operation(user)
        if kind in LOSSES:
            continue
        if (
            kind not in (*ELEMENTS, *VIEWS)
            or walk.sizes.shapes.get(user.name, ())[-1:] != (width,)
            or not _only_scores(walk, user.name)
        ):
            return False
    return True


def _out(walk: ShardWalk, node: Node, call: _Call, axes: Axes, cut: Layout | None) -> Dim:
    """The output dimension of a weight: in equal components; padded where no weight comes after it, or where it is narrow."""
    if cut is not None:
        return cut[1 if call.transposed else 0]
    width, parts, count = walk.shape(node.name)[-1], components(walk, node.name), walk.grid.size(axes)
    if parts > 1 and axes and width // parts % count == 0:
        return (Factor(parts), Factor(width // parts, axes))
    pads = width % count and (_only_scores(walk, node.name) or ends(walk, node.name))
    return (padded(walk, width, axes) if pads else Factor(width, axes),)


def _stays_whole(walk: ShardWalk, out: Dim, axes: Axes, into: int) -> bool:
    """Has a weight so few outputs that do not divide that every rank keeps all of it, as the first of an adapter's two?"""
    width, count = length(out), walk.grid.size(axes)
    return out[0].real is None and len(out) == 1 and width % count != 0 and (width < count or _NARROW * width <= into)


def product(walk: ShardWalk, node: Node) -> Made | None:
    """Gather x, gather W, multiply, reduce."""
    call = _call(walk, node)
    if call is None:
        return _loose(walk, node)
    scheme = walk.scheme
    first = walk.parameter(call.weight)
    known = walk.found.cuts.get(first) if first not in walk.task.shared else None
    role, stored = _role(walk, call, known.layout if known else None)
    expands = role is Role.EXPAND
    have, want = (scheme.residual, scheme.inner) if expands else (scheme.inner, scheme.residual)
    matrix = scheme.expand if expands else scheme.contract
    into = walk.shape(call.x)[-1]
    if into % walk.grid.size(matrix.into) and not axes_of(bare(walk.layout(call.x)[-1:], walk.grid)):
        matrix, have = replace(matrix, into=()), replace(have, features=())  # columns of a batch: they are whole as they are
    out = _out(walk, node, call, matrix.out, stored)
    if _stays_whole(walk, out, matrix.out, into):
        return _narrow(walk, node, call)
    have = present(spread_layout(walk, call.x, have, (Factor(into),)), have)
    expected = spread_layout(walk, call.x, have, (Factor(into, have.features),))
    result = spread_layout(walk, node.name, want, only(out, want.features))
    want = present(result, want)
    plan = product_plan(have, want, matrix)
    inner = tuple(axis for axis in have.features if axis in matrix.into)
    local_x = _only_rows(spread_layout(walk, call.x, have, (Factor(into, inner),)), plan.rows)
    work = {*plan.rows, *plan.outputs, *inner}
    planned = bare(walk.layout(call.x), walk.grid) == bare(expected, walk.grid)
    x = walk.read(call.x, local_x, work, planned=planned)
    weight = _weight(walk, call, MatrixCut(out, (Factor(into, matrix.into),)), plan.rows, (plan.outputs, inner), plan.unsummed)
    made = _only_rows(result, plan.rows)
    y = walk.local("product", (x, weight, call.transposed), made)
    step = walk.moved(y.step, made, result, parts=inner, path=node.path)
    walk.found.products.append(Product(node.path, str(role), first, walk.found.cuts[first].layout))
    return Made(_biased(walk, step, call.bias, result), result)


def _narrow(walk: ShardWalk, node: Node, call: _Call) -> Made:
    """A product with a weight that every rank keeps whole: rows stay as they are cut."""
    rows: Layout = tuple(dim if not _padding(dim) else whole((length(dim),))[0] for dim in walk.layout(call.x)[:-1])
    result: Layout = (*rows, *whole(walk.shape(node.name)[-1:]))
    work = axes_of(rows)
    x = walk.read(call.x, (*rows, *whole(walk.shape(call.x)[-1:])), work)
    weight = walk.read(call.weight, whole(walk.shape(call.weight)), work)
    made = walk.local("product", (x, weight, call.transposed), result)
    walk.found.products.append(Product(node.path, "whole", walk.parameter(call.weight), whole(walk.shape(call.weight))))
    return Made(_biased(walk, made.step, call.bias, result), result)


def _padding(dim: Dim) -> bool:
    return any(factor.real is not None for factor in dim)


def _loose(walk: ShardWalk, node: Node) -> Made | None:
    """A product with a matrix that is no parameter itself, but made from some: it is whole, and rows stay cut."""
    if operation(node) != "aten.linear" or node.kwargs:
        return None
    x, weight, bias = node.args[0].name, node.args[1].name, node.args[2] if len(node.args) > 2 else None
    layout = walk.layout(x)
    rows: Layout = layout[:-1]
    if any(factor.real is not None for dim in layout for factor in dim):
        return None
    want: Layout = (*rows, *whole(walk.shape(x)[-1:]))
    result: Layout = (*rows, *whole(walk.shape(node.name)[-1:]))
    work = axes_of(rows)
    given = [walk.read(x, want, work), walk.read(weight, whole(walk.shape(weight)), work)]
    made = walk.call("aten.linear.default", tuple(given), result)
    return Made(_biased(walk, made.step, bias.name if isinstance(bias, Ref) else None, result), result)


@dataclass(frozen=True, slots=True)
class MatrixCut:
    """The stored dimensions of a weight."""

    out: Dim
    into: Dim


def _only_rows(layout: Layout, rows: Axes) -> Layout:
    return (*(only(dim, rows) for dim in layout[:-1]), layout[-1])


def _weight(walk: ShardWalk, call: _Call, cut: MatrixCut, rows: Axes, kept: tuple[Axes, Axes], unsummed: Axes) -> Local:
    """The weight as the local product reads it."""
    stored: Layout = (cut.into, cut.out) if call.transposed else (cut.out, cut.into)
    walk.own(call.weight, stored, unsummed)
    out, into = only(cut.out, kept[0]), only(cut.into, kept[1])
    want: Layout = (into, out) if call.transposed else (out, into)
    key = (call.weight, bare(want, walk.grid), frozenset(rows))
    name = walk.parameter(call.weight)
    if name in walk.task.shared:
        return Local(walk.shared(call.weight, want, {*rows, *kept[0], *kept[1]} - axes_of(want)))
    if key not in walk.whole_weights:
        walk.whole_weights[key] = walk.moved(
            walk.stored(call.weight), stored, want, missing={*rows} - {*unsummed}, path=name, weight=True
        )
    return Local(walk.whole_weights[key])


def _biased(walk: ShardWalk, step: str, bias: str | None, layout: Layout) -> str:
    if bias is None:
        return step
    shape = walk.shape(bias)
    want = layout[-1:] if shape == (length(layout[-1]),) else operand(shape, layout)
    added = walk.read(bias, want, axes_of(layout))
    return walk.call("aten.add.Tensor", (Local(step), added), layout).step
