"""The number of labels that a loss is divided by, and loss functions of the user, as in the Hugging Face Trainer."""

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


def label_count(labels: Tensor) -> float:
    """Counts the labels that are not ignored."""
    return float((labels != IGNORED).sum())


def shifted_label_count(labels: Tensor) -> float:
    """Counts the labels of a model that shifts them inside: the first label of a row is never predicted."""
    return label_count(labels[..., 1:])


def count_for(model: Any, *, own_loss: bool) -> Callable[[Tensor], float] | None:
    """Returns how the Hugging Face Trainer counts the labels of a step, or None if the mean in the model's own loss is used.

    The Hugging Face Trainer passes this number to models whose loss accepts it. The loss type tells it whether the model shifts
    labels. If it does not know the loss type, it counts all labels, although the first label of a row is never predicted.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind = LOSS_MAPPING.get(str(getattr(base, "loss_type", None)))
    decodes = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    shifts = kind is ForCausalLMLoss and not decodes
    if own_loss:
        return shifted_label_count if shifts else label_count
    forward: Callable[..., Any] = base.forward if hasattr(base, "forward") else base
    accepts = any(a.kind is a.VAR_KEYWORD for a in inspect.signature(forward).parameters.values()) if callable(forward) else False
    accepts = getattr(base, "accepts_loss_kwargs", accepts)
    uses = "loss_function" in getattr(getattr(inspect.unwrap(forward), "__code__", None), "co_names", ())
    return label_count if accepts and uses and not shifts else None


class NamedOutputs(dict[str, Tensor]):
    """The outputs of a model, by name, as attributes, or by number."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the model returned no {name!r}, only {', '.join(self)}") from None

    def __getitem__(self, key: Any) -> Tensor:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


def output_name(flat: Flat) -> str | None:
    """Returns the name of a model's first output, or None if the model returns a bare tensor."""
    name = next(iter(flat.outputs), "output")
    return None if name == "output" else name


@dataclass(frozen=True)
class OwnLoss:
    """The `compute_loss_func` of a Trainer. It gets the outputs, the labels and the number of items in these labels."""

    function: Callable[..., Tensor]
    name: str | None
    count: Callable[[Tensor], float]

    def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of some rows. The user's function must divide a sum by the number that it gets."""
        outputs = output if self.name is None else NamedOutputs({self.name: output})
        return self.function(outputs, labels, num_items_in_batch=torch.tensor(self.count(labels)))
