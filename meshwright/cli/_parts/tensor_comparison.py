"""`compare --tensor`: words, steps and memory of every tensor mode and box, for one transformer layer or for a captured model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli._parts import inputs, outputs
from meshwright.cli._parts.mode_flags import ModeFlags, SaveChoice, mode_option, save_of
from meshwright.costs.declared import transformer_layer
from meshwright.costs.planned_grid import planned_grid, planned_scheme
from meshwright.costs.scheme import Words
from meshwright.costs.tensor_rows import LayerSizes, TensorRow, best_row, tensor_rows
from meshwright.errors import MeshwrightError
from meshwright.ir.byte_sizes import bytes_in
from meshwright.ir.plan.plan import Parallel

WORD_BYTES = 4
MOST_COUNTED = 1 << 22
"""The most words of one input and one square weight for which products are run only to be counted."""
EXAMPLE = "--batch 8 --sequence 1024 --hidden 4096 --ranks 8"


@dataclass(frozen=True)
class TensorFlags:
    """The sizes of one transformer layer, and the ranks that share it."""

    tensor: Annotated[bool, mode_option("--tensor", help="Compare tensor modes and boxes instead of schedules.")] = False
    batch: Annotated[int | None, mode_option("--batch", help="Sequences of one microbatch.")] = None
    sequence: Annotated[int | None, mode_option("--sequence", help="Tokens of a sequence.")] = None
    hidden: Annotated[int | None, mode_option("--hidden", help="Width of the layer; a MODEL has its own.")] = None
    heads: Annotated[int | None, mode_option("--heads", help="Attention heads; a mode must divide them.")] = None
    ranks: Annotated[int | None, mode_option("--tp", help="Ranks that share a layer.")] = None
    save: SaveChoice = None
    batch_function: inputs.BatchFunction = None
    counted: Annotated[
        bool, mode_option("--counted", help="Also run the products on threads of this process, and count the words they send.")
    ] = False
    old_ranks: Annotated[int | None, typer.Option("--ranks", hidden=True)] = None

    def __post_init__(self) -> None:
        """Raises on sizes without --tensor, and on impossible sizes with it. `--ranks` is the old name of `--tp` here."""
        save_of(self.save)
        if self.old_ranks is not None:
            if self.ranks is not None:
                raise MeshwrightError("--ranks is the old name of --tp here", fix="--tp alone")
            object.__setattr__(self, "ranks", self.old_ranks)
            object.__setattr__(self, "old_ranks", None)
        for field in fields(self)[1:]:
            given, flag = getattr(self, field.name), f"--{field.name.replace('_', '-')}"
            if not self.tensor and given != field.default:
                raise MeshwrightError(f"{flag} {given} is a size of a tensor mode", fix=f"--tensor {flag} {given}")
            if isinstance(given, int) and not isinstance(given, bool) and not 1 <= given < 1 << 40:
                raise MeshwrightError(f"{flag} must be a whole number of at least 1, got {given}", fix=f"{flag} 8")

    def rows(self, model: str | None) -> list[TensorRow]:
        """Returns every mode and box, the fewest words first; for a captured model if one is named."""
        self._refuse_missing(model)
        assert self.ranks
        if model is not None:
            return self._captured(model, self.ranks)
        assert self.batch and self.sequence and self.hidden
        sizes = LayerSizes(batch=self.batch, sequence=self.sequence, hidden=self.hidden, heads=self.heads)
        return tensor_rows(sizes, ranks=self.ranks, save=save_of(self.save))

    def _refuse_missing(self, model: str | None) -> None:
        needed = ["batch", "sequence", "hidden", "ranks"] if model is None else ["ranks"]
        if model is not None and self.batch_function is None:
            needed.insert(0, "batch")
        for name in needed:
            if getattr(self, name) is None:
                raise MeshwrightError(f"--tensor needs --{name}", fix=EXAMPLE if model is None else "--batch 8 --ranks 8")
        if model is None and self.batch_function is not None:
            raise MeshwrightError("--batch-function makes the batches of a model, and no model is given", fix="--tensor MODEL")
        if model is not None and self.heads is not None:
            raise MeshwrightError(f"{model} has its own heads", fix="leave --heads out")

    def counts(self, rows: Sequence[TensorRow], model: str | None) -> dict[tuple[str, tuple[int, ...]], Words]:
        """Returns the counted words of every row that divides, if they are asked for."""
        if not self.counted:
            return {}
        if model is not None:
            raise MeshwrightError("--counted runs the products of one layer, not a model", fix=f"--counted {EXAMPLE}")
        assert self.batch and self.sequence and self.hidden
        if (size := self.batch * self.sequence * self.hidden + self.hidden**2) > MOST_COUNTED:
            raise MeshwrightError(
                f"--counted runs the products: {size:.2g} words are more than {MOST_COUNTED:.2g}",
                fix="--batch 8 --sequence 4 --hidden 64 --ranks 8",
            )
        from meshwright.tensor.counted_words import counted_words

        layer = transformer_layer(batch=self.batch, sequence=self.sequence, hidden=self.hidden)
        found = {}
        for row in (row for row in rows if row.feasible):
            plan = Parallel.of(ModeFlags(**_given(row)).plan_fields() | {"save": save_of(self.save).value})
            grid = planned_grid(plan)
            if grid is not None:
                found[row.mode, row.grid] = counted_words(planned_scheme(plan, grid), grid, layer)
        return found

    def _captured(self, model: str, ranks: int) -> list[TensorRow]:
        from meshwright.capture.shard.captured_rows import captured_rows
        from meshwright.train.models.named_layers import named_graph

        named = named_graph(model, rows=self.batch, length=self.sequence, batch=self.batch_function)
        widths = sorted({size for p in named.model.parameters() if p.dim() == 2 for size in p.shape})
        if self.hidden is not None and self.hidden not in widths:
            raise MeshwrightError(f"{model} has no matrix of width {self.hidden}, only {widths}", fix="leave --hidden out")
        return captured_rows(named.model, named.flat, ranks=ranks, save=save_of(self.save), shapes=named.shapes)


def compare_tensor(flags: TensorFlags, models: Sequence[str], memory: str | None, output: Path | None, *, as_json: bool) -> None:
    """Prints the comparison; exit code 3 if no mode divides and fits."""
    if len(models) > 1:
        raise MeshwrightError(f"--tensor compares modes for one model, got {len(models)}", fix=f"--tensor {models[0]}")
    limit = math.inf if memory is None else bytes_in(memory)
    if limit is None:
        raise MeshwrightError(f"--memory {memory} is not a size in bytes", fix="--memory 80GB")
    model = models[0] if models else None
    rows = flags.rows(model)
    best = best_row(rows, limit_words=limit / WORD_BYTES)
    counts = flags.counts(rows, model)
    if as_json:
        outputs.give(to_json(rows, best, counts), output)
    else:
        text = to_text(rows, best, model=model, memory=memory, limit_words=limit / WORD_BYTES)
        outputs.give(counted_text(rows, counts) if counts else text, output)
    if best is None:
        raise typer.Exit(3)


Counts = Mapping[tuple[str, tuple[int, ...]], Words]


def to_json(rows: list[TensorRow], best: TensorRow | None, counts: Counts) -> str:
    """Returns the comparison as one JSON object: rows for a microbatch, and apart from them what is sent once per step."""
    found = [_row(row) | _counted(counts.get((row.mode, row.grid)), "forward", "backward") for row in rows]
    sums = [
        {"mode": row.mode, "grid": row.grid, "words_sync": _number(row.words_sync)}
        | _counted(counts.get((row.mode, row.grid)), "sync")
        for row in rows
        if row.words_sync
    ]
    return json.dumps({"rows": found, "best": None if best is None else _row(best), "once_per_step": sums})


def _counted(words: Words | None, *phases: str) -> dict[str, int | float]:
    return {} if words is None else {f"counted_{phase}": _number(getattr(words, phase)) for phase in phases}


def counted_text(rows: list[TensorRow], counts: Counts) -> str:
    """Returns declared and counted words side by side."""
    lines: list[tuple[str, ...]] = [("mode", "grid", "forward", "counted", "backward", "counted", "sync", "counted")]
    for row in rows:
        words = counts.get((row.mode, row.grid))
        if words is not None:
            pairs = [
                (row.words_forward, words.forward),
                (row.words_backward, words.backward),
                (row.words_sync, words.sync),
            ]
            lines.append((row.mode, _grid(row), *(f"{float(n or 0):.10g}" for pair in pairs for n in pair)))
    return "\n".join(
        [*_aligned(lines), "words that one rank sends for the products of one layer: by formula, and counted in a run"]
    )


def _aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Pads the columns of a table; the first two are names, and a last column without a head has no width."""
    columns = len(lines[0]) - (not lines[0][-1])
    widths = [max(len(line[k]) for line in lines) for k in range(columns)]
    return [
        "  ".join(
            [*(c.ljust(w) if k < 2 else c.rjust(w) for k, (c, w) in enumerate(zip(line, widths, strict=False))), *line[columns:]]
        ).rstrip()
        for line in lines
    ]


def to_text(
    rows: list[TensorRow], best: TensorRow | None, *, model: str | None, memory: str | None, limit_words: float = math.inf
) -> str:
    """Returns the comparison as a table; `*` marks the best row."""
    head = ("mode", "grid", "forward", "backward", "sync", "steps", "weights", "saved", "")
    lines = [head] + [
        (
            row.mode,
            _grid(row),
            *(_short(n) for n in (row.words_forward, row.words_backward, row.words_sync)),
            "-" if row.steps is None else str(row.steps),
            _short(row.weight_words),
            _short(row.saved_words),
            "*" if row is best else row.reason or (f"more than {memory}" if row.held > limit_words else ""),
        )
        for row in rows
    ]
    what = "the products of one layer" if model is None else f"one microbatch of {model}"
    note = f"words that one rank sends for {what}, steps of rings, and words that it holds; * has the fewest words"
    return "\n".join([*_aligned(lines), note, _verdict(best, memory)])


def _verdict(best: TensorRow | None, memory: str | None) -> str:
    """Names the best mode, and the flags that ask for it."""
    under = "" if memory is None else f" within {memory}"
    if best is None:
        return f"no mode divides these sizes and fits{under}"
    size = float(best.held) * WORD_BYTES / 1e9
    return f"best{under}: {best.mode} {_grid(best)}, {_short(best.words)} words, {size:.3g} GB per rank: {flags_of(best)}"


def flags_of(row: TensorRow) -> str:
    """Returns the flags that ask for a mode on a grid."""
    given = {name.replace("_", "-"): value for name, value in _given(row).items()}
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in given.items())


def _given(row: TensorRow) -> dict[str, Any]:
    ranks = math.prod(row.grid)
    match row.mode:
        case "box":
            return {"box": ",".join(map(str, row.grid))}
        case "line":
            return {"tp": ranks}
        case "line_sequence":
            return {"tp": ranks, "sequence_parallel": True}
        case "tesseract":
            return {"tensor_mode": "tesseract", "tp": ranks, "depth": row.grid[0]}
        case _:
            return {"tensor_mode": row.mode, "tp": ranks}


def _grid(row: TensorRow) -> str:
    return " x ".join(map(str, row.grid))


def _row(row: TensorRow) -> dict[str, Any]:
    found = {field.name: getattr(row, field.name) for field in fields(row) if field.name != "words_sync"}
    return {name: _number(value) if isinstance(value, Fraction) else value for name, value in found.items()}


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def _short(value: Fraction | None) -> str:
    if value is None:
        return "-"
    number = float(value)
    for unit in ("", " k", " M", " G", " T"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} P"
