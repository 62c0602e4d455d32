"""What a loss is divided by, and own loss functions, as the Hugging Face Trainer has them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from meshwright.capture.trace.graph import Flat

IGNORED = -100


def items(labels: Tensor) -> float:
    """All labels that are not ignored."""
    return float((labels != IGNORED).sum())


def items_behind_the_first(labels: Tensor) -> float:
    """The same where a model shifts labels inside: the first of a row is never predicted."""
    return items(labels[..., 1:])


def count_for(model: Any, *, own_loss: bool) -> Callable[[Tensor], float] | None:
    """How the Hugging Face Trainer counts the labels of a step where that is not what the model's own loss is a mean over.

    It hands that number to models whose loss takes it. It knows from the loss's type whether labels are shifted; where a
    model has no type that it knows, all labels count, although the first of a row is never predicted.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind = LOSS_MAPPING.get(str(getattr(base, "loss_type", None)))
    decodes = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    shifts = kind is ForCausalLMLoss and not decodes
    if own_loss:
        return items_behind_the_first if shifts else items
    forward: Callable[..., Any] = base.forward if hasattr(base, "forward") else base
    accepts = any(a.kind is a.VAR_KEYWORD for a in inspect.signature(forward).parameters.values()) if callable(forward) else False
    accepts = getattr(base, "accepts_loss_kwargs", accepts)
    uses = "loss_function" in getattr(getattr(inspect.unwrap(forward), "__code__", None), "co_names", ())
    return items if accepts and uses and not shifts else None


class NamedOutputs(dict[str, Tensor]):
    """What a model returned, by name, as an attribute, or by number."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the model returned no {name!r}, but {', '.join(self)}") from None

    def __getitem__(self, key: Any) -> Tensor:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


def output_name(flat: Flat) -> str | None:
    """What a model calls its first output; None where it returns a bare tensor."""
    name = next(iter(flat.outputs), "output")
    return None if name == "output" else name


@dataclass(frozen=True)
class OwnLoss:
    """`compute_loss_func` of a Trainer: with outputs, labels and the number of items that what it returns will count for."""

    function: Callable[..., Tensor]
    name: str | None
    count: Callable[[Tensor], float]

    def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of some rows; a function that returns their sum divides it by the number that it is given."""
        outputs = output if self.name is None else NamedOutputs({self.name: output})
        return self.function(outputs, labels, num_items_in_batch=torch.tensor(self.count(labels)))
