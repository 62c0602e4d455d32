"""Find out which parameters a backward reaches. The others have no gradient (None, not zeros), as in torch.

This is recorded at the first backward of a stage in each graph, because it does not change within a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

Found = TypeVar("Found")

Reached = tuple[int, ...]
"""One bit per parameter, for each unit of a stage."""

Leaves = Sequence[Sequence[Tensor]]
"""The tensors that a backward adds gradients to, for each unit of its stage."""


def noting(leaves: Leaves, backward: Callable[[set[int]], Found]) -> tuple[Found, Reached]:
    """Runs a backward and records which leaves it reaches.

    The backward gets a set, and adds the ids of leaves that it adds gradients to without autograd.
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
    """Returns all leaves as reached: a backward of rows that do not count leaves gradients of zero."""
    return tuple((1 << len(of_unit)) - 1 for of_unit in leaves)
