"""A report on a model under a tensor mode: role and cut of every product, replicated parameters and why, extra moves, words."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from meshwright.capture.shard.layouts.layout import axes_of, bare, length, text
from meshwright.capture.shard.layouts.steps import Step, StepKind
from meshwright.capture.shard.layouts.walk_task import locals_in
from meshwright.capture.shard.rank_memory import RankMemory
from meshwright.capture.shard.settle import Settled
from meshwright.costs.declared import Phase


def shard_data(settled: Settled, memory: RankMemory | None = None) -> dict[str, Any]:
    """Returns the report as JSON values."""
    transfers = [*settled.transfers(), *settled.sums()]
    grid, kept = settled.grid, {} if memory is None else {name: getattr(memory, name) for name in memory.__slots__}
    return {
        "mode": grid.mode,
        "grid": dict(grid.sizes),
        "save": str(settled.scheme.save),
        "products": [
            {"module": p.path, "role": p.role, "weight": p.weight, "cut": text(bare(p.layout, grid))} for p in settled.products
        ],
        "replicated": [
            {
                "name": name,
                "shape": [length(dim) for dim in cut.layout],
                "cut": text(bare(cut.layout, grid)),
                "copies": grid.ranks // grid.size(axes_of(bare(cut.layout, grid))),
                "reason": _reason(settled, name),
            }
            for name, cut in settled.cuts.items()
            if grid.size(axes_of(bare(cut.layout, grid))) < grid.ranks
        ],
        "moves": [{"module": move.path, "operation": move.operation, "moves": move.reason} for move in settled.extra],
        "words": {str(phase): _number(sum((t.words for t in transfers if t.phase is phase), Fraction(0))) for phase in Phase},
        "steps": {str(phase): sum(t.steps for t in transfers if t.phase is phase) for phase in Phase},
        **kept,
    }


def shard_report(settled: Settled, memory: RankMemory | None = None) -> list[str]:
    """Returns the report as lines of text."""
    data = shard_data(settled, memory)
    lines = [f"{settled.grid}, save={data['save']}"]
    width = max((len(product["module"]) for product in data["products"]), default=0)
    for each in data["products"]:
        lines.append(f"{each['module']:<{width}}  {each['role']:<8}  {each['weight']} {each['cut']}")
    for each in data["replicated"]:
        whole = each["copies"] == settled.grid.ranks
        how = "whole on every rank" if whole else f"{each['copies']} copies of each part"
        lines.append(f"{how}: {each['name']} {each['cut']}: {each['reason']}")
    for move in data["moves"]:
        lines.append(f"extra move: {move['module']} ({move['operation']}): {move['moves']}")
    if not data["moves"]:
        lines.append("extra moves: none")
    lines.append("words per rank: " + ", ".join(f"{phase} {words:,.0f}" for phase, words in data["words"].items()))
    if memory is not None:
        lines.append(f"bytes per rank: weights {memory.weight_bytes:,}, saved by a microbatch {memory.saved_bytes:,}")
    return lines


def _reason(settled: Settled, name: str) -> str:
    """Returns why a parameter is replicated: the operation that reads it, and the axes that do not cut it there."""
    cut = axes_of(bare(settled.cuts[name].layout, settled.grid))
    if name in settled.replicated:
        return f"{settled.replicated[name]} runs whole on every rank"
    reader = next(_readers(settled, name), None)
    where = "" if reader is None else f" where {reader.target} in {reader.path or 'the model'} reads it"
    others = [axis for axis in settled.grid.wide(settled.grid.axes) if axis not in cut]
    return f"not cut by {', '.join(others)}{where}"


def _readers(settled: Settled, name: str) -> Iterator[Step]:
    """Returns the steps that read a parameter, without those that only move it."""
    for program in settled.programs:
        held = {step.name for step in program.steps if step.kind is StepKind.PARAMETER and step.target == name}
        for step in program.steps:
            if any(local.name in held for local in locals_in((step.args, dict(step.kwargs)))):
                if step.kind is StepKind.MOVE:
                    held.add(step.name)
                else:
                    yield step


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)
