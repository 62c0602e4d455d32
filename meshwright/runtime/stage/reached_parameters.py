"""Which parameters a backward reaches: those that it does not have no gradient (None, not zeros), as in torch.

It is seen at the first backward of a stage in each graph, in which it never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

Found = TypeVar("Found")

Reached = tuple[int, ...]
"""For each unit of a stage a bit per parameter."""

Leaves = Sequence[Sequence[Tensor]]
"""What a backward adds gradients to, for each unit of its stage."""


def noting(leaves: Leaves, backward: Callable[[set[int]], Found]) -> tuple[Found, Reached]:
    """Run a backward, and see which leaves it reaches.

    It is given a set for the ids of those that it adds gradients to without autograd.
    """
    seen: set[int] = set()
    hooks = [p.register_post_accumulate_grad_hook(lambda p: seen.add(id(p))) for of_unit in leaves for p in of_unit]
    try:
        found = backward(seen)
    finally:
        for hook in hooks:
            hook.remove()
    return found, tuple(sum(1 << i for i, p in enumerate(of_unit) if id(p) in seen) for of_unit in leaves)


def everything(leaves: Leaves) -> Reached:
    """All of them: a backward of rows that do not count leaves zeros."""
    return tuple((1 << len(of_unit)) - 1 for of_unit in leaves)
