"""Split backward (zero bubble): I computes input gradients; W later computes the weight gradients that I has deferred.

    deferred = Deferred(stage)         once; forwards and whole backwards (B) then run as usual
    deferred.begin()
    loss.backward()                    I: gradients reach the inputs; weight gradients are deferred as (input, grad_output)
    rest = deferred.end()
    run(rest)                          W: no forward and no graph; adds to .grad, bit for bit, what B would have added

Linear, transformers' Conv1D, row products that declare it (`splits_rows`), Embedding and convolutions are split if their weight
is a leaf that needs a gradient; so are layers that defer by themselves (`deferred_slot`). Everything else is left to autograd and
gets its gradients during I: other modules, computed weights, autocast, and the options that `_kind` checks.
Between I and W a rest holds the tensors themselves, so inputs and received gradients must not be overwritten.
Hooks on modules run as usual. Hooks on a split parameter get None in I and are not called in W.
Of torch.func only functional_call is supported. torch.compile is not supported.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from meshwright.runtime.stage.split_functions import DeferredSlot, Rest, convolution, lookup, product

__all__ = ["Deferred", "Rest", "run"]

Call = Callable[[DeferredSlot, Any, Tensor], Tensor | None]
"""Calls a module through its autograd function. Returns None if this call cannot be split."""


@torch.no_grad()
def run(rest: Rest, reached: set[int] | None = None) -> None:
    """Runs W: adds the deferred gradients to `.grad`, in place if there is one. Each job is dropped when done; `rest` ends empty.

    Adds the ids of the parameters that get a gradient to `reached`.
    """
    uses = Counter(id(target) for _, targets in rest for target in targets)
    sums: dict[int, Tensor] = {}
    rest.reverse()
    while rest:
        job, targets = rest.pop()
        for target, grad in zip(targets, job(), strict=True):
            if target is None or grad is None:
                continue
            # A weight that is used twice is summed first and added to .grad once: autograd's order, so the bits are equal.
            key = id(target)
            if reached is not None:
                reached.add(key)
            total = sums.pop(key).add_(grad) if key in sums else grad
            uses[key] -= 1
            if uses[key]:
                sums[key] = total
            elif target.grad is not None:
                target.grad.add_(total)
            else:  # in the layout of the parameter, like autograd
                target.grad = total if total.stride() == target.stride() else torch.empty_like(target).copy_(total)


class Deferred:
    """The deferred weight gradients of a stage."""

    def __init__(self, module: nn.Module) -> None:
        self._slots = [slot for part in module.modules() if (slot := _slot(part)) is not None]
        self._rest: Rest | None = None

    def begin(self) -> None:
        """From now on backward puts weight gradients into a new rest instead of accumulating them."""
        assert self._rest is None, "begin without end"
        self._rest = []
        for slot in self._slots:
            slot.rest = self._rest

    def end(self) -> Rest:
        """Ends deferring. Returns what was deferred since `begin`."""
        rest, self._rest = self._rest, None
        assert rest is not None, "end without begin"
        for slot in self._slots:
            slot.rest = None
        return rest


class _Forward:
    """The forward of one module, set on the instance. It calls an autograd function that can defer, or the plain forward."""

    __slots__ = ("call", "module", "plain", "slot")

    def __init__(self, module: nn.Module, plain: Callable[..., Any], call: Call) -> None:
        self.module = weakref.ref(
            module
        )  # a strong reference would be a cycle, and only the garbage collector would free the model
        self.plain = plain
        self.call = call
        self.slot = DeferredSlot()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        if len(args) == 1 and not kwargs and torch.is_grad_enabled():
            y = self.call(self.slot, module, args[0])
            if y is not None:
                return y
        return self.plain(module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles get the forward of their class. They are not split, and load without Meshwright.
        return getattr, (self.module(), "forward")


def _slot(module: nn.Module) -> DeferredSlot | None:
    """Returns the slot of a module, and replaces its forward on the first call; None if autograd keeps the whole backward.

    A module that defers its weight gradients by itself has a slot (`deferred_slot`).
    """
    own: DeferredSlot | None = getattr(module, "deferred_slot", None)
    if own is not None:
        return own
    forward: Any = module.forward
    if isinstance(forward, _Forward):
        return forward.slot
    plain = getattr(forward, "__func__", None)
    call = _kind(module, plain)
    if call is None:
        return None
    module.forward = split = _Forward(module, plain, call)  # type: ignore[arg-type]
    return split.slot


def _kind(module: Any, plain: object) -> Call | None:
    """Returns how to call a module, judged by its forward function. A subclass with its own forward is not split."""
    if is_parametrized(module):  # reading its weight would compute it
        return None
    if plain is nn.Linear.forward:
        return _linear
    if plain is nn.Embedding.forward:
        return _embedding if module.max_norm is None and not module.sparse and not module.scale_grad_by_freq else None
    if plain in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward):
        return _convolution if module.padding_mode == "zeros" and not isinstance(module.padding, str) else None
    if getattr(module, "splits_rows", False):
        return _rows
    for base in type(module).__mro__:
        if base.__name__ == "Conv1D" and plain is not None and vars(base).get("forward") is plain and hasattr(module, "nf"):
            return _conv1d
    return None


def _ready(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Returns whether the gradients of a call can be deferred: they must end in leaves, with no cast in between."""
    if not (weight.requires_grad and weight.is_leaf and (bias is None or bias.is_leaf)) or weight.is_complex():
        return False
    device = x.device.type
    return device != "meta" and not torch.is_autocast_enabled(device)


def _linear(slot: DeferredSlot, module: Any, x: Tensor) -> Tensor | None:
    weight, bias = module.weight, module.bias
    if not _ready(x, weight, bias):
        return None
    if x.dim() == 2:
        return product(slot, x, weight, bias, True)
    # As in torch: rows are flattened, and the bias is added inside the product only if the rows are contiguous.
    rows = x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)
    fused = bias is None or x.is_contiguous()
    y = product(slot, rows, weight, bias if fused else None, True).view(*x.shape[:-1], weight.shape[0])
    return y if fused else y + bias


def _conv1d(slot: DeferredSlot, module: Any, x: Tensor) -> Tensor | None:
    weight, bias = module.weight, module.bias
    if not _ready(x, weight, bias):
        return None
    return product(slot, x.view(-1, x.shape[-1]), weight, bias, False).view(*x.shape[:-1], module.nf)


def _rows(slot: DeferredSlot, module: Any, x: Tensor) -> Tensor | None:
    weight, bias = module.weight, module.bias
    return product(slot, x, weight, bias, False) if x.dim() == 2 and _ready(x, weight, bias) else None


def _embedding(slot: DeferredSlot, module: Any, x: Tensor) -> Tensor | None:
    weight = module.weight
    return lookup(slot, x, weight, module.padding_idx) if _ready(x, weight, None) else None


def _convolution(slot: DeferredSlot, module: Any, x: Tensor) -> Tensor | None:
    weight, bias = module.weight, module.bias
    if x.dim() != weight.dim() or not _ready(x, weight, bias):  # autograd handles an input without a batch dimension
        return None
    return convolution(slot, x, weight, bias, (module.stride, module.padding, module.dilation, module.groups))
