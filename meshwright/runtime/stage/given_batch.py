"""Split a user's batch into inputs and target.

A batch is a tuple whose last tensor is the target, or a mapping in which the target has one of its usual names. A captured
model takes columns by name; the tensors of a tuple get the names of its columns, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.ir.column_names import TARGETS

Given = Mapping[str, Tensor] | Sequence[Tensor]


def _refuse_other(given: object) -> None:
    if not isinstance(given, Tensor | Mapping | Sequence) or isinstance(given, str | bytes):
        raise MeshwrightError(
            f"a batch must be a tuple or a mapping of tensors, got {type(given).__name__}",
            fix='{"input_ids": ids, "labels": labels}',
        )


def sort_out(given: Given) -> tuple[tuple[Tensor, ...], dict[str, Tensor], Tensor | None]:
    """Returns positional inputs, named inputs and target."""
    _refuse_other(given)
    if isinstance(given, Tensor):
        return (given,), {}, None
    if isinstance(given, Mapping):
        names = [name for name in TARGETS if name in given]
        inputs = {name: t for name, t in given.items() if name not in names[:1]}
        return (), inputs, given[names[0]] if names else None
    tensors = tuple(given)
    if not tensors or not all(isinstance(t, Tensor) for t in tensors):
        raise MeshwrightError(f"a batch must be a tuple or a mapping of tensors, got {type(given).__name__}")
    return (tensors[:-1], {}, tensors[-1]) if len(tensors) > 1 else (tensors, {}, None)


def name_columns(
    given: Given, names: tuple[str, ...]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor], Tensor | None, dict[str, Tensor]]:
    """Returns positional inputs, named inputs, target and columns for a captured model, which takes only columns."""
    _refuse_other(given)
    if isinstance(given, Mapping):
        if missing := [name for name in names if name not in given]:
            raise MeshwrightError(
                f"the model was captured with a column {missing[0]!r}, but the batch has only {', '.join(map(repr, given))}",
                fix=f"add {missing[0]!r} to the batch",
            )
        if unknown := [name for name in given if name not in names and name not in TARGETS]:
            raise MeshwrightError(
                f"the batch has a column {unknown[0]!r} that the model was captured without: no layer would read it",
                fix=f"put {unknown[0]!r} into every batch from the first one on, or into none",
            )
        left = [given[name] for name in TARGETS if name in given and name not in names]
        return (), {}, left[0] if left else None, {name: given[name] for name in names}
    tensors = (given,) if isinstance(given, Tensor) else tuple(given)
    if len(tensors) < len(names):
        raise MeshwrightError(
            f"the batch has {len(tensors)} tensors, but the model was captured with {len(names)}: {', '.join(names)}",
            fix=f"add {names[len(tensors)]!r} to the batch",
        )
    if len(tensors) > len(names) + 1:
        raise MeshwrightError(
            f"the batch has {len(tensors)} tensors, but the model was captured with {len(names)}, {', '.join(names)}, "
            "and a target",
            fix="put the same number of tensors into every batch",
        )
    target = tensors[len(names)] if len(tensors) > len(names) else None
    return (), {}, target, dict(zip(names, tensors, strict=False))
