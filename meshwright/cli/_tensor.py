"""The flags of `compare --tensor`, and its table: words, steps and memory of every tensor mode and box."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import partial
from typing import Annotated, Any

import typer

from meshwright.costs.scheme import Save
from meshwright.costs.tensor_rows import LayerSizes, TensorRow, best_row, tensor_rows
from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import bytes_in

_option = partial(typer.Option, rich_help_panel="Tensor modes")
WORD_BYTES = 4


@dataclass(frozen=True)
class TensorFlags:
    """The sizes of one transformer layer, and the ranks that share it."""

    tensor: Annotated[bool, _option("--tensor", help="Compare tensor modes and boxes instead of schedules.")] = False
    batch: Annotated[int | None, _option(help="Sequences of one microbatch.")] = None
    sequence: Annotated[int | None, _option(help="Tokens of a sequence.")] = None
    hidden: Annotated[int | None, _option(help="Width of the layer.")] = None
    heads: Annotated[int | None, _option(help="Attention heads; a mode must divide them.")] = None
    ranks: Annotated[int | None, _option(help="Ranks that share a layer.")] = None
    save: Annotated[Save, _option(help="What products keep for the backward pass.")] = Save.SHARDS

    def __post_init__(self) -> None:
        """Raises on sizes without --tensor, and on missing or impossible sizes with it."""
        for field in fields(self)[1:]:
            given = getattr(self, field.name)
            if not self.tensor and given != field.default:
                raise MeshwrightError(
                    f"--{field.name} {given} is a size of a tensor mode", fix=f"--tensor --{field.name} {given}"
                )
            if self.tensor and given is None and field.name != "heads":
                raise MeshwrightError(f"--tensor needs --{field.name}", fix="--batch 8 --sequence 1024 --hidden 4096 --ranks 8")
            if isinstance(given, int) and not isinstance(given, bool) and not 1 <= given < 1 << 40:
                raise MeshwrightError(f"--{field.name} must be a whole number of at least 1, got {given}")

    def rows(self) -> list[TensorRow]:
        """Returns every mode and box, the fewest words first."""
        assert self.batch and self.sequence and self.hidden and self.ranks
        sizes = LayerSizes(batch=self.batch, sequence=self.sequence, hidden=self.hidden, heads=self.heads)
        return tensor_rows(sizes, ranks=self.ranks, save=self.save)

    def best(self, rows: list[TensorRow], memory: str | None) -> TensorRow | None:
        """Returns the best row within a memory limit in bytes, with words of 4 bytes."""
        limit = math.inf if memory is None else bytes_in(memory)
        if limit is None:
            raise MeshwrightError(f"--memory {memory} is not a size in bytes", fix="--memory 80GB")
        return best_row(rows, limit_words=limit / WORD_BYTES)


def to_json(rows: list[TensorRow], best: TensorRow | None) -> str:
    """Returns the comparison as one JSON object."""
    return json.dumps({"rows": [_row(row) for row in rows], "best": None if best is None else _row(best)})


def to_text(rows: list[TensorRow], best: TensorRow | None) -> str:
    """Returns the comparison as a table; `*` marks the best row."""
    head = ("mode", "grid", "forward", "backward", "sync", "steps", "weights", "saved", "")
    lines = [head] + [
        (
            row.mode,
            " x ".join(map(str, row.grid)),
            *(_short(n) for n in (row.words_forward, row.words_backward, row.words_sync)),
            str(row.steps),
            _short(row.weight_words),
            _short(row.saved_words),
            "*" if row is best else row.reason,
        )
        for row in rows
    ]
    widths = [max(len(line[k]) for line in lines) for k in range(len(head) - 1)]
    left = (0, 1)
    text = [
        "  ".join(
            [*(c.ljust(w) if k in left else c.rjust(w) for k, (c, w) in enumerate(zip(line, widths, strict=False))), line[-1]]
        )
        for line in lines
    ]
    note = "words that one rank sends for the products of one layer, and words that it holds; * has the fewest words"
    return "\n".join([*(line.rstrip() for line in text), note])


def _row(row: TensorRow) -> dict[str, Any]:
    found = {field.name: getattr(row, field.name) for field in fields(row)}
    return {name: _number(value) if isinstance(value, Fraction) else value for name, value in found.items()}


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def _short(value: Fraction) -> str:
    number = float(value)
    for unit in ("", " k", " M", " G", " T"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} P"
