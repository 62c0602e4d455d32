"""Find out which parameters a backward reaches. The others have no gradient (None, not zeros), as in torch.

In a captured graph this does not change, so it is recorded at the first backward of a stage. The forwards of a list of layers are
Python code, which may choose by data. There every backward records it, for the parameters that no backward of its round has
reached yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import or_
from typing import TypeVar

from torch import Tensor

Found = TypeVar("Found")

Reached = tuple[int, ...]
"""One bit per parameter, for each unit of a stage."""

Leaves = Sequence[Sequence[Tensor]]
"""The tensors that a backward adds gradients to, for each unit of its stage."""


def noting(leaves: Leaves, backward: Callable[[set[int]], Found], known: Reached | None = None) -> tuple[Found, Reached]:
    """Runs a backward and records which leaves it reaches, besides those that are `known` to be reached.

    The backward gets a set, and adds the ids of leaves that it adds gradients to without autograd.
    """
    seen: set[int] = set()
    known = known or (0,) * len(leaves)
    looked_at = [p for of_unit, bits in zip(leaves, known, strict=True) for i, p in enumerate(of_unit) if not bits >> i & 1]
    hooks = [p.register_post_accumulate_grad_hook(lambda p: seen.add(id(p))) for p in looked_at]
    try:
        found = backward(seen)
    finally:
        for hook in hooks:
            hook.remove()
    now = (sum(1 << i for i, p in enumerate(of_unit) if id(p) in seen) for of_unit in leaves)
    return found, tuple(map(or_, known, now))


def joint(one: Reached | None, other: Reached) -> Reached:
    """Returns what one backward or another reaches."""
    return other if one is None else tuple(map(or_, one, other))


def everything(leaves: Leaves) -> Reached:
    """Returns all leaves as reached: a backward of rows that do not count leaves gradients of zero."""
    return tuple((1 << len(of_unit)) - 1 for of_unit in leaves)
