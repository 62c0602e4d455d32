"""What a tensor mode does to a model, in lines: every product with its role and cut, what stays whole, every extra move."""

from __future__ import annotations

from fractions import Fraction

from meshwright.capture.shard.layout import axes_of, bare, text
from meshwright.capture.shard.settle import Settled
from meshwright.costs.declared import Phase


def shard_report(settled: Settled) -> list[str]:
    """Lines for people: products and tables, replicated parameters, extra moves, and the words of one microbatch."""
    width = max((len(product.path) for product in settled.products), default=0)
    lines = [f"{settled.grid}, save={settled.scheme.save}"]
    for product in settled.products:
        lines.append(f"{product.path:<{width}}  {product.role:<8}  {product.weight} {text(product.layout)}")
    for name, cut in settled.cuts.items():
        if not axes_of(bare(cut.layout, settled.grid)):
            why = settled.replicated.get(name)
            lines.append(f"whole on every rank: {name}" + (f", read by {why}" if why else ""))
    for move in settled.extra:
        lines.append(f"extra move: {move.path} ({move.operation}): {move.reason}")
    transfers = [*settled.transfers(), *settled.sums()]
    sums = [sum((t.words for t in transfers if t.phase is phase), Fraction(0)) for phase in Phase]
    lines.append("words per rank: " + ", ".join(f"{phase} {float(words):.0f}" for phase, words in zip(Phase, sums, strict=True)))
    return lines
