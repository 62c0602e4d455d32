"""Counts the FLOPs and bytes of a layer by kind of operation, to estimate its time, and lists its products. Views cost nothing.

In mixed precision tensors have two bytes per element, and each weight of a product is read, written and read again as a copy.
"""

from __future__ import annotations

from math import prod

from meshwright.capture.cut.cost import flops
from meshwright.capture.cut.liveness import Line
from meshwright.capture.trace.graph import Node, NodeKind
from meshwright.capture.trace.operations import LOOKUPS, MATRIX_PRODUCTS, PRODUCTS, VIEWS, is_one_of
from meshwright.costs.roofline import OpWork, WorkKind
from meshwright.ir.profile import MatrixProduct


def layer_work(line: Line, first: int, last: int, *, rows: int, mixed: bool = False) -> tuple[OpWork, ...]:
    """Return the work of the operations first..last-1 for one row of an example with `rows` rows."""
    return tuple(
        _work(line, node, rows, mixed) for node in line.work[first:last] if node.random or not is_one_of(node.target, VIEWS)
    )


def layer_products(line: Line, first: int, last: int, *, rows: int) -> tuple[MatrixProduct, ...]:
    """Return the matrix products with parameters among the operations first..last-1 of an example with `rows` rows.

    Products of one input are one (q, k, v). They alternate: those that read what enters the layer expand, those that read their
    results contract, and so on.
    """
    found: dict[str, MatrixProduct] = {}
    depth: dict[str, int] = {}
    for node in line.work[first:last]:
        before = depth[node.name] = max((depth.get(name, 0) for name in line.needs[node.name]), default=0)
        sources = [_before_views(line, name) for name in node.reads]
        data = [source.name for source in sources if not _is_parameter(line, source)]
        shapes = [source.size.shape for source in sources if _is_parameter(line, source) and source.size is not None]
        matrices = [shape for shape in shapes if len(shape) == 2]  # not the bias
        if node.size is None or not is_one_of(node.target, MATRIX_PRODUCTS) or not len(data) == len(matrices) == 1:
            continue
        depth[node.name] += 1
        out = node.size.shape[-1]
        known = found.get(data[0])
        outs = (*known.outs, out) if known is not None else (out,)
        tokens = max(1, prod(node.size.shape[:-1]) // rows)
        found[data[0]] = MatrixProduct(prod(matrices[0]) // out, outs, tokens, contracts=before % 2 == 1)
    return tuple(found.values())


def _before_views(line: Line, name: str) -> Node:
    """Returns the node whose value a chain of views reads."""
    node = line.flat.by_name[name]
    while node.kind is NodeKind.CALL and not node.random and is_one_of(node.target, VIEWS) and node.reads:
        node = line.flat.by_name[node.reads[0]]
    return node


def _is_parameter(line: Line, node: Node) -> bool:
    return node.kind is NodeKind.STATE and node.target in line.parameters


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
