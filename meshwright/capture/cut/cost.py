"""Costs of layers: FLOPs from the shapes of matrix products and attention, bytes from what autograd would save.

FLOPs are those of a forward, with two per multiply-add; every other operation counts one per element. To find what a backward
needs, the layers run without values. If an operation cannot run so, every result is assumed to be saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod

from torch import nn

from meshwright.capture.cut.dry_walk import dry_walk
from meshwright.capture.cut.liveness import Line
from meshwright.capture.trace.graph import Node, Size
from meshwright.capture.trace.operations import PRODUCTS, VIEWS, is_one_of


def flops(line: Line, node: Node) -> float:
    """Return the FLOPs of one node."""
    own = node.size.shape if node.size is not None else ()
    if is_one_of(node.target, ("aten.scaled_dot_product_attention",)):
        query, key, value = (_shape(line, name) for name in node.reads[:3])
        return 2.0 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    if is_one_of(node.target, ("aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution")):
        return 2.0 * prod(own) * prod(_shape(line, node.reads[1])[1:])
    if is_one_of(node.target, ("aten.addmm", "aten.baddbmm")):
        return 2.0 * prod(own) * _shape(line, node.reads[1])[-1]
    if is_one_of(node.target, PRODUCTS) and node.reads and _shape(line, node.reads[0]):
        return 2.0 * prod(own) * _shape(line, node.reads[0])[-1]
    return 0.0 if is_one_of(node.target, VIEWS) else float(prod(own)) if node.size is not None else 0.0


def _shape(line: Line, name: str) -> tuple[int, ...]:
    size = line.flat.by_name[name].size
    return () if size is None else size.shape


def saved(line: Line, places: Sequence[int], model: nn.Module) -> list[int]:
    """Return for each layer the bytes that autograd saves for its backward, without parameters."""
    try:
        return [one.saved for one in dry_walk(line, places, model)]
    except Exception:  # an operation that needs values cannot run without them
        return [sum(_bytes(node.size) for node in line.work[a:b]) for a, b in itertools.pairwise(places)]


def _bytes(size: Size | None) -> int:
    return 0 if size is None else size.bytes
