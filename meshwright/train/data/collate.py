"""Turns rows of a data set into the tensors of a batch: selects columns, calls the collator, and checks its result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshwright.errors import MeshwrightError
from meshwright.ir.column_names import TARGETS
from meshwright.runtime.stage.batch import Given

Collator = Callable[[list[Any]], Any]


def accepted(model: Any, label_names: Sequence[str] | None) -> frozenset[str] | None:
    """Return the columns that a model takes by name; None if it takes any."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, nn.Module) or isinstance(base, nn.Sequential | nn.ModuleList):
        return None
    forward: Callable[..., Any] = base.forward
    names = [a.name for a in inspect.signature(forward).parameters.values() if a.kind is not a.VAR_POSITIONAL]
    return frozenset({*names, *TARGETS, "label_ids", *(label_names or ())})


def default_collator(processing_class: Any) -> Collator:
    """Return a collator that pads if there is a tokenizer, and otherwise one that stacks."""
    if hasattr(processing_class, "pad"):
        from transformers import DataCollatorWithPadding

        padding: Collator = DataCollatorWithPadding(processing_class)
        return padding
    return stacked


def stacked(rows: list[Any]) -> Any:
    """Stack rows: mappings as Hugging Face does (label becomes labels), others as torch does."""
    from transformers import default_data_collator

    try:
        return default_data_collator(rows) if isinstance(rows[0], Mapping) else default_collate(rows)
    except (ValueError, RuntimeError) as error:
        raise MeshwrightError(
            f"these rows cannot be stacked: {error}", fix="use a data_collator that pads, or pass a tokenizer as processing_class"
        ) from error


@dataclass(frozen=True)
class Collate:
    """Turns rows into tensors. Unused columns are dropped before collating."""

    collator: Collator
    columns: frozenset[str] | None

    def __call__(self, rows: list[Any]) -> Given:
        """Return the tensors of these rows."""
        if self.columns is not None and isinstance(rows[0], Mapping):
            kept = [{name: value for name, value in row.items() if name in self.columns} for row in rows]
            if not kept[0]:
                raise MeshwrightError(
                    f"the data set has {', '.join(map(str, rows[0]))}; the model takes {', '.join(sorted(self.columns))}",
                    fix="rename a column, or set remove_unused_columns=False",
                )
            rows = kept
        return tensors(self.collator(rows))


def tensors(batch: Any) -> Given:
    """Convert a collated batch to a mapping or a tuple of tensors."""
    if isinstance(batch, Tensor):
        return (batch,)
    if isinstance(batch, Mapping):
        return {str(name): _tensor(name, value) for name, value in batch.items() if value is not None}
    if isinstance(batch, tuple | list) and batch:
        return tuple(_tensor(index, value) for index, value in enumerate(batch))
    raise MeshwrightError(
        f"a batch must be a tuple or a mapping of tensors, got {type(batch).__name__}",
        fix="data_collator=transformers.default_data_collator, or session.step({'input_ids': ids, 'labels': ids})",
    )


def _tensor(name: object, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MeshwrightError(
            f"column {name!r} of the batch is not a tensor: {error}",
            fix="use a data_collator that drops it, or set remove_unused_columns=True",
        ) from error


def no_rows(batch: Given) -> Given:
    """Returns every tensor without its rows."""
    if isinstance(batch, Mapping):
        return {name: t[:0] for name, t in batch.items()}
    return tuple(t[:0] for t in batch)


def stand_ins(batch: Given, needed: frozenset[str] | None) -> Given:
    """Keep the columns that a rank needs. The others become meta tensors: their shapes give the sizes of messages."""
    if needed is None or not isinstance(batch, Mapping):
        return batch
    return {name: t if name in needed else t.to("meta") for name, t in batch.items()}
