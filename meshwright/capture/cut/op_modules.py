"""Replaces operations by modules where a module can do more than the bare operation.

Products and lookups with a parameter become Linear, Embedding, convolutions and `RowLookup`, so that a split backward finds them.
Dropout, and every operation with a switch for training, becomes a module that follows `train()` and `eval()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture.trace.autograd_functions import FUNCTION, Function
from meshwright.capture.trace.operations import function_of, is_one_of
from meshwright.capture.trace.patches.train_eval_modes import MODE

State = Callable[[Any], nn.Parameter | None]
"""Returns the parameter that an argument refers to, or None."""


class RowLookup(nn.Module):
    """rows @ weight + bias, with a weight of shape (in, out)."""

    splits_rows = True
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, rows: Tensor) -> Tensor:
        """Compute the product in one operation."""
        return torch.mm(rows, self.weight) if self.bias is None else torch.addmm(self.bias, rows, self.weight)


class Switched(nn.Module):
    """An operation with one argument that depends on the mode. `value` is used in evaluation."""

    def __init__(self, target: str, place: int | str, value: Any) -> None:
        super().__init__()
        self.operation, self.place, self.value = function_of(target), place, value
        self.target = target

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operation."""
        if self.training:
            return self.operation(*args, **kwargs)
        if isinstance(self.place, str):
            return self.operation(*args, **{**kwargs, self.place: self.value})
        return self.operation(*args[: self.place], self.value, *args[self.place + 1 :], **kwargs)

    def __reduce__(self) -> Any:
        return type(self), (self.target, self.place, self.value), {"training": self.training}


class Counts(nn.Module):
    """An operation that updates statistics in training and not in evaluation."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target, self.operation = target, function_of(target)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operation. A norm has its switch for training among its arguments."""
        if is_one_of(self.target, ("aten.batch_norm", "aten.instance_norm")):
            return self.operation(*args[:5], self.training, *args[6:], **kwargs)
        return self.operation(*args, **kwargs) if self.training else args[0]

    def __reduce__(self) -> Any:
        return type(self), (self.target,), {"training": self.training}


class Chosen(nn.Module):
    """Selects the result of a module in training or in evaluation, by the current mode."""

    def forward(self, trained: Tensor, evaluated: Tensor) -> Tensor:
        """Return one of the two."""
        return trained if self.training else evaluated


Piece = tuple[nn.Module, Sequence[Any]]
"""A module, and the arguments of its call."""


def piece(target: str, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Piece | None:
    """Return a module for an operation, or None if the operation stays as it is."""
    if is_one_of(target, (FUNCTION,)):
        return Function(target.removeprefix(f"{FUNCTION}.")), args
    for names, make in _MAKERS:
        if is_one_of(target, names):
            return make(target, args, kwargs, state)
    return None


def _adopt(module: nn.Module, weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Module:
    """Give existing parameters to a module."""
    module.weight = weight
    module.register_parameter("bias", bias)
    return module


def _linear(target: str, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Piece | None:
    given = args[2] if len(args) > 2 else None
    weight, bias = state(args[1]), state(given)
    if weight is None or weight.dim() != 2 or (given is not None and bias is None) or kwargs:
        return None
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    return _adopt(made, weight, bias), args[:1]


def _addmm(target: str, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Piece | None:
    bias, weight = state(args[0]), state(args[2])
    if weight is None or bias is None or bias.dim() != 1 or kwargs:
        return None
    return _adopt(RowLookup(), weight, bias), args[1:2]


def _mm(target: str, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Piece | None:
    weight = state(args[1])
    return None if weight is None or kwargs else (_adopt(RowLookup(), weight, None), args[:1])


def _embedding(target: str, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Piece | None:
    weight = state(args[0])
    padding = args[2] if len(args) > 2 else -1
    if weight is None or kwargs or len(args) > 3 or not isinstance(padding, int):
        return None
    rows, width = weight.shape
    made = nn.Embedding(rows, width, padding_idx=None if padding < 0 else padding, device="meta")
    made.weight = weight
    return made, args[1:2]


def _convolution(target: str, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Piece | None:
    given = args[2] if len(args) > 2 else None
    weight, bias = state(args[1]), state(given)
    dims = int(target.removeprefix("aten.conv")[0])
    if weight is None or weight.dim() != dims + 2 or (given is not None and bias is None) or kwargs:
        return None
    defaults: list[Any] = [[1] * dims, [0] * dims, [1] * dims, 1]
    stride, padding, dilation, groups = [*args[3:], *defaults[max(0, len(args) - 3) :]]
    if isinstance(padding, str) or not all(isinstance(n, int) for n in (*stride, *padding, *dilation, groups)):
        return None
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    made = kind(
        weight.shape[1] * groups,
        weight.shape[0],
        tuple(weight.shape[2:]),
        stride=_many(stride, dims),
        padding=_many(padding, dims),
        dilation=_many(dilation, dims),
        groups=groups,
        bias=bias is not None,
        device="meta",
    )
    return _adopt(made, weight, bias), args[:1]


def _many(numbers: Sequence[int], dims: int) -> tuple[int, ...]:
    return tuple(numbers) * dims if len(numbers) == 1 else tuple(numbers)


def _dropout(target: str, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Piece | None:
    return (nn.Dropout(args[1]), args[:1]) if args[2] is True and not kwargs else None


def _other_dropout(target: str, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Piece | None:
    return (Switched(target, 2, False), args) if args[2] is True else None


def _attention(target: str, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Piece | None:
    if len(args) > 4 and args[4]:
        return Switched(target, 4, 0.0), args
    return (Switched(target, "dropout_p", 0.0), args) if kwargs.get("dropout_p") else None


def _norm(target: str, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Piece | None:
    """A norm without running statistics uses those of the batch in both modes, so it needs no switch."""
    return (Counts(target), args) if len(args) > 6 and args[5] is True and args[3] is not None else None


def _recurrent(target: str, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Piece | None:
    return (Switched(target, 6, False), args) if len(args) > 6 and args[6] is True else None


def _leaky(target: str, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Piece | None:
    return (Switched(target, 3, False), args) if len(args) > 3 and args[3] is True else None


def _mode(target: str, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Piece | None:
    return Chosen(), args


_OTHER_DROPOUTS = (
    *("dropout_", "alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_"),
    *("feature_alpha_dropout", "feature_alpha_dropout_"),
)

_MAKERS: tuple[tuple[tuple[str, ...], Callable[..., Piece | None]], ...] = (
    (("aten.linear",), _linear),
    (("aten.addmm",), _addmm),
    (("aten.mm",), _mm),
    (("aten.embedding",), _embedding),
    (("aten.conv1d", "aten.conv2d", "aten.conv3d"), _convolution),
    (("aten.dropout",), _dropout),
    (tuple(f"aten.{kind}" for kind in _OTHER_DROPOUTS), _other_dropout),
    (("aten.scaled_dot_product_attention",), _attention),
    (("aten.batch_norm", "aten.instance_norm"), _norm),
    (("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu"), _recurrent),
    (("aten.rrelu", "aten.rrelu_"), _leaky),
    ((MODE,), _mode),
)
