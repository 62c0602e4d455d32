"""A local graph cut at its collectives: pieces that run without waiting, and the moves between them.

A move is started after the piece that makes its argument and awaited before the first piece that reads its result. Moves that
follow each other without a reader between them are one route. Moves of weights depend on no activation: they stand apart, so that
they can be started ahead and shared by the halves of a microbatch. Products with gathered weights are in pieces of their own,
with their siblings.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from meshwright.tensor.local_ops import product
from meshwright.tensor.moves import Move, Moved, MoveKind
from meshwright.tensor.products import JobSlot, SplitProduct
from meshwright.tensor.wires import StartedCollective, Wires, done


@dataclass(frozen=True, slots=True)
class Route:
    """Moves one after another."""

    moves: tuple[Move, ...]

    def start(self, t: Tensor, wires: Wires) -> StartedCollective:
        """The moves forward; the first is under way when this returns."""
        return _chain([move.start for move in self.moves], t, wires)

    def start_back(self, g: Tensor, wires: Wires) -> StartedCollective:
        """Their adjoints, the last first."""
        return _chain([move.start_back for move in reversed(self.moves)], g, wires)

    @property
    def gathers(self) -> bool:
        """Is its result larger than its argument, so that it can be made again in place of being kept?"""
        return any(move.kind is MoveKind.GATHER for move in self.moves)


def _chain(starts: list[Any], t: Tensor, wires: Wires) -> StartedCollective:
    pending: StartedCollective = starts[0](t, wires) if starts else done(t)
    if len(starts) < 2:
        return pending

    def result() -> Tensor:
        found = pending.wait()
        for start in starts[1:]:
            found = start(found, wires).wait()
        return found

    return StartedCollective(result)


@dataclass(frozen=True, slots=True)
class Border:
    """A value that a route makes from another."""

    name: str
    source: str
    route: Route
    learns: bool


@dataclass
class Piece:
    """A part of the graph: what it reads and writes by name, the weights it reads, and the moves to start after it."""

    body: nn.Module
    reads: tuple[str, ...]
    weights: tuple[str, ...]
    writes: tuple[str, ...]
    borders: tuple[Border, ...] = ()


@dataclass
class PieceGraph:
    """A whole graph in pieces."""

    pieces: list[Piece]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    early: tuple[Border, ...]
    """Moves of what is given."""
    weights: dict[str, tuple[nn.Parameter, Route]]
    slot: JobSlot
    wires: Wires
    borders: dict[str, Border] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    """The first piece that reads a value."""
    last: dict[str, int] = field(default_factory=dict)
    """The last one."""


_PRODUCT = "split_product"


class _Cutter:
    """Which piece every node of a graph is in."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.graph = module, module.graph
        self.slot = JobSlot()
        module.add_module(_PRODUCT, SplitProduct(self.slot))
        self.at: dict[fx.Node, int] = {}
        self.launch: dict[fx.Node, int] = {}
        self.routes: dict[fx.Node, tuple[fx.Node, tuple[Move, ...], bool]] = {}
        self.weights: dict[fx.Node, tuple[nn.Parameter, Route]] = {}
        self.reader: dict[int, fx.Node | None] = {}
        current = 0
        for node in list(self.graph.nodes):
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            moved = self._moved(node)
            if moved is not None and moved.weight:
                self._weigh(node, moved)
            elif moved is not None and self._is_border(moved):
                self._cross(node, moved)
            else:
                current = self._place(node, current)
        self.count = current + 1

    def _moved(self, node: fx.Node) -> Moved | None:
        found = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        return found if isinstance(found, Moved) else None

    def _is_border(self, moved: Moved) -> bool:
        return moved.move.speaks or (moved.learns and moved.move.answers)

    def _weigh(self, node: fx.Node, moved: Moved) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if source in self.weights:
            parameter, route = self.weights[source]
            self.weights[node] = parameter, Route((*route.moves, moved.move))
            return
        found: Any = self.module
        for part in str(source.target).split("."):
            found = getattr(found, part)
        self.weights[node] = found, Route((moved.move,))

    def _cross(self, node: fx.Node, moved: Moved) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if source in self.routes and len(source.users) == 1:
            before, moves, learns = self.routes.pop(source)
            self.routes[node] = before, (*moves, moved.move), learns
            self.launch[node] = self.launch[source]
            return
        if source in self.routes:  # read by others too: a piece of its own hands it on
            with self.graph.inserting_before(node):
                alias = self.graph.call_function(_same, (source,))
            node.args = (alias,)
            self.at[alias] = self.launch[source] + 1
            source = alias
        self.routes[node] = source, (moved.move,), moved.learns
        self.launch[node] = self.at.get(source, -1)

    def _place(self, node: fx.Node, current: int) -> int:
        sources = node.all_input_nodes
        if node.target is operator.getitem and len(sources) == 1 and sources[0] in self.at:
            self.at[node] = self.at[sources[0]]  # a tuple does not cross a border
            return current
        found = max([current, *(self.launch[source] + 1 for source in sources if source in self.routes)])
        found = max([found, *(self.at[source] for source in sources if source in self.at)])
        if any(source in self.weights for source in sources):  # siblings share a piece; others get theirs, to gather ahead
            other = next((source for source in sources if source not in self.weights), None)
            if found in self.reader and self.reader[found] is not other:
                found += 1
            self.reader[found] = other
        self.at[node] = found
        return found


def _same(t: Tensor) -> Tensor:
    return t.view_as(t)


def cut(module: fx.GraphModule, wires: Wires) -> PieceGraph:
    """A local graph in pieces; its parameters stay those of the graph."""
    cutter = _Cutter(module)
    output = next(node for node in module.graph.nodes if node.op == "output")
    results: list[fx.Node] = list(output.args[0])
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    made = [_piece(cutter, k, set(results)) for k in range(cutter.count)]
    borders: dict[int, list[Border]] = {}
    for node, (source, moves, learns) in cutter.routes.items():
        borders.setdefault(cutter.launch[node], []).append(Border(node.name, source.name, Route(moves), learns))
    for k, piece in enumerate(made):
        piece.borders = tuple(borders.get(k, ()))
    weights = {node.name: found for node, found in cutter.weights.items()}
    found = PieceGraph(made, _names(inputs), _names(results), tuple(borders.get(-1, ())), weights, cutter.slot, wires)
    found.borders = {border.name: border for group in borders.values() for border in group}
    for k, piece in enumerate(made):
        for name in piece.reads:
            found.first.setdefault(name, k)
            found.last[name] = k
    return found


def _piece(cutter: _Cutter, number: int, results: set[fx.Node]) -> Piece:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    own = [node for node in cutter.graph.nodes if cutter.at.get(node) == number]
    inside, reads, weights = set(own), dict[fx.Node, None](), dict[fx.Node, None]()
    for node in own:
        for source in node.all_input_nodes:
            if source in cutter.weights:
                weights[source] = None
            elif source not in inside and source.op != "get_attr":
                reads[source] = None
    for source in (*reads, *weights):
        copies[source] = graph.placeholder(source.name)
    for node in own:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in copies:
                copies[source] = graph.get_attr(str(source.target))
        if node.target is product:
            args = tuple(copies[arg] if isinstance(arg, fx.Node) else arg for arg in node.args)
            copies[node] = graph.call_module(_PRODUCT, args)
        else:
            copies[node] = graph.node_copy(node, lambda source: copies[source])
    sources = {source for source, _, _ in cutter.routes.values()}
    written = [
        n for n in own if n in results or n in sources or any(user not in inside and user in cutter.at for user in n.users)
    ]
    graph.output(tuple(copies[node] for node in written))
    body = fx.GraphModule(cutter.module, graph, "Piece")
    return Piece(body, _names(reads), _names(weights), _names(written))


def _names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)
