"""Replaces casts to float32 by casts to float64, and complex64 by complex128, so that float64 runs are exact.

Hugging Face models cast to float32 (in norms, rotary tables, the loss) even if all weights are float64. `widened` changes a
captured graph, `wide_casts` the operations of a plain model while it runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.capture.trace.graph import Flat, Node, mapped

_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_NAMES = {"float32": "float64", "complex64": "complex128"}


def widened(flat: Flat) -> Flat:
    """Returns the graph with float64 for float32, and complex128 for complex64."""
    return replace(flat, nodes=tuple(_node(node) for node in flat.nodes))


def _node(node: Node) -> Node:
    size = node.size
    if size is not None and size.dtype in _NAMES:
        size = replace(size, dtype=_NAMES[size.dtype], bytes=2 * size.bytes)
    body = widened(node.body) if node.body is not None else None
    return replace(node, args=mapped(node.args, _wide), kwargs=mapped(node.kwargs, _wide), size=size, body=body)


def _wide(leaf: Any) -> Any:
    return _WIDE.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf


class wide_casts(TorchFunctionMode):
    """A context in which casts to float32 become casts to float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation with wide dtypes."""
        if function is Tensor.float:
            function = Tensor.double
        return function(*mapped(tuple(args), _wide), **mapped(dict(kwargs or {}), _wide))
