"""Finds the values of a flat graph that need a gradient."""

from __future__ import annotations

from collections.abc import Collection

from meshwright.capture.cut.liveness import Line
from meshwright.capture.shard.layouts.walk_task import operation
from meshwright.capture.trace.graph import Node, NodeKind


def learning_values(line: Line, trained: Collection[str]) -> frozenset[str]:
    """Returns the values that depend, differentiably, on a parameter that needs a gradient."""
    found: set[str] = set()
    for node in line.flat.nodes:
        if node.kind is NodeKind.STATE and node.target in trained:
            found.add(node.name)
        elif node.kind is NodeKind.CALL and not _stops(node) and any(name in found for name in node.reads):
            found |= {node.name} if node.size is None or node.size.learns else set()
    return frozenset(found)


def _stops(node: Node) -> bool:
    """Whether an operation is not differentiable."""
    if operation(node) == "higher_order.wrap_with_set_grad_enabled":
        return node.args[0] is False
    return operation(node) in _STOPS


_STOPS = tuple(
    f"aten.{name}"
    for name in (
        *("detach", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "sym_size", "sym_numel"),
        *("new_zeros", "new_ones", "new_full", "new_empty"),
    )
)
