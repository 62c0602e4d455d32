"""Finds the places where a line of operations may be cut, and the chain of layers between them.

A place is good if at most one value crosses it, not counting long skips. In a residual network these are the borders of half
blocks. A skip is long if it passes over a deep part: at least four matrix products in a row, more than attention or a
feed-forward block has. A long skip is sent along, and its bytes count. There is no cut between the products that feed attention
and the end of attention. Among several places without work between them, the choice prefers a place where all crossing values
have rows as first dimension, then the fewest bytes, then the one where the most modules have ended.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from meshwright.capture.cut.liveness import Line
from meshwright.capture.trace.graph import Node, NodeKind
from meshwright.capture.trace.operations import CORES, LOOKUPS, PRODUCTS, is_one_of

LONG = 4
"""A skip is long if it passes over at least this many products in a row."""


@dataclass(frozen=True)
class LayerChain:
    """The cuts of a line into layers: `starts[k]` is the first operation of layer k, followed by the number of operations."""

    line: Line

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first operation of each layer."""
        line = self.line
        weighty = [i for i, node in enumerate(line.work) if self._is_weighty(node)]
        if not weighty:
            return (0, len(line.work))
        found = [0]
        for before, behind in itertools.pairwise(weighty):
            places = [p for p in range(before + 1, behind + 1) if self.is_good(p)]
            lookups = all(is_one_of(line.work[i].target, LOOKUPS) for i in (before, behind))
            if places and not lookups:
                found.append(min(places, key=lambda p: (self._folded(p), self.bytes_at(p), self._depth(p), -p)))
        return (*found, len(line.work))

    def is_good(self, place: int) -> bool:
        """True if the line may be cut before this operation."""
        if place in self.inside_attention:
            return False
        line = self.line
        values = line.crossings[place]
        if any(line.flat.by_name[name].size is None for name in values):
            return False  # a tuple, or a number that was computed from weights
        if self._shares_changed_memory(place):
            return False
        return sum(name not in self.long for name in values) <= 1

    def bytes_at(self, place: int) -> int:
        """Return the bytes that cross a place."""
        sizes = [self.line.flat.by_name[name].size for name in self.line.crossings[place]]
        return sum(size.bytes for size in sizes if size is not None)

    def _folded(self, place: int) -> int:
        """Count the crossing values whose first dimension is not the rows of the batch; they cannot be cut by rows."""
        by_name = self.line.flat.by_name
        return sum(size.shape[:1] != (self._rows,) for n in self.line.crossings[place] if (size := by_name[n].size) is not None)

    @cached_property
    def _rows(self) -> int:
        columns = [node.size for node in self.line.flat.nodes if node.kind is NodeKind.COLUMN]
        return next((size.shape[0] for size in columns if size is not None and size.shape), 0)

    @cached_property
    def long(self) -> frozenset[str]:
        """Values that pass over deep parts of the line."""
        line = self.line
        products = [0]
        for node in line.work:
            products.append(products[-1] + self.is_product(node))
        index = {node.name: i for i, node in enumerate(line.work)}
        found = set()
        for name, i in index.items():
            last = min(line.last_use[name], len(line.work) - 1)
            if products[last + 1] - products[i + 1] >= LONG and self._longest(i + 1, last) >= LONG:
                found.add(name)
        return frozenset(found)

    def _longest(self, first: int, last: int) -> int:
        """Return the most products in a row among the operations of a range."""
        depth: dict[str, int] = {}
        best = 0
        for node in self.line.work[first : last + 1]:
            before = max((depth.get(name, 0) for name in self._before[node.name]), default=0)
            depth[node.name] = before + self.is_product(node)
            best = max(best, depth[node.name])
            if best >= LONG:
                break
        return best

    @cached_property
    def _before(self) -> dict[str, tuple[str, ...]]:
        """For each operation, the operations of the line that it reads."""
        on_line = {node.name for node in self.line.work}
        return {node.name: tuple(n for n in self.line.closure([node.name]) if n in on_line) for node in self.line.work}

    def is_product(self, node: Node) -> bool:
        """True for a matrix product with a parameter."""
        return is_one_of(node.target, PRODUCTS) and self._reads_parameter(node)

    def _reads_parameter(self, node: Node) -> bool:
        """True if it reads a parameter, directly or through operations on parameters only."""
        by_name = self.line.flat.by_name
        return any(
            (by_name[name].kind is NodeKind.STATE and by_name[name].target in self.line.parameters) or name in self._of_parameters
            for name in node.reads
        )

    @cached_property
    def _of_parameters(self) -> frozenset[str]:
        """Values that are computed from parameters only, such as a transposed or normalised weight."""
        by_name, found = self.line.flat.by_name, set[str]()
        for node in self.line.work:
            if node.reads and not is_one_of(node.target, LOOKUPS):
                kinds = [by_name[name] for name in node.reads]
                if all(n.name in found or (n.kind is NodeKind.STATE and n.target in self.line.parameters) for n in kinds):
                    found.add(node.name)
        return frozenset(found)

    def _is_weighty(self, node: Node) -> bool:
        return self.is_product(node) or is_one_of(node.target, LOOKUPS)

    @cached_property
    def inside_attention(self) -> frozenset[int]:
        """Places between the products that feed attention and the end of attention."""
        index = {node.name: i for i, node in enumerate(self.line.work)}
        found: set[int] = set()
        for i, node in enumerate(self.line.work):
            if is_one_of(node.target, CORES):
                feeds, wanted, seen = i, [node.name], set[str]()
                while wanted:
                    name = wanted.pop()
                    for before in self._before[name]:
                        if before in seen:
                            continue
                        seen.add(before)
                        source = self.line.work[index[before]]
                        if self.is_product(source):
                            feeds = min(feeds, index[before])
                        elif before not in self.long and not is_one_of(source.target, LOOKUPS):
                            wanted.append(before)  # a bias that all layers share was computed elsewhere
                found |= set(range(feeds + 1, self._end_of_attention(i) + 1))
        return frozenset(found)

    def _end_of_attention(self, core: int) -> int:
        """Return the end of attention. After a softmax it is the product with the values; a fused operation is the end itself."""
        reached = {self.line.work[core].name}
        for i in range(core + 1, min(core + 24, len(self.line.work))):
            node = self.line.work[i]
            if any(name in reached for name in self._before[node.name]):
                reached.add(node.name)
                if is_one_of(node.target, PRODUCTS):
                    return core if self.is_product(node) else i
        return core

    def _shares_changed_memory(self, place: int) -> bool:
        """True if a cut would separate two views of memory that a later operation changes."""
        line = self.line
        crossing = [memory for name in line.crossings[place] for memory in line.flat.by_name[name].memory]
        return any(self._last_write.get(memory, -1) >= place and crossing.count(memory) > 1 for memory in crossing)

    @cached_property
    def _last_write(self) -> dict[int, int]:
        """The last operation that writes into each storage."""
        return {memory: at for at, node in enumerate(self.line.work) for memory in node.writes}

    def _depth(self, place: int) -> int:
        """Count the modules that contain the operations on both sides of a place."""
        if not 0 < place < len(self.line.work):
            return 0
        a, b = self.line.work[place - 1].path.split("."), self.line.work[place].path.split(".")
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
