"""Operations along some dimensions (softmax, sort, cumsum), which must be whole. All other dimensions stay cut."""

from __future__ import annotations

from typing import Any

from meshwright.capture.shard.layouts.bound_arguments import bound
from meshwright.capture.shard.layouts.layout import Dim, Factor, Layout, axes_of, bare, length, whole
from meshwright.capture.shard.layouts.refusals import no_rule
from meshwright.capture.shard.layouts.steps import StepKind
from meshwright.capture.shard.layouts.walk import ShardWalk
from meshwright.capture.shard.layouts.walk_task import Made, operation
from meshwright.capture.trace.graph import Node, Ref, mapped

BY_DIM = (
    *("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "amax", "amin", "logsumexp"),
    *("any", "all", "argmax", "argmin", "max", "min", "median", "prod", "flip", "index_select", "sort", "argsort", "glu"),
    *("topk", "kthvalue", "linalg_vector_norm", "norm", "roll", "var", "std", "unfold", "diff"),
)
_PADS = ("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d")
_REPEATS = ("repeat", "tile")
ALONG = tuple(f"aten.{name}" for name in (*BY_DIM, *_PADS, *_REPEATS))


def _dims(walk: ShardWalk, node: Node, count: int) -> list[int] | None:
    """The dimensions that an operation works along; None where it is not known, or all."""
    given, kind = bound(node), operation(node).removeprefix("aten.")
    if kind in _PADS:
        pads = walk.plain(given.get("pad", given.get("padding")))
        return [count - 1 - k for k in range(len(pads) // 2) if pads[2 * k] or pads[2 * k + 1]]
    if kind in _REPEATS:
        times = walk.plain(given.get("repeats", given.get("dims")))
        return [at for at, n in enumerate(times) if n != 1] if len(times) == count else None
    found = walk.plain(given.get("dim", given.get("dims", given.get("dimension"))))
    if found is None or found == []:
        return None
    return [dim % count for dim in (found if isinstance(found, list | tuple) else [found])]


def _cleared(walk: ShardWalk, layout: Layout, dims: list[int]) -> Layout:
    """A layout with some dimensions whole, and no padding."""
    found = []
    for at, dim in enumerate(layout):
        padding = any(factor.real is not None for factor in dim)
        found.append(whole((length(dim),))[0] if padding or (at in dims and axes_of(bare((dim,), walk.grid))) else dim)
    return tuple(found)


def _result(want: Layout, dims: list[int], shape: tuple[int, ...]) -> Layout | None:
    """The layout of a result of this shape: dimensions that are gone, or of another size, are among these."""
    if len(shape) == len(want):
        found: list[Dim] = [(Factor(size),) if at in dims else want[at] for at, size in enumerate(shape)]
    elif len(shape) == len(want) - len(dims):
        found = [dim for at, dim in enumerate(want) if at not in dims]
    elif len(shape) == len(want) + 1 and len(dims) == 1:  # windows are a new last dimension
        found = [(Factor(shape[at]),) if at in dims else want[at] for at in range(len(want))] + [(Factor(shape[-1]),)]
    else:
        return None
    return tuple(found) if tuple(map(length, found)) == shape else None


def along(walk: ShardWalk, node: Node) -> Made | None:
    """The dimensions in question whole, the operation on what each rank has of the others."""
    source = node.args[0].name
    others = [name for name in walk.tensors((node.args, node.kwargs)) if name != source]
    layout = walk.layout(source)
    dims = _dims(walk, node, len(layout))
    if dims is None or node.writes or node.random or (others and operation(node) != "aten.index_select"):
        return None
    want = _cleared(walk, layout, dims)
    work = axes_of(want)
    given = {name: walk.read(name, whole(walk.shape(name)), work) for name in others}
    given[source] = walk.read(source, want, work)

    def leaf(x: Any) -> Any:
        return (given[x.name] if x.name in given else walk.sizes.numbers[x.name]) if isinstance(x, Ref) else x

    args, kwargs = mapped(node.args, leaf), mapped(dict(node.kwargs), leaf)
    if node.name not in walk.sizes.shapes:
        return _several(walk, node, (args, kwargs), want, dims)
    result = _result(want, dims, walk.shape(node.name))
    return None if result is None else walk.call(node.target, args, result, kwargs)


def _several(walk: ShardWalk, node: Node, call: tuple[Any, Any], want: Layout, dims: list[int]) -> Made | None:
    """Values and places: `getitem` finds them."""
    users = [user for user in walk.task.users.get(node.name, ()) if operation(user) == "operator.getitem"]
    found = _result(want, dims, walk.shape(users[0].name)) if users else None
    if found is None:
        raise no_rule(node)
    walk.pieces[node.name] = walk.step(StepKind.OPERATION, node.target, *call), [found, found]
    return None
