"""Products with a weight, lookups in a table, convolutions: whoever reads the residual spread expands, the others contract."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.capture.shard.layout import Dim, Factor, Layout, axes_of, bare, whole
from meshwright.capture.shard.refusals import no_rule
from meshwright.capture.shard.rule_elements import ELEMENTS
from meshwright.capture.shard.sizes import Sizes
from meshwright.capture.shard.steps import Local, Offset, Product
from meshwright.capture.shard.walk import Made, Walk, operation
from meshwright.capture.trace.graph import Node, NodeKind, Ref, refs
from meshwright.costs.declared import Role
from meshwright.costs.product_plan import product_plan
from meshwright.costs.scheme import Axes, Grid, Scheme, Spread

VIEWS = ("aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten", "aten.slice", "aten.contiguous")
TRANSPOSES = ("aten.t", "aten.transpose", "aten.permute", "aten.numpy_T", "aten.T", "aten.mT")
LOSSES = ("aten.cross_entropy_loss",)


@dataclass(frozen=True, slots=True)
class _Call:
    """A product: x, the weight, whether it is stored as (in, out), and a bias."""

    x: str
    weight: str
    transposed: bool
    bias: str | None


def _call(walk: Walk, node: Node) -> _Call | None:
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
        weight, turned = walk.flat.by_name[weight].args[0].name, not turned
    if not walk.is_parameter(weight) or len(walk.shape(weight)) != 2:
        return None
    return _Call(found[0].name, weight, flip != turned, found[2].name if isinstance(found[2], Ref) else None)


def spread_layout(walk: Walk, name: str, spread: Spread, last: Dim) -> Layout:
    """A value whose rows, sequence and features are cut as a spread says; the last dimension is given."""
    shape, grows = walk.shape(name), walk.sizes.grows.get(name)
    found: list[Dim] = [*whole(shape[:-1]), last]
    if grows is None or grows >= len(shape) - 1:
        return tuple(found)
    rows, size = walk.sizes.rows, shape[grows]
    if size == rows:
        found[grows] = (Factor(rows, spread.rows),)
        others = [k for k in range(len(shape) - 1) if k != grows]
        if others and shape[others[0]] > 1:
            found[others[0]] = (Factor(shape[others[0]], spread.sequence),)
    elif size % rows == 0:
        found[grows] = (Factor(rows, spread.rows), Factor(size // rows, spread.sequence))
    return tuple(found)


def _present(layout: Layout, spread: Spread) -> Spread:
    """A spread without the axes that a layout had no place for."""
    there = axes_of(layout)
    rows, sequence = (tuple(axis for axis in axes if axis in there) for axes in (spread.rows, spread.sequence))
    return Spread(rows, sequence, spread.features)


def _role(walk: Walk, call: _Call, cut: Layout | None) -> Role:
    """From the layout of x; a weight that is stored already says it itself."""
    scheme, features = walk.scheme, axes_of(walk.layout(call.x)[-1:])
    if cut is not None:
        out, into = (cut[1], cut[0]) if call.transposed else (cut[0], cut[1])
        have = axes_of((out,)), axes_of((into,))
        for role, axes in ((Role.EXPAND, scheme.expand), (Role.CONTRACT, scheme.contract)):
            if have == (frozenset(axes.out), frozenset(axes.into)):
                return role
    inner, residual = frozenset(scheme.inner.features), frozenset(scheme.residual.features)
    return Role.CONTRACT if inner != residual and features == inner else Role.EXPAND


def components(walk: Walk, name: str) -> int:
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


def _parts(walk: Walk, node: Node, width: int) -> int:
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


def _leading(walk: Walk, node: Node, width: int) -> int:
    """A view that takes the features apart, such as (3, heads, width of a head): its first size if the axes cannot cut that."""
    shape, size = walk.shape(node.name), 1
    for at in range(len(shape) - 1, -1, -1):
        size *= shape[at]
        if size == width:
            return shape[at] if len(shape) - at >= 3 and shape[at] < 4 else 1
    return 1


def _only_scores(walk: Walk, name: str) -> bool:
    """Do all readers of a value lead to the loss or out of the model?"""
    width = walk.shape(name)[-1]
    for user in walk.task.users.get(name, ()):
        kind = operation(user)
        if kind in LOSSES:
            continue
        if kind not in (*ELEMENTS, *VIEWS) or walk.sizes.shapes.get(user.name, ())[-1:] != (width,) or not _only_scores(walk, user.name):
            return False
    return True


def _out(walk: Walk, node: Node, call: _Call, axes: Axes, cut: Layout | None) -> Dim:
    """The output dimension of a weight: in equal components, or padded where it only feeds the loss."""
    if cut is not None:
        return cut[1 if call.transposed else 0]
    width, parts = walk.shape(node.name)[-1], components(walk, node.name)
    if parts > 1 and axes:
        return (Factor(parts), Factor(width // parts, axes))
    return (padded(walk, width, axes) if _only_scores(walk, node.name) else Factor(width, axes),)


def padded(walk: Walk, size: int, axes: Axes) -> Factor:
    """A factor that is filled up to a size that divides."""
    parts = walk.grid.size(axes)
    full = -(-size // parts) * parts
    return Factor(full, axes, size if full != size else None)


def _only(dim: Dim, axes: Axes) -> Dim:
    """A dimension that only some of its axes cut."""
    return tuple(Factor(f.size, tuple(axis for axis in f.axes if axis in axes), f.real) for f in dim)


def product(walk: Walk, node: Node) -> Made | None:
    """Gather x, gather W, multiply, reduce."""
    call = _call(walk, node)
    if call is None:
        return None
    scheme = walk.scheme
    first = walk.parameter(call.weight)
    known = walk.found.cuts.get(first)
    role = _role(walk, call, known.layout if known else None)
    expands = role is Role.EXPAND
    have, want = (scheme.residual, scheme.inner) if expands else (scheme.inner, scheme.residual)
    matrix = scheme.expand if expands else scheme.contract
    into = walk.shape(call.x)[-1]
    out = _out(walk, node, call, matrix.out, known.layout if known else None)
    have = _present(spread_layout(walk, call.x, have, (Factor(into),)), have)
    expected = spread_layout(walk, call.x, have, (Factor(into, have.features),))
    result = spread_layout(walk, node.name, want, _only(out, want.features))
    want = _present(result, want)
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


@dataclass(frozen=True, slots=True)
class MatrixCut:
    """The stored dimensions of a weight."""

    out: Dim
    into: Dim


def _only_rows(layout: Layout, rows: Axes) -> Layout:
    return (*(_only(dim, rows) for dim in layout[:-1]), layout[-1])


def _weight(walk: Walk, call: _Call, cut: MatrixCut, rows: Axes, kept: tuple[Axes, Axes], unsummed: Axes) -> Local:
    """The weight as the local product reads it."""
    stored: Layout = (cut.into, cut.out) if call.transposed else (cut.out, cut.into)
    walk.own(call.weight, stored, unsummed)
    out, into = _only(cut.out, kept[0]), _only(cut.into, kept[1])
    want: Layout = (into, out) if call.transposed else (out, into)
    key = (call.weight, bare(want, walk.grid), frozenset(rows))
    if key not in walk.whole_weights:
        name = walk.parameter(call.weight)
        walk.whole_weights[key] = walk.moved(walk.stored(call.weight), stored, want, missing={*rows} - {*unsummed}, path=name, weight=True)
    return Local(walk.whole_weights[key])


def _biased(walk: Walk, step: str, bias: str | None, layout: Layout) -> str:
    if bias is None:
        return step
    added = walk.read(bias, layout[-1:], axes_of(layout))
    return walk.call("aten.add.Tensor", (Local(step), added), layout).step


def lookup(walk: Walk, node: Node) -> Made | None:
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
    made: Layout = (*(_only(dim, rows) for dim in result[:-1]), (Factor(width, features),))
    out = padded(walk, vocabulary, axes.out)
    stored: Layout = ((out,), (Factor(width, axes.into),))
    gathered = {*axes.out, *axes.into} - {*held, *features}
    walk.own(table, stored, [axis for axis in rows if axis not in gathered])
    own: Layout = (_only(stored[0], held), _only(stored[1], features))
    weight = walk.moved(walk.stored(table), stored, own, missing={*rows} & gathered, path=walk.parameter(table), weight=True)
    given = walk.read(ids, made[:-1])
    block = out.size // grid.size(held)
    padding = node.args[2] if len(node.args) > 2 else -1
    y = walk.local("lookup", (Local(weight), given, Offset(held, block), padding), made)
    walk.found.products.append(Product(node.path, "table", walk.parameter(table), stored))
    return Made(walk.moved(y.step, made, result, parts=held, path=node.path), result)


def push_lookup(walk: Walk, node: Node, want: Layout, missing: frozenset[str]) -> str:
    """A table of positions or of buckets, in a layout: its features are cut, not its rows."""
    table, ids = node.args[0].name, node.args[1].name
    work = axes_of(want) | missing
    weight = walk.read(table, (whole(walk.shape(table))[0], want[-1]), work)
    given = walk.read(ids, want[:-1])
    padding = node.args[2] if len(node.args) > 2 else -1
    return walk.call("aten.embedding.default", (weight, given, padding), want).step


def convolution(walk: Walk, node: Node) -> Made | None:
    """Rows are cut as in the residual stream, channels that come out as its features; all channels go in."""
    x, weight = node.args[0].name, node.args[1].name
    bias = node.args[2].name if len(node.args) > 2 and isinstance(node.args[2], Ref) else None
    rest = list(walk.plain(node.args[3:]))
    if not walk.is_parameter(weight) or node.kwargs or walk.sizes.grows.get(x) != 0 or walk.shape(x)[0] != walk.sizes.rows:
        return None
    if len(rest) > 3 and rest[3] != 1:
        raise no_rule(node, "its channels are in groups")
    scheme, shape = walk.scheme, walk.shape(node.name)
    rows, features = (Factor(walk.sizes.rows, scheme.residual.rows),), (Factor(shape[1], scheme.residual.features),)
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


def token_values(nodes: tuple[Node, ...], needs: dict[str, tuple[str, ...]]) -> frozenset[str]:
    """The values that depend on what is in a batch, not only on its shape."""
    found: set[str] = set()
    for node in nodes:
        if node.kind is NodeKind.COLUMN:
            found.add(node.name)
        elif node.kind is NodeKind.CALL and not operation(node).startswith(("aten.sym_size", "aten.new_")):
            if not operation(node).endswith("_like") and any(name in found for name in needs[node.name]):
                found.add(node.name)
    for node in nodes:  # what is written into later holds what was written
        if node.writes and any(ref.name in found for ref in refs(node.args)):
            found |= {other.name for other in nodes if not set(other.memory).isdisjoint(node.writes)}
    return frozenset(found)
