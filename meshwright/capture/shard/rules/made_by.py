"""Where features come from and where they go: the product that made a value, and the operations that follow it."""

from __future__ import annotations

from meshwright.capture.shard.layouts.walk import ShardWalk
from meshwright.capture.shard.layouts.walk_task import operation
from meshwright.capture.shard.rules.rule_elements import ELEMENTS
from meshwright.capture.trace.graph import Node, NodeKind, Ref

_THROUGH = (
    *ELEMENTS,
    *("aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten", "aten.permute", "aten.transpose"),
    *("aten.layer_norm", "aten.rms_norm", "aten.dropout"),
)
_REARRANGED = tuple(
    f"aten.{name}" for name in ("select", "unbind", "contiguous", "clone", "permute", "transpose", "unsqueeze", "squeeze")
)
_PRODUCTS = ("aten.linear", "aten.addmm", "aten.mm", "aten.matmul")


def widest(walk: ShardWalk, name: str) -> bool:
    """Returns whether a value comes from a product with a weight, and no other product of the same input is wider."""
    node = walk.flat.by_name[name]
    while node.kind is NodeKind.CALL and operation(node) in _THROUGH and node.args and isinstance(node.args[0], Ref):
        node = walk.flat.by_name[node.args[0].name]
    if node.kind is not NodeKind.CALL or operation(node) not in _PRODUCTS:
        return False
    x = node.args[1 if operation(node) == "aten.addmm" else 0].name
    width = walk.shape(node.name)[-1]
    products = [user for user in walk.task.users.get(x, ()) if operation(user) in _PRODUCTS]
    return all(walk.shape(user.name)[-1] <= width for user in products)


def ends(walk: ShardWalk, name: str) -> bool:
    """Returns whether no parameter is used after a value: it then leads to the loss or out of the model."""
    todo, seen = [name], set[str]()
    while todo:
        for user in walk.task.users.get(todo.pop(), ()):
            if user.name in seen:
                continue
            if any(other != name and (walk.is_parameter(other) or other in walk.task.light) for other in user.reads):
                return False
            seen.add(user.name)
            todo.append(user.name)
    return True


def taken_apart(walk: ShardWalk, name: str, dim: int) -> bool:
    """Returns whether all readers of a value select single indices of a dimension, as for q, k and v in (3, features)."""
    shape, users = walk.shape(name), walk.task.users.get(name, ())
    return shape[dim] > 1 and bool(users) and all(_takes_apart(walk, user, shape, dim) for user in users)


def _takes_apart(walk: ShardWalk, user: Node, shape: tuple[int, ...], dim: int) -> bool:
    kind, count = operation(user), len(shape)
    if kind not in _REARRANGED:
        return False
    args = walk.plain(user.args[1:])
    if kind in ("aten.select", "aten.unbind"):
        return (args[0] if args else 0) % count == dim
    if kind in ("aten.contiguous", "aten.clone"):
        return taken_apart(walk, user.name, dim)
    if kind == "aten.permute":
        return taken_apart(walk, user.name, [k % count for k in args[0]].index(dim))
    if kind == "aten.transpose":
        pair = [k % count for k in args[:2]]
        return taken_apart(walk, user.name, pair[1 - pair.index(dim)] if dim in pair else dim)
    if kind == "aten.unsqueeze":
        return taken_apart(walk, user.name, dim + (args[0] % (count + 1) <= dim))
    if kind == "aten.squeeze" and args and isinstance(args[0], int):
        gone = args[0] % count
        return gone != dim and taken_apart(walk, user.name, dim - (gone < dim and shape[gone] == 1))
    return False
