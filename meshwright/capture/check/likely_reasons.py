"""Likely reasons why captured layers differ from the model, and what to do about it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn

NAMED = 3
"""The largest number of places that an error names."""


@dataclass(frozen=True)
class Reason:
    """A reason, and what to do."""

    why: str
    fix: str


NO_FUNCTION = "captured layers would always use the value from the capture"


def of_state(changed: list[str], generators: list[str], model: nn.Module) -> Reason | None:
    """A model that changes Python state, or draws from generators outside of torch, in every call."""
    if changed:
        what = ", ".join(changed[:NAMED])
        return Reason(f"{what} changes with every forward, and {NO_FUNCTION}", "use a buffer (register_buffer) that counts calls")
    if generators:
        where = _reading(model, generators)
        return Reason(
            f"forward draws from {' and '.join(generators)}{where}, and {NO_FUNCTION}", "use torch.rand or torch.randint"
        )
    return None


def of_buffers(replaced: list[str]) -> Reason | None:
    """A model that assigns a new tensor to a buffer. Captured layers do not see the new tensor."""
    if not replaced:
        return None
    name = replaced[0].rpartition(".")[2]
    return Reason(
        f"forward assigns a new tensor to the buffer {replaced[0]}, and captured layers keep using the old one",
        f"write into it: self.{name}.copy_(...)",
    )


def of_itself(error: float) -> Reason:
    """A model whose second call differs from its first."""
    return Reason(
        f"the model differs from itself by {error:.1e} when it is called again with the same batch and seed: "
        f"forward keeps state outside of its buffers, and {NO_FUNCTION}",
        "use a buffer (register_buffer) for state that changes",
    )


def of_scale(what: str, error: float, scale: float) -> Reason:
    """A backward that is not proportional to the loss."""
    return Reason(
        f"the model's own backward is not linear: with the loss times {scale:g}, {what} over {scale:g} differs by {error:.1e}. "
        "An autograd.Function or a hook adds to gradients, or clips them by value. Gradients of microbatches are summed and "
        "divided once, so it would see other gradients than in one process",
        "add an auxiliary loss to the loss in forward; use max_grad_norm instead of clipping by value",
    )


def of_mode(model: nn.Module) -> Reason:
    """Evaluation differs, but training does not."""
    asking = _asking_for_mode(model)
    where = f" in {', '.join(asking[:NAMED])}" if asking else ""
    return Reason(
        f"evaluation differs from training: `if self.training`{where}",
        "put the difference into a module without parameters, such as nn.Dropout, or evaluate the model in one process",
    )


def of_gradient() -> Reason:
    """The forward agrees, but the gradients do not."""
    return Reason(
        "the forward is equal, so capture does not see a custom backward, a gradient hook or recomputation",
        "remove the custom backward, or pass a list of layers, which is not captured",
    )


def of_size(example: str) -> Reason:
    """The size of the capture agrees, but another size does not."""
    return Reason(
        f"only at another size than it was captured with ({example}): forward computes a number from sizes, or branches on one",
        "use tensor operations instead of Python numbers and branches, or batches of one size",
    )


def unknown() -> Reason:
    """The reason is not known."""
    return Reason(
        "the trace does not compute what forward computes",
        "pass a list of layers, which is not captured; please report the model as a bug",
    )


def _asking_for_mode(model: nn.Module) -> list[str]:
    """Return the modules whose forward reads `self.training`, without torch's own."""
    return _with_names(model, {"training"})


def _reading(model: nn.Module, generators: list[str]) -> str:
    found = _with_names(model, {name.split(".")[0] for name in generators} | {"np"})
    return f" in {', '.join(found[:NAMED])}" if found else ""


def _with_names(model: nn.Module, names: set[str]) -> list[str]:
    """Return the modules whose forward uses one of these names, or else those with another method that does; not torch's own."""
    in_forward, elsewhere = list[str](), list[str]()
    for path, module in model.named_modules():
        own = [kind for kind in type(module).__mro__ if kind.__module__.partition(".")[0] not in ("torch", "builtins")]
        methods = [inspect.unwrap(each) for kind in own for each in vars(kind).values() if inspect.isfunction(each)]
        using = [m.__name__ for m in methods if inspect.isfunction(m) and names & set(m.__code__.co_names)]
        if using:
            (in_forward if "forward" in using else elsewhere).append(path or type(module).__name__)
    return in_forward or elsewhere
