"""Cuts a local graph at its collectives into pieces that run without waiting, and the moves between them.

A move starts after the piece that makes its argument and is awaited before the first piece that reads its result. Moves in a
row without a reader in between form one route. Moves of weights do not depend on activations. They are listed separately, so
that they can start early and be shared by the halves of a microbatch. Products with gathered weights, together with their
siblings, are in pieces of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from meshwright.tensor.local_ops import product
from meshwright.tensor.moves import Move, Moved, MoveKind
from meshwright.tensor.weave.split_product import JobSlot, SplitProduct
from meshwright.tensor.wires.wires import StartedCollective, Wires, done


@dataclass(frozen=True, slots=True)
class Route:
    """A sequence of moves."""

    moves: tuple[Move, ...]

    def start(self, t: Tensor, wires: Wires) -> StartedCollective:
        """Starts the first move. The others run when the result is awaited."""
        silent = next((k for k, move in enumerate(self.moves) if move.speaks), len(self.moves))
        for move in self.moves[:silent]:
            t = move.start(t, wires).wait()
        return _chain([move.start for move in self.moves[silent:]], t, wires)

    def start_back(self, g: Tensor, wires: Wires) -> StartedCollective:
        """Starts the adjoints in reverse order."""
        return _chain([move.start_back for move in reversed(self.moves)], g, wires)

    @property
    def silent(self) -> bool:
        """Whether it sends nothing."""
        return not any(move.speaks for move in self.moves)

    @property
    def gathers(self) -> bool:
        """Whether its result is larger than its argument, so that gathering again saves memory."""
        return any(move.kind is MoveKind.GATHER for move in self.moves)


def _chain(starts: list[Any], t: Tensor, wires: Wires) -> StartedCollective:
    pending: StartedCollective = starts[0](t, wires) if starts else done(t)
    if len(starts) < 2:
        return pending

    def result() -> Tensor:
        found = pending.wait()
        for start in starts[1:]:
            found = start(found, wires).wait()
        return _apart(found)

    return StartedCollective(result)


def _apart(t: Tensor) -> Tensor:
    """Returns a tensor with its own storage, so that a slice of a gathered tensor does not keep the whole tensor alive."""
    return t.clone() if t.untyped_storage().nbytes() > t.numel() * t.element_size() else t


@dataclass(frozen=True, slots=True)
class Border:
    """A value that a route makes from another. `narrow`: only products read it, so it can be cast before it moves."""

    name: str
    source: str
    route: Route
    learns: bool
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class MovedWeight:
    """A parameter and the route that gathers it. `narrow`: only products read it, so it can be cast before it moves."""

    parameter: nn.Parameter
    route: Route
    narrow: bool = False


@dataclass
class Piece:
    """One piece: the names of the values that it reads and writes, the weights it reads, and the moves to start after it."""

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
    """Moves of the inputs of the graph."""
    weights: dict[str, MovedWeight]
    slot: JobSlot
    wires: Wires
    begins: dict[int, int] = field(default_factory=lambda: {0: 0})
    """The layers that begin with a piece."""
    borders: dict[str, Border] = field(init=False)
    first: dict[str, int] = field(init=False)
    """The first piece that reads a value."""
    releases: list[list[str]] = field(init=False)
    """For every piece, the values that nothing needs after it."""

    def __post_init__(self) -> None:
        groups = [self.early, *(piece.borders for piece in self.pieces)]
        self.borders = {border.name: border for group in groups for border in group}
        self.first, last = {}, dict[str, int]()
        for k, piece in enumerate(self.pieces):
            last |= {border.source: k for border in piece.borders}
            for name in piece.reads:
                self.first.setdefault(name, k)
                last[name] = k
        for name, border in self.borders.items():  # a gathered value can be gathered again from its source
            if border.route.gathers and border.source in last and name in last:
                last[border.source] = max(last[border.source], last[name])
        kept = {*self.inputs, *self.outputs}
        self.releases = [[] for _ in self.pieces]
        for name, k in last.items():
            if name not in kept:
                self.releases[k].append(name)


_PRODUCT = "split_product"


class _Cutter:
    """Assigns every node of a graph to a piece."""

    def __init__(self, module: fx.GraphModule, slot: JobSlot) -> None:
        self.module, self.graph, self.slot = module, module.graph, slot
        module.add_module(_PRODUCT, SplitProduct(self.slot))
        self.at: dict[fx.Node, int] = {}
        self.launch: dict[fx.Node, int] = {}
        self.routes: dict[fx.Node, tuple[fx.Node, tuple[Move, ...], bool]] = {}
        self.weights: dict[fx.Node, MovedWeight] = {}
        self.reader: dict[int, fx.Node | None] = {}
        current = 0
        for node in list(self.graph.nodes):
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            moved = self._moved(node)
            if moved is not None and moved.weight:
                self._weigh(node, moved)
            elif moved is not None and self._is_border(moved):
                self._cross(node, moved, current)
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
            before = self.weights[source]
            self.weights[node] = MovedWeight(before.parameter, Route((*before.route.moves, moved.move)), _only_products(node))
            return
        found: Any = self.module
        for part in str(source.target).split("."):
            found = getattr(found, part)
        self.weights[node] = MovedWeight(found, Route((moved.move,)), _only_products(node))

    def _cross(self, node: fx.Node, moved: Moved, current: int) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if source.op == "get_attr":  # a parameter whose readers cut it in different ways: a piece passes it on
            source = self._handed_on(node, source, current)
        elif source in self.routes and len(source.users) == 1 and not self._sums_before(source, moved.move):
            before, moves, learns = self.routes.pop(source)
            self.routes[node] = before, (*moves, moved.move), learns
            self.launch[node] = self.launch[source]
            return
        elif source in self.routes:  # read by others too, or gathered again from here: a separate piece passes it on
            source = self._handed_on(node, source, self.launch[source] + 1)
        self.routes[node] = source, (moved.move,), moved.learns
        self.launch[node] = self.at.get(source, -1)

    def _sums_before(self, source: fx.Node, move: Move) -> bool:
        """Whether a gather comes after a sum. If shards are kept, only the gather is repeated."""
        return move.kind is MoveKind.GATHER and any(m.kind in (MoveKind.SCATTER, MoveKind.TOTAL) for m in self.routes[source][1])

    def _handed_on(self, node: fx.Node, source: fx.Node, piece: int) -> fx.Node:
        """Returns a view of the argument of a move, made in a piece."""
        with self.graph.inserting_before(node):
            alias = self.graph.call_function(_same, (source,))
        node.args = (alias,)
        self.at[alias] = piece
        return alias

    def _place(self, node: fx.Node, current: int) -> int:
        sources = node.all_input_nodes
        if node.target is operator.getitem and len(sources) == 1 and sources[0] in self.at:
            self.at[node] = self.at[sources[0]]  # a tuple cannot be passed between pieces
            return current
        found = max([current, *(self.launch[source] + 1 for source in sources if source in self.routes)])
        found = max([found, *(self.at[source] for source in sources if source in self.at)])
        if any(source in self.weights for source in sources):  # siblings share a piece; others get their own, to gather early
            other = next((source for source in sources if source not in self.weights), None)
            if found in self.reader and self.reader[found] is not other:
                found += 1
            self.reader[found] = other
        self.at[node] = found
        return found


def _same(t: Tensor) -> Tensor:
    return t.view_as(t)


def _only_products(node: fx.Node) -> bool:
    return bool(node.users) and all(user.target is product for user in node.users)


def cut(module: fx.GraphModule, wires: Wires, slot: JobSlot | None = None) -> PieceGraph:
    """Returns a local graph in pieces, with the same parameter objects. Graphs that run as one share a slot."""
    cutter = _Cutter(module, slot or JobSlot())
    output = next(node for node in module.graph.nodes if node.op == "output")
    results: list[fx.Node] = list(output.args[0])
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    made = [_piece(cutter, k, set(results)) for k in range(cutter.count)]
    borders: dict[int, list[Border]] = {}
    for node, (source, moves, learns) in cutter.routes.items():
        border = Border(node.name, source.name, Route(moves), learns, _only_products(node))
        borders.setdefault(cutter.launch[node], []).append(border)
    for k, piece in enumerate(made):
        piece.borders = tuple(borders.get(k, ()))
    weights = {node.name: found for node, found in cutter.weights.items()}
    return PieceGraph(made, _names(inputs), _names(results), tuple(borders.get(-1, ())), weights, cutter.slot, wires)


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
