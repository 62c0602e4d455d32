"""Replaces writes into a tensor by new tensors: `x[..., :4] = y` becomes x' = slice_scatter(x, y), and later readers read x'.

Values of a local program do not share memory, so the result of a write must be a new value. If another view of the same memory
is read after a write, the graph is not changed, and the rule of the writing operation refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from meshwright.capture.cut.liveness import Line
from meshwright.capture.shard.layouts.sizes import Sizes
from meshwright.capture.shard.layouts.walk_task import operation
from meshwright.capture.trace.graph import Flat, Node, NodeKind, Ref, mapped, refs

Back = Callable[[Node, str, str], tuple[str, tuple[Any, ...]]]
"""Returns the operation that computes the new source from a view, the name of its source and that of its new value."""


def _scattered(kind: str) -> Back:
    return lambda view, source, new: (f"aten.{kind}_scatter.default", (Ref(source), Ref(new), *view.args[1:]))


def _reshaped(view: Node, source: str, new: str) -> tuple[str, tuple[Any, ...]]:
    return "aten.reshape_as.default", (Ref(new), Ref(source))


def _turned(view: Node, source: str, new: str) -> tuple[str, tuple[Any, ...]]:
    return view.target, (Ref(new), *view.args[1:])


_BACK: dict[str, Back] = {
    "aten.slice": _scattered("slice"),
    "aten.select": _scattered("select"),
    **dict.fromkeys(("aten.view", "aten.unsqueeze", "aten.squeeze", "aten.flatten", "aten.unflatten"), _reshaped),
    "aten.transpose": _turned,
}


_WRITES = tuple(
    f"aten.{name}"
    for name in (
        *("copy", "fill", "masked_fill", "index_put", "index_fill", "index_add", "index_copy", "scatter", "scatter_add"),
        *("add", "sub", "mul", "div", "clamp", "pow", "neg", "exp", "relu", "sigmoid", "tanh"),
    )
)
"""Operations that exist without a write, with a derivative."""


class _Writes:
    """The state of the replacement: nodes so far, and the newest value of every name."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.nodes: list[Node] = []
        self.newest: dict[str, str] = {}
        self.like: dict[str, str] = {}
        self.free_memory = max((m for node in flat.nodes for m in node.memory), default=0) + 1

    def chain(self, node: Node) -> list[Node] | None:
        """Returns the views from a written value to the tensor that owns the memory, which is last."""
        found, at = list[Node](), self.flat.by_name[node.args[0].name]
        while at.kind is NodeKind.CALL and operation(at) in _BACK and not at.kwargs and at.target != "aten.view.dtype":
            found.append(at)
            at = self.flat.by_name[at.args[0].name]
        return [*found, at] if set(at.memory) >= set(node.writes) and at.kind is NodeKind.CALL else None

    def write(self, node: Node) -> bool:
        """Replaces one write. Returns False if that is not possible."""
        parts = node.target.split(".")
        target = ".".join((parts[0], parts[1].rstrip("_"), *parts[2:]))
        chain = self.chain(node) if parts[1].endswith("_") and operation(node) in _WRITES and not node.kwargs else None
        if chain is None or self._stale(node, {each.name for each in chain}):
            return False
        self._add(replace(node, target=target, args=self.read(node.args), writes=()), node.name)
        new = node.name
        self.newest[chain[0].name] = new
        for number, view in enumerate(chain[:-1]):
            source = chain[number + 1].name
            back, args = _BACK[operation(view)](view, self.newest.get(source, source), new)
            new = f"{node.name}_into_{number}"
            size = self.flat.by_name[source].size
            self._add(Node(new, NodeKind.CALL, back, args, size=size, path=node.path), source)
            self.newest[source] = new
        return True

    def plain(self, node: Node) -> None:
        """Adds a node that writes nothing."""
        self.nodes.append(replace(node, args=self.read(node.args), kwargs=self.read(node.kwargs)))

    def _add(self, node: Node, like: str) -> None:
        self.nodes.append(replace(node, memory=(self.free_memory,)))
        self.free_memory += 1
        if node.name != like:
            self.like[node.name] = like

    def read(self, tree: Any) -> Any:
        """Returns arguments with the newest values."""
        return mapped(tree, lambda leaf: Ref(self.newest.get(leaf.name, leaf.name)) if isinstance(leaf, Ref) else leaf)

    def _stale(self, node: Node, chain: set[str]) -> bool:
        """Whether an older view of the same memory is read after a write."""
        after, before = False, set[str]()
        for other in self.flat.nodes:
            if after and any(name in before for name in other.reads):
                return True
            if other.name == node.name:
                after = True
            elif not after and other.name not in chain and not set(other.memory).isdisjoint(node.writes):
                before.add(other.name)
        return any(ref.name in before for ref in refs(self.flat.result))


def _replaced(line: Line, kept: set[int]) -> tuple[_Writes, set[int]]:
    """Returns a graph without writes, except into some storages, and the storages of a write that cannot be replaced."""
    work = {node.name for node in line.work}
    graph = _Writes(line.flat)
    for node in line.flat.nodes:
        if not node.writes or not kept.isdisjoint(node.writes):
            graph.plain(node)
        elif node.name not in work or node.changes or node.random or not isinstance(node.args[0], Ref) or not graph.write(node):
            return graph, set(node.writes)
    return graph, set()


def without_writes(line: Line, sizes: Sizes, places: Sequence[int]) -> tuple[Line, Sizes, tuple[int, ...]]:
    """Returns the model without writes into values that depend on parameters, if they can be replaced, and its places.

    If one write into a tensor cannot be replaced, all writes into it stay.
    """
    kept, (graph, problem) = set[int](), _replaced(line, set())
    while problem:
        kept |= problem
        graph, problem = _replaced(line, kept)
    if all(set(node.writes) <= kept for node in line.flat.nodes):
        return line, sizes, tuple(places)
    new = Line(replace(line.flat, nodes=tuple(graph.nodes), result=graph.read(line.flat.result)), line.parameters)
    shapes = {**sizes.shapes, **{name: sizes.shapes[like] for name, like in graph.like.items()}}
    grows = {**sizes.grows, **{name: sizes.grows[like] for name, like in graph.like.items() if like in sizes.grows}}
    index = {node.name: at for at, node in enumerate(new.work)}
    moved = [next((index[n.name] for n in line.work[place:] if n.name in index), len(new.work)) for place in places]
    return new, replace(sizes, shapes=shapes, grows=grows), (0, *moved[1:]) if places[0] == 0 else tuple(moved)
