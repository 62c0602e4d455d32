"""What Meshwright needs of torch and torch does not offer in public: each with a reason and a fallback."""

from __future__ import annotations

from typing import Any


def size_guards(program: Any) -> list[str] | None:
    """The conditions on sizes that an exported program took for granted, as Python text over `L['column'].size()[dim]`.

    Reason: a branch on a length (`if ids.shape[1] > 10`) is decided while tracing. The program keeps the condition, but only
    its own module checks it, and that module cannot be cut. Fallback: None, where this release of torch keeps no such text;
    every size must then be as in the example.
    """
    found = getattr(program, "_guards_code", None)
    return None if found is None else [str(text) for text in found]


def backward_hooks(module: Any) -> bool:
    """Does a module have backward hooks? Reason: torch has no public question. Fallback: no hook is seen."""
    return any(getattr(module, name, None) for name in ("_backward_hooks", "_backward_pre_hooks"))


def forward_hooks(module: Any) -> bool:
    """Does a module have forward hooks? Reason: torch has no public question. Fallback: no hook is seen."""
    return any(getattr(module, name, None) for name in ("_forward_hooks", "_forward_pre_hooks"))


def gradient_hooks(tensor: Any) -> bool:
    """Does a tensor have hooks on its gradient? Reason: torch has no public question. Fallback: no hook is seen."""
    return any(getattr(tensor, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))


def is_data_dependent(error: BaseException) -> bool:
    """Did a trace end because it was asked for a value? Reason: torch's errors for it have no public names and no common base.

    Fallback: such an error is shown as torch words it.
    """
    return type(error).__name__ in (
        "GuardOnDataDependentSymNode",
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "PendingUnbackedSymbolNotFound",
    )


def has_no_value(tensor: Any) -> bool:
    """Is it a tensor of a trace, whose values nobody knows? Reason: torch has no public question. Fallback: none is."""
    return type(tensor).__name__ == "FakeTensor" and getattr(tensor, "constant", None) is None


CASTS = "_apply"
"""The method of a module that `.to`, `.float` and the like go through. Reason: they have nothing public in common."""
