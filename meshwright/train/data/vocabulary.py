"""Finds ids in a batch that the model has no row for, and names the column, before any rank runs the batch.

The captured graph tells which columns are looked up in which tables: a column whose values reach an embedding, or the target of a
cross entropy, unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.capture.trace.graph import Flat, Node, NodeKind, Ref
from meshwright.capture.trace.operations import LOOKUPS, VIEWS, is_one_of
from meshwright.errors import MeshwrightError
from meshwright.runtime.stage.batch import Given

_LOSSES = ("aten.cross_entropy_loss", "aten.nll_loss", "aten.nll_loss_nd")
_PARTS = (
    *("aten.select", "aten.slice", "aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind", "aten.narrow"),
    *("aten.as_strided", "aten.diagonal", "aten.unfold", "operator.getitem"),
)
_WHOLE = (*(name for name in VIEWS if name not in _PARTS), "aten.clone", "aten._to_copy")
"""Operations whose result has all values of their argument. If only a part of a column is looked up, the rest may be anything."""

_SHIFTED = (*_WHOLE, "aten.slice", "aten.constant_pad_nd", "aten.pad")
"""Operations between labels and a loss: a causal model leaves out the first label, or pads after the last one."""


@dataclass(frozen=True)
class Vocabulary:
    """A column whose values are between 0 and `size` - 1, or `ignored`."""

    column: str
    size: int
    ignored: int | None = None


def vocabularies(flat: Flat | None) -> tuple[Vocabulary, ...]:
    """Return the tables that columns are looked up in; the largest one if a column is looked up in several."""
    found: dict[str, Vocabulary] = {}
    for node in flat.nodes if flat is not None else ():
        one = _looked_up(flat, node) if flat is not None and node.kind is NodeKind.CALL else None
        if one is not None and (one.column not in found or one.size > found[one.column].size):
            found[one.column] = one
    return tuple(found.values())


def refuse_ids(known: Sequence[Vocabulary], batch: Given, names: Iterable[str] = ()) -> None:
    """Raise if a batch has an id that its vocabulary does not have. `names` are the column names of a tuple, in order."""
    columns = batch if isinstance(batch, Mapping) else dict(zip(names, batch, strict=False))
    for one in known:
        ids = columns.get(one.column)
        if ids is None or ids.device.type != "cpu" or ids.is_floating_point() or not ids.numel():
            continue
        wrong = (ids < 0) | (ids >= one.size)
        if one.ignored is not None:
            wrong &= ids != one.ignored
        if wrong.any():
            row = int(wrong.nonzero()[0, 0]) if ids.dim() else 0
            what = f"column {one.column!r} has the id {int(ids[wrong][0])} in row {row} of the batch"
            also = f", and {one.ignored} is ignored" if one.ignored is not None else ""
            raise MeshwrightError(
                f"{what}, but the model's vocabulary has {one.size}: ids are from 0 to {one.size - 1}{also}",
                fix="use the tokenizer of this model, or a model with more rows (resize_token_embeddings)",
            )


def _looked_up(flat: Flat, node: Node) -> Vocabulary | None:
    table, ids = (*node.args, None, None)[:2]
    if not isinstance(table, Ref) or not isinstance(ids, Ref):
        return None
    size = flat.by_name[table.name].size
    if size is None or not size.shape:
        return None
    if is_one_of(node.target, LOOKUPS) and (column := _column(flat, ids.name, _WHOLE)) is not None:
        return Vocabulary(column, size.shape[0])
    if is_one_of(node.target, _LOSSES) and (column := _column(flat, ids.name, _SHIFTED)) is not None:
        ignored = dict(node.kwargs).get("ignore_index", node.args[4] if len(node.args) > 4 else -100)
        return Vocabulary(column, size.shape[min(1, len(size.shape) - 1)], int(ignored))
    return None


def _column(flat: Flat, name: str, through: tuple[str, ...]) -> str | None:
    """Return the column that a node's values come from; None if they are computed."""
    node = flat.by_name[name]
    while node.kind is NodeKind.CALL and is_one_of(node.target, through) and node.args and isinstance(node.args[0], Ref):
        node = flat.by_name[node.args[0].name]
    return node.target if node.kind is NodeKind.COLUMN else None
