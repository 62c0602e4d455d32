"""Operations by name: converts functions of a traced graph to names and back, and lists operations with special properties."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from meshwright.errors import MeshwrightError

_PLACES = {"operator": operator, "math": math, "builtins": builtins, "torch": torch}

MATRIX_PRODUCTS = ("aten.linear", "aten.addmm", "aten.mm", "aten.matmul")
PRODUCTS = (
    *MATRIX_PRODUCTS,
    "aten.bmm",
    "aten.baddbmm",
    "aten.einsum",
    "aten.conv1d",
    "aten.conv2d",
    "aten.conv3d",
    "aten.convolution",
    "aten.conv_transpose1d",
    "aten.conv_transpose2d",
    "aten._grouped_mm",
)
"""Operations whose cost is that of a matrix product."""

LOOKUPS = ("aten.embedding",)
CORES = ("aten.scaled_dot_product_attention", "aten.softmax", "aten._softmax")
"""The operations with which attention mixes positions."""

VIEWS = (
    *("aten.view", "aten.slice", "aten.select", "aten.transpose", "aten.permute", "aten.unsqueeze", "aten.squeeze"),
    *("aten.expand", "aten.reshape", "aten.t", "aten.alias", "aten.detach", "aten.diagonal", "aten.split", "aten.chunk"),
    *("aten.unbind", "aten.narrow", "aten.as_strided", "aten.view_as", "aten.flatten", "aten.contiguous", "aten.to"),
    *("aten.split_with_sizes", "aten.movedim", "aten.unflatten", "aten.expand_as", "aten.numpy_T", "aten.dropout"),
    *("operator.getitem", "aten.T", "aten.mT", "aten.type_as", "aten.lift_fresh", "aten.unfold", "aten.swapaxes"),
    "meshwright.mode",
)
"""Operations whose result may share memory with their first argument."""

CHECKS = ("aten._assert_tensor_metadata", "aten._assert_async", "aten._assert_scalar", "aten.sym_constrain_range")
"""Operations that only check whether an assumption of the trace still holds."""


_STANDS_FOR = {"meshwright.ctc_loss.default": "aten.ctc_loss.Tensor"}
"""Operations that exist only during tracing, and the operation that a captured layer uses instead."""


def is_one_of(target: str, names: tuple[str, ...]) -> bool:
    """True if an operation, in any overload, is one of these."""
    return any(target == name or target.startswith(name + ".") for name in names)


def name_of(function: Any) -> str:
    """Return the name by which `function_of` finds an operation."""
    if hasattr(function, "overloadpacket"):
        return _STANDS_FOR.get(str(function), str(function))
    if is_higher_order(function):
        return f"higher_order.{function.name()}"
    name = getattr(function, "__name__", "")
    for place, where in _PLACES.items():
        if getattr(where, name, None) is function:
            return f"{place}.{name}"
    raise MeshwrightError(f"the model calls {function!r}, which cannot be found by a name", fix="use an operation of torch")


def is_higher_order(function: Any) -> bool:
    """True for an operation on whole graphs, such as a region without gradients."""
    return callable(getattr(function, "name", None)) and hasattr(torch.ops.higher_order, function.name())


def function_of(name: str) -> Callable[..., Any]:
    """Return an operation by its name."""
    place, _, rest = name.partition(".")
    if place in _PLACES:
        found: Callable[..., Any] = getattr(_PLACES[place], rest)
        return found
    at: Any = torch.ops
    for part in name.split("."):
        at = getattr(at, part)
    result: Callable[..., Any] = at
    return result


DROPOUTS = ("aten.dropout", "aten.feature_dropout", "aten.alpha_dropout", "aten.feature_alpha_dropout")


def is_random(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if an operation draws random numbers. Dropout that is switched off does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
        return False
    name = str(function)
    if is_one_of(name, DROPOUTS):
        return bool(args[1]) and bool(args[2])
    if is_one_of(name, ("aten.scaled_dot_product_attention",)):
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    return True
