"""Liveness: a flat graph as a line of operations, and the values that are alive between two of them.

Values that depend on no parameter and draw no random numbers (masks, positions, rotary tables, shifted labels) are recomputed in
every stage that reads them and never cross a cut. Parameters do not cross either. An operation that writes memory in place counts
as a producer of that memory: a later reader also depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from meshwright.capture.trace.graph import Flat, Node, NodeKind, refs
from meshwright.capture.trace.operations import CHECKS, is_one_of


@dataclass(frozen=True)
class Line:
    """The operations of a graph that form its layers, in order. `free` are the values that are recomputed where needed."""

    flat: Flat
    parameters: frozenset[str]

    @cached_property
    def state(self) -> frozenset[str]:
        """State that belongs to one layer: parameters, and buffers that change."""
        return self.parameters | {name for node in self.flat.nodes for name in node.changes}

    @cached_property
    def needs(self) -> dict[str, tuple[str, ...]]:
        """For each node, the nodes that must run before it: those that it reads, and those that changed these in place."""
        changed: dict[int, list[str]] = {}
        found: dict[str, tuple[str, ...]] = {}
        for node in self.flat.nodes:
            reads = list(node.reads)
            for name in node.reads:
                for memory in self.flat.by_name[name].memory:
                    reads += changed.get(memory, ())
            found[node.name] = tuple(dict.fromkeys(reads))
            for memory in node.writes:
                changed.setdefault(memory, []).append(node.name)
        return found

    @cached_property
    def order(self) -> dict[str, int]:
        """The number of each node."""
        return {node.name: number for number, node in enumerate(self.flat.nodes)}

    def in_order(self, names: Iterable[str]) -> list[Node]:
        """Return nodes in the order of the graph."""
        return [self.flat.by_name[name] for name in sorted(names, key=self.order.__getitem__)]

    @cached_property
    def written(self) -> frozenset[int]:
        """The storages that are written into."""
        return frozenset(memory for node in self.flat.nodes for memory in node.writes)

    def is_written(self, name: str) -> bool:
        """True if the memory of a value is changed in place."""
        return not self.written.isdisjoint(self.flat.by_name[name].memory)

    @cached_property
    def free(self) -> frozenset[str]:
        """Nodes that depend on no parameter and draw no random numbers."""
        bound: set[str] = set()
        taken: set[int] = set()
        before = -1
        while len(bound) != before:  # a write in place binds its memory, and with it earlier views
            before = len(bound)
            for node in self.flat.nodes:
                if node.kind is NodeKind.STATE and node.target in self.state:
                    bound.add(node.name)
                elif node.random or not taken.isdisjoint(node.memory) or any(name in bound for name in self.needs[node.name]):
                    bound.add(node.name)
                    taken.update(node.writes)
        return frozenset(node.name for node in self.flat.nodes if node.name not in bound)

    @cached_property
    def free_writers(self) -> tuple[Node, ...]:
        """The free nodes that write into memory."""
        return tuple(node for node in self.flat.nodes if node.writes and node.name in self.free)

    @cached_property
    def work(self) -> tuple[Node, ...]:
        """The operations that must not be repeated, in order. Operations that no result depends on are left out."""
        alive = self.alive()
        return tuple(
            node for node in self.flat.nodes if node.kind is NodeKind.CALL and node.name in alive and node.name not in self.free
        )

    def alive(self) -> set[str]:
        """Return the nodes that the result depends on. Changes of buffers count as results."""
        wanted = [ref.name for ref in refs(self.flat.result)]
        wanted += [node.name for node in self.flat.nodes if node.changes]
        seen: set[str] = set()
        while wanted:
            name = wanted.pop()
            if name not in seen and not is_one_of(self.flat.by_name[name].target, CHECKS):
                seen.add(name)
                wanted += self.needs[name]
        return seen

    @cached_property
    def last_use(self) -> dict[str, int]:
        """For each operation on the line, the index of the last operation that needs its value. Results are needed at the end."""
        index = {node.name: i for i, node in enumerate(self.work)}
        found = dict(index)
        for i, node in enumerate(self.work):
            for name in self.closure([node.name]):
                if name in found:
                    found[name] = max(found[name], i)
        for ref in refs(self.flat.result):
            if ref.name in found:
                found[ref.name] = len(self.work)
        return found

    def closure(self, names: Iterable[str]) -> dict[str, None]:
        """Return what these nodes read, following values that are recomputed on the way."""
        found: dict[str, None] = {}
        wanted = [need for name in names for need in self.needs[name]]
        while wanted:
            name = wanted.pop()
            if name not in found:
                found[name] = None
                if name in self.free:
                    wanted += self.needs[name]
        return found

    @cached_property
    def crossings(self) -> tuple[tuple[str, ...], ...]:
        """For each place p, before operation p of the line, the values that are alive there, in order."""
        starts: dict[int, list[str]] = {}
        ends: dict[int, list[str]] = {}
        for i, node in enumerate(self.work):
            if self.last_use[node.name] > i:
                starts.setdefault(i + 1, []).append(node.name)
                ends.setdefault(self.last_use[node.name] + 1, []).append(node.name)
        alive: dict[str, None] = {}
        found = []
        for place in range(len(self.work) + 1):
            for name in ends.get(place, ()):
                del alive[name]
            for name in starts.get(place, ()):
                alive[name] = None
            found.append(tuple(alive))
        return tuple(found)
