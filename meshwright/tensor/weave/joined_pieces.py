"""Joins the pieces of consecutive layers into one graph, so that no layer waits for the last collective of the one before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from meshwright.tensor.weave.pieces import Border, Piece, PieceGraph


class _Aliases(nn.Module):
    """Returns its inputs, so that a move of them can start after a piece."""

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Returns the inputs."""
        return tuple(value.view_as(value) for value in values)


def joined(graphs: Sequence[PieceGraph]) -> PieceGraph:
    """Returns one graph of several that share a slot. The first inputs of each are the outputs of the one before it."""
    found = PieceGraph([], (), (), (), {}, graphs[0].slot, graphs[0].wires, begins={})
    crossing: tuple[str, ...] = ()
    for number, graph in enumerate(graphs):
        assert graph.slot is found.slot and graph.wires is found.wires, "layers that run as one share a slot"
        taken = dict(zip(graph.inputs, crossing, strict=False))
        assert len(taken) == len(crossing), "a layer takes all that the one before it gives"
        name = _namer(number, taken)
        found.begins[len(found.pieces)] = number
        late = [border for border in graph.early if border.source in taken]
        if late:
            found.pieces.append(_handed_on(late, number, name))
        found.pieces += [_renamed(piece, name) for piece in graph.pieces]
        found.early += tuple(_border(border, name) for border in graph.early if border.source not in taken)
        found.weights |= {name(key): weight for key, weight in graph.weights.items()}
        found.inputs += tuple(name(key) for key in graph.inputs if key not in taken)
        crossing = tuple(map(name, graph.outputs))
    return replace(found, outputs=crossing)


def name_in_joined(number: int, name: str) -> str:
    """Returns the name in a joined graph of an input of one of its layers."""
    return f"{number}.{name}"


def _namer(number: int, taken: dict[str, str]) -> Callable[[str], str]:
    return lambda key: taken.get(key) or name_in_joined(number, key)


def _border(border: Border, name: Callable[[str], str]) -> Border:
    return replace(border, name=name(border.name), source=name(border.source))


def _renamed(piece: Piece, name: Callable[[str], str]) -> Piece:
    reads, weights, writes = (tuple(map(name, names)) for names in (piece.reads, piece.weights, piece.writes))
    return Piece(piece.body, reads, weights, writes, tuple(_border(border, name) for border in piece.borders))


def _handed_on(late: Sequence[Border], number: int, name: Callable[[str], str]) -> Piece:
    """Returns a piece that reads values of the previous layer and starts their moves."""
    sources = dict.fromkeys(border.source for border in late)
    alias = {source: f"{number}.alias.{source}" for source in sources}
    borders = [replace(border, name=name(border.name), source=alias[border.source]) for border in late]
    return Piece(_Aliases(), tuple(map(name, sources)), (), tuple(alias.values()), tuple(borders))
