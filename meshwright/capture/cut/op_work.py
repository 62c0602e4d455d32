"""Counts the FLOPs and bytes of a layer by kind of operation, to estimate its time. Views cost nothing.

In mixed precision tensors have two bytes per element, and each weight of a product is read, written and read again as a copy.
"""

from __future__ import annotations

from meshwright.capture.cut.cost import flops
from meshwright.capture.cut.liveness import Line
from meshwright.capture.trace.graph import Node, NodeKind
from meshwright.capture.trace.operations import LOOKUPS, PRODUCTS, VIEWS, is_one_of
from meshwright.costs.roofline import OpWork, WorkKind


def layer_work(line: Line, first: int, last: int, *, rows: int, mixed: bool = False) -> tuple[OpWork, ...]:
    """Return the work of the operations first..last-1 for one row of an example with `rows` rows."""
    return tuple(
        _work(line, node, rows, mixed) for node in line.work[first:last] if node.random or not is_one_of(node.target, VIEWS)
    )


def _work(line: Line, node: Node, rows: int, mixed: bool) -> OpWork:
    by_name = line.flat.by_name
    tensors, weights = _bytes(node), 0.0
    learns = False
    for name in dict.fromkeys(node.reads):
        read = by_name[name]
        if read.kind is NodeKind.STATE and read.target in line.parameters:
            weights += _bytes(read)
            learns = True
        elif not (is_one_of(node.target, LOOKUPS) and read.kind is NodeKind.STATE):
            tensors += _bytes(read)
    kind = _kind(node, has_weight=bool(weights))
    if kind is WorkKind.LOOKUP:
        tensors *= 2  # what it returns is read from the table first
    if mixed:
        tensors, weights = tensors / 2, weights * (2 if kind is WorkKind.PRODUCT else 1)
    return OpWork(kind, flops(line, node) / rows, tensors / rows, weights, learns)


def _kind(node: Node, *, has_weight: bool) -> WorkKind:
    if is_one_of(node.target, ("aten.scaled_dot_product_attention",)):
        return WorkKind.ATTENTION
    if is_one_of(node.target, LOOKUPS):
        return WorkKind.LOOKUP
    if is_one_of(node.target, PRODUCTS):
        return WorkKind.PRODUCT if has_weight else WorkKind.MIXING
    return WorkKind.OTHER


def _bytes(node: Node) -> float:
    return 0.0 if node.size is None else float(node.size.bytes)
