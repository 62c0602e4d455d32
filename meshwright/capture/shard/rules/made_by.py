"""Where features come from and where they lead: the product behind a value, and what reads a value to the end."""

from __future__ import annotations

from meshwright.capture.shard.layouts.walk import ShardWalk
from meshwright.capture.shard.layouts.walk_task import operation
from meshwright.capture.shard.rules.rule_elements import ELEMENTS
from meshwright.capture.trace.graph import NodeKind, Ref

_THROUGH = (
    *ELEMENTS,
    *("aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten", "aten.permute", "aten.transpose"),
    *("aten.layer_norm", "aten.rms_norm", "aten.dropout"),
)
_PRODUCTS = ("aten.linear", "aten.addmm", "aten.mm", "aten.matmul")


def widest(walk: ShardWalk, name: str) -> bool:
    """Is it made by a product with a weight, and no other product of the same input is wider?"""
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
    """Does no parameter come after a value? It then leads to the loss or out of the model."""
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
