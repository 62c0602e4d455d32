"""Decides which tensors of a batch the model is called with, and under which names.

A mapping is passed by name. A tuple is passed in the order of the arguments of `forward`. If `forward` does not take the last
tensor of the tuple, that tensor is the target. Caches for generation are switched off.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.ir.column_names import TARGETS


@dataclass(frozen=True)
class Columns:
    """The columns of a batch that a model takes. `positional` is true if the batch is a tuple."""

    names: tuple[str, ...]
    positional: bool
    options: tuple[tuple[str, Any], ...] = ()

    def given(self, batch: Any) -> dict[str, Tensor]:
        """Return the columns of a batch by name."""
        if self.positional:
            tensors = (batch,) if isinstance(batch, Tensor) else tuple(batch)
            return dict(zip(self.names, tensors, strict=False))
        return {name: batch[name] for name in self.names}

    def call(self, model: nn.Module, given: Mapping[str, Tensor]) -> Any:
        """Call the model with these columns."""
        if self.positional:
            return model(*(given[name] for name in self.names), **dict(self.options))
        return model(**given, **dict(self.options))


def columns_of(model: nn.Module, batch: Any, *, own_loss: bool = False) -> Columns:
    """Find the columns that a model takes from a batch. With `own_loss`, labels go to the user's loss function instead."""
    arguments = list(inspect.signature(model.forward).parameters.values())
    named = {a.name for a in arguments if a.kind in (a.POSITIONAL_OR_KEYWORD, a.KEYWORD_ONLY)}
    anything = any(a.kind is a.VAR_KEYWORD for a in arguments)
    options = tuple((name, value) for name, value in (("use_cache", False), ("return_dict", True)) if name in named)
    if isinstance(batch, Mapping):
        _refuse_no_tensors(batch)
        taken = [name for name in batch if (name in named or anything) and not (own_loss and name in TARGETS)]
        left = [name for name in batch if name not in taken and name not in TARGETS]
        if left:
            raise MeshwrightError(
                f"the model does not take the column {left[0]!r}: its forward has {', '.join(sorted(named))}",
                fix=f"pass a batch without {left[0]!r}",
            )
        needed = [a.name for a in arguments if a.kind is a.POSITIONAL_OR_KEYWORD and a.default is a.empty]
        if missing := [name for name in needed if name not in batch]:
            raise MeshwrightError(
                f"the batch has no column {missing[0]!r}, which the model needs; it has {', '.join(map(repr, batch))}",
                fix=f"pass a batch with {missing[0]!r}",
            )
        return Columns(tuple(taken), positional=False, options=options)
    return _positional(arguments, (batch,) if isinstance(batch, Tensor) else tuple(batch), options, own_loss)


def _positional(
    arguments: list[inspect.Parameter], tensors: tuple[Any, ...], options: tuple[tuple[str, Any], ...], own_loss: bool
) -> Columns:
    _refuse_no_tensors(dict(enumerate(tensors)))
    takes = [a for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    names = [a.name for a in takes]
    needed = sum(a.default is a.empty for a in takes)
    many = any(a.kind is a.VAR_POSITIONAL for a in arguments)
    count = len(tensors)
    takes_last = count == 1 or needed >= count or (not own_loss and names[count - 1 : count] in [[t] for t in TARGETS])
    used = count if takes_last else count - 1
    if needed > count:
        raise MeshwrightError(
            f"the batch has {count} tensors, but the model needs {needed}: {', '.join(names[:needed])}",
            fix=f"pass a batch with {names[count]!r}",
        )
    if used > len(names) and not many:
        raise MeshwrightError(f"the batch has {count} tensors, but the model takes {len(names)}: {', '.join(names)}")
    names += [f"column{index}" for index in range(len(names), used)]
    return Columns(tuple(names[:used]), positional=True, options=options)


def _refuse_no_tensors(batch: Mapping[Any, Any]) -> None:
    for name, tensor in batch.items():
        if not isinstance(tensor, Tensor):
            raise MeshwrightError(f"the batch has {type(tensor).__name__} at {name!r}", fix="use tensors only")
