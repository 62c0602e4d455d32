"""`meshwright inspect`: the layers of a model without its weights, where it would be cut, and why."""

from __future__ import annotations

import gc
import json
import os
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli._parts import inputs, outputs
from meshwright.cli._parts.flag_groups import with_groups
from meshwright.cli._parts.mode_flags import ModeFlags
from meshwright.cli._parts.sharded_model import sharded
from meshwright.errors import MeshwrightError
from meshwright.ir.profile import optimizer_states

if TYPE_CHECKING:
    from rich.table import Table

    from meshwright.capture.check.check_result import Verdict
    from meshwright.ir.model import Crossing, Cuts, ModelGraph, Part
    from meshwright.train.models.named_layers import NamedGraph


@with_groups
def inspect(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help=f"{inputs.MODEL_FORMS}, or a file that --output wrote."),
    ],
    stages: Annotated[int, typer.Option("--stages", "-s", help="How many stages to cut it into.")] = 2,
    rows: Annotated[int | None, inputs.size_option(show_default="2", help="Rows of the example batch, a microbatch.")] = None,
    length: Annotated[int | None, inputs.size_option(help="Tokens per row of the example.")] = None,
    batch: inputs.BatchFunction = None,
    old_batch: inputs.OldBatch = None,
    optimizer: Annotated[str, typer.Option(help="adamw, adam, sgd or sgd-momentum: what it keeps per parameter.")] = "adamw",
    cut: Annotated[
        list[str] | None, typer.Option(metavar="MODULE", help="Begin the next stage with this module; repeat for each cut.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare the captured layers with the model itself.")] = False,
    *,
    tensor: ModeFlags,
    as_json: inputs.Json = False,
    output: Annotated[Path | None, inputs.output_option("--output", "-o", help="Write the captured layers to a file.")] = None,
) -> None:
    """Capture a model on the meta device, which holds no weights, and show its stages.

    With a tensor mode also: every product with its role and cut, parameters that have copies, extra moves, words and bytes per
    rank.

    Exit code 2: the model cannot be captured or sharded, or has fewer layers than stages. 3: --check found a difference.
    """
    from meshwright.ir.files.model_json import model_to_json  # imported here, so that the fast verbs do not load it

    outputs.refuse_output(output)
    batch = inputs.batch_function(batch, old_batch)
    graph, named = _graph(model, rows, length, batch, whole=bool(tensor.plan_fields()))
    cuts, memory = (
        graph.cuts(stages, at=cut or None),
        BlockMemory(optimizer_states(optimizer), _rows(graph, named)),
    )
    if output is not None:
        outputs.write(output, model_to_json(graph) + "\n")
    verdict = _checked(model, stages, rows, length, batch, cut or []) if check else None
    shard = sharded(tensor, named, stages, cut or None)
    if as_json:
        more = {} if verdict is None else {"check": _found(verdict)}
        typer.echo(
            json.dumps({**_data(graph, cuts, memory), **({} if shard is None else {"tensor": shard.data}), **more}, indent=1)
        )
    else:
        _print(graph, cuts, memory)
        if shard is not None:
            typer.echo(shard.text)
        if verdict is not None:
            _print_check(verdict)
    if verdict is not None and not _is_equal(verdict):
        raise typer.Exit(3)


def _checked(model: str, stages: int, rows: int | None, length: int | None, batch: str | None, cut: list[str]) -> Verdict:
    from meshwright.train.models.named_layers import checked

    found = checked(model, stages, rows=rows or 2, length=length, batch=batch, cuts=cut)
    if found is None:
        raise MeshwrightError("the model is too large to be checked here", fix="a smaller configuration of the same family")
    return found


def _is_equal(verdict: Verdict) -> bool:
    return verdict.refused is None and verdict.training is None and verdict.evaluation is None


def _found(verdict: Verdict) -> dict[str, Any]:
    differences = [str(found.error()) for found in (verdict.training, verdict.evaluation) if found is not None]
    if verdict.refused is not None:
        differences.insert(0, verdict.refused.why)
    return {
        "equal": _is_equal(verdict),
        "differences": differences,
        "runs": verdict.runs,
        "notes": verdict.notes,
        "seconds": verdict.seconds,
    }


def _print_check(verdict: Verdict) -> None:
    found = _found(verdict)
    for note in verdict.notes:
        typer.echo(f"note: {note}")
    for text in found["differences"]:
        typer.echo(f"not equal: {text}")
    if found["equal"]:
        typer.echo(f"check: captured layers equal the model in {len(verdict.runs)} runs, {verdict.seconds:.1f} s")


def _graph(
    model: str, rows: int | None, length: int | None, batch: str | None, *, whole: bool
) -> tuple[ModelGraph, NamedGraph | None]:
    from meshwright.ir.files.model_json import model_from_json

    path = Path(model)
    if path.suffix == ".json" and os.path.exists(path) and '"kind": "model"' in (text := outputs.read(path)):
        if rows is not None or length is not None or batch is not None:
            raise MeshwrightError(
                f"{model} has layers for one batch size; --rows, --length and --batch-function cannot change it"
            )
        return model_from_json(text), None
    gc.enable()  # a trace leaves reference cycles
    from meshwright.train.models.named_layers import named_graph

    named = named_graph(model, rows=rows, length=length, batch=batch, whole=whole)
    return named.layers(), named


@dataclass(frozen=True)
class BlockMemory:
    """What a worker holds for a stage: the numbers that the optimizer keeps per parameter, and the rows of the example."""

    states: int
    rows: int | None

    def of(self, part: Part) -> dict[str, float | None]:
        """Returns the bytes by class; those of one row are None if a file does not tell its rows."""
        size = float(part.parameter_bytes)
        saved = part.saved_bytes / self.rows if self.rows else None
        return {
            "parameter_bytes": size,
            "gradient_bytes": size,
            "optimizer_bytes": size * self.states,
            "saved_bytes_per_row": saved,
        }


def _rows(graph: ModelGraph, named: NamedGraph | None) -> int | None:
    """Returns the rows of the example. A file tells them by what crosses its cuts: most of it has rows first."""
    if named is not None:
        return named.rows
    sizes = Counter(value.shape[0] for layer in graph.layers for value in layer.output if value.shape)
    return max(sizes, key=lambda size: (sizes[size], size), default=None)


def _data(graph: ModelGraph, cuts: Cuts, memory: BlockMemory) -> dict[str, Any]:
    stages = [
        {
            "layers": list(part.layers),
            "parameters": part.parameters,
            "flops": part.flops,
            "saved_bytes": part.saved_bytes,
            "memory": memory.of(part),
            "boundary": [{"name": v.name, "shape": list(v.shape), "bytes": v.bytes} for v in part.boundary],
            "why": part.why,
        }
        for part in cuts.parts
    ]
    ties = [{"name": tie.name, "layers": list(tie.layers), "stages": _stages(cuts, tie.layers)} for tie in graph.ties]
    return {
        "schema": 1,
        "kind": "inspection",
        "model": graph.name,
        "parameters": sum(prod(weight.shape) for weight in graph.weights),
        "stages": stages,
        "ties": ties,
        "heaviest_over_best": cuts.heaviest / cuts.best if cuts.best else 1.0,
        "digest": cuts.digest,
    }


def _print(graph: ModelGraph, cuts: Cuts, memory: BlockMemory) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, width=None if outputs.coloured() else 160)
    total = sum(prod(weight.shape) for weight in graph.weights)
    console.print(
        f"{graph.name}  {_short(total)} parameters, {len(graph.layers)} layers, {_short(graph.flops)} operations forward"
    )
    console.print(_table(cuts))
    console.print(_memory_table(cuts, memory))
    for index, part in enumerate(cuts.parts):
        console.print(f"stage {index}: {part.why}")
    for tie in graph.ties:
        console.print(f"tied: {tie.name} on stages {', '.join(map(str, _stages(cuts, tie.layers)))}")
    if cuts.best:
        console.print(f"heaviest stage: {cuts.heaviest / cuts.best:.3f} of the optimum; cuts {cuts.digest}")


def _table(cuts: Cuts) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("stage", "layers", "parameters", "operations", "share", "crosses after it", "bytes"):
        table.add_column(column, justify="left" if column in ("layers", "crosses after it") else "right", no_wrap=True)
    total = sum(part.flops for part in cuts.parts) or 1.0
    for index, part in enumerate(cuts.parts):
        names = part.layers[0] if len(part.layers) == 1 else f"{part.layers[0]} .. {part.layers[-1]} ({len(part.layers)})"
        crossing = ", ".join(_shown(value) for value in part.boundary) or "-"
        size = _short(sum(value.bytes for value in part.boundary)) if part.boundary else "-"
        share = f"{part.flops / total:.0%}"
        table.add_row(str(index), names, _short(part.parameters), _short(part.flops), share, crossing, size)
    return table


def _memory_table(cuts: Cuts, memory: BlockMemory) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("stage", "bytes: weights", "gradients", "optimizer", "saved of a row"):
        table.add_column(column, justify="right", no_wrap=True)
    for index, part in enumerate(cuts.parts):
        table.add_row(str(index), *("-" if value is None else _short(value) for value in memory.of(part).values()))
    return table


def _shown(value: Crossing) -> str:
    return f"{value.name} {'x'.join(map(str, value.shape))}"


def _stages(cuts: Cuts, layers: tuple[int, ...]) -> list[int]:
    return sorted({next(s for s, part in enumerate(cuts.parts) if part.first <= layer < part.last) for layer in layers})


def _short(number: float) -> str:
    """Formats 1234567 as 1.23 M."""
    if number < 0:
        raise MeshwrightError(f"{number} is not a size")
    for unit in ("", " k", " M", " G", " T"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} P"
