"""Repeats the nodes of one block in a captured graph, so that the graph is that of the whole list of blocks.

The result is the graph that a capture of the whole model gives, node by node: parameters and modules have the names of their own
blocks, and storages are numbered in the order in which they appear. Only the names of nodes differ: `add_7_3` is what `add_7` of
the repeated block is called three blocks later.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshwright.capture.repeat.block_lists import BlockRun
from meshwright.capture.repeat.block_spread import BlockSpread, NotEqualError
from meshwright.capture.trace.graph import Flat, Node, NodeKind, Ref, mapped


def repeated_graph(flat: Flat, run: BlockRun) -> Flat:
    """Returns the graph of the whole list. Raises `NotEqualError` if the nodes of two blocks differ."""
    return _Repeater(flat, run).whole()


@dataclass(frozen=True)
class _Repeater:
    flat: Flat
    run: BlockRun

    @cached_property
    def calls(self) -> list[Node]:
        """The operations. Parameters, buffers and columns come before them."""
        first = next(at for at, node in enumerate(self.flat.nodes) if node.kind is NodeKind.CALL)
        return list(self.flat.nodes[first:])

    @cached_property
    def at(self) -> dict[str, int]:
        """The number of each operation."""
        return {node.name: at for at, node in enumerate(self.calls)}

    @cached_property
    def spread(self) -> BlockSpread:
        starts: dict[str, int] = {}
        for at, node in enumerate(self.calls):
            for path in self.run.kept:
                if node.path == path or node.path.startswith(f"{path}."):
                    starts.setdefault(path, at)
        if len(starts) < len(self.run.kept):
            raise NotEqualError("a block has no operations")
        return BlockSpread(tuple(starts[path] for path in self.run.kept), len(self.calls), len(self.run.left_out))

    @cached_property
    def owners(self) -> dict[int, Node]:
        """The first node that uses each storage."""
        found: dict[int, Node] = {}
        for node in self.flat.nodes:
            for inner in _with_inner(node):
                for memory in inner.memory:
                    found.setdefault(memory, node)
        return found

    def whole(self) -> Flat:
        """Returns the graph of the whole list."""
        self._refuse_different()
        nodes = [*self._states(), *(self._moved(at, by) for at, by in self.spread.operations())]
        end = self.spread.length
        result = mapped(self.flat.result, lambda leaf: self._reference(leaf, end, self.spread.extra))
        found = replace(self.flat, nodes=_renumbered(nodes), result=result)
        if len(found.by_name) != len(found.nodes):
            raise NotEqualError("two nodes have the same name")
        return found

    def _states(self) -> Iterator[Node]:
        """Yields what comes before the operations, with the parameters and buffers of all blocks."""
        group: list[Node] = []
        for node in (*self.flat.nodes[: -len(self.calls)], None):
            is_own = node is not None and node.kind is NodeKind.STATE and self.run.moved(node.target, 1) != node.target
            if not is_own:
                yield from (self._moved_state(one, by) for by in range(1, self.spread.extra + 1) for one in group)
                group = []
            if node is not None:
                group += [node] if is_own else []
                yield _with_storages(node, lambda memory: (memory, 0))

    def _moved_state(self, node: Node, by: int) -> Node:
        if node.constant is not None:
            raise NotEqualError(f"{node.target} is a constant")
        target = self.run.moved(node.target, by)
        found = replace(node, name=self._state_name(node, by), target=target)
        return _with_storages(found, lambda memory: (memory, by))

    def _state_name(self, node: Node, by: int) -> str:
        old, new = (_plain(self.run.member(self.run.source + k)) for k in (0, by))
        if node.name.count(old) != 1:
            raise NotEqualError(f"{node.name} is not named after {node.target}")
        return node.name.replace(old, new)

    def _moved(self, at: int, by: int) -> Node:
        node = self.calls[at]
        if not by:
            return _with_storages(node, lambda memory: (memory, 0))
        own = at in self.spread.source
        if node.kind is not NodeKind.CALL and own:
            raise NotEqualError(f"a block has a {node.kind.value}")
        found = replace(
            node,
            name=self._name(at, by),
            args=mapped(node.args, lambda leaf: self._reference(leaf, at, by)),
            kwargs=mapped(node.kwargs, lambda leaf: self._reference(leaf, at, by)),
            path=self.run.moved(node.path, by) if own else node.path,
            changes=tuple(self.run.moved(name, by) for name in node.changes) if own else node.changes,
        )
        return _with_storages(found, lambda memory: self._storage(memory, at, by))

    def _storage(self, memory: int, at: int, by: int) -> tuple[int, int]:
        """Returns the storage that an operation uses `by` blocks later: one of the shortened graph, and a number of blocks."""
        owner = self.owners[memory]
        if not self._moves(owner, at):
            return memory, 0
        if owner.name not in self.at:
            return memory, by
        now, left = self._in_source(before := self.at[owner.name], by)
        return memory if now == before else self.calls[now].memory[_place(owner, memory)], left

    def _moves(self, read: Node, at: int) -> bool:
        """Returns whether what an operation reads moves along with it."""
        if read.name in self.at:
            return self.spread.moves(at, self.at[read.name])
        return at in self.spread.source and self.run.moved(read.target, 1) != read.target

    def _reference(self, leaf: Any, at: int, by: int) -> Any:
        if not isinstance(leaf, Ref) or not by:
            return leaf
        node = self.flat.by_name[leaf.name]
        if not self._moves(node, at):
            return leaf
        return Ref(self._name(self.at[node.name], by) if node.name in self.at else self._state_name(node, by))

    def _name(self, at: int, by: int) -> str:
        """Returns the name of an operation `by` blocks later. Operations after the blocks keep their names."""
        at, by = self._in_source(at, by)
        return f"{self.calls[at].name}_{by}" if by and at in self.spread.source else self.calls[at].name

    def _in_source(self, at: int, by: int) -> tuple[int, int]:
        """Moving the block before the source by n blocks is the same as moving the source by n - 1."""
        return (at + self.spread.period, by - 1) if at < self.spread.starts[-2] else (at, by)

    def _refuse_different(self) -> None:
        """Raises unless the block before the source has the same nodes."""
        period, source = self.spread.period, self.run.source
        for at in self.spread.source:
            if self._described(at, source) != self._described(at - period, source - 1):
                raise NotEqualError(f"{self.calls[at].name} and {self.calls[at - period].name} differ")

    def _described(self, at: int, member: int) -> Hashable:
        """Describes a node so that those of equal blocks are described equally."""
        node, own = self.calls[at], self.run.member(member)

        def name(text: str) -> str:
            return f"*{text[len(own) :]}" if text == own or text.startswith(f"{own}.") else text

        def made(read: Node) -> Hashable:
            if read.name not in self.at:
                return name(read.target)
            number = self.at[read.name]
            return number if number < self.spread.starts[1] else f"{number - at}"

        parts = mapped(
            (node.args, node.kwargs), lambda leaf: made(self.flat.by_name[leaf.name]) if isinstance(leaf, Ref) else leaf
        )
        owned = [[(self.owners[memory], memory) for memory in part] for part in (node.memory, node.writes)]
        storages = [[(made(owner), _place(owner, memory)) for owner, memory in part] for part in owned]
        names = name(node.path), *map(name, node.changes)
        return f"{node.kind} {node.target} {parts} {node.size} {node.several} {node.random} {names} {storages}"


def _place(owner: Node, memory: int) -> int:
    """Returns the index of a storage of a node; -1 for storages inside a region, which blocks do not have."""
    return owner.memory.index(memory) if memory in owner.memory else -1


def _plain(path: str) -> str:
    return f"_{path.replace('.', '_')}_"


def _renumbered(nodes: list[Node]) -> tuple[Node, ...]:
    """Numbers storages in the order in which they appear."""
    numbers: dict[Hashable, int] = {}
    return tuple(_with_storages(node, lambda key: numbers.setdefault(key, len(numbers))) for node in nodes)


def _with_storages(node: Node, change: Callable[[Any], Any]) -> Node:
    """Returns a node with other names for its storages, and for those of a region."""
    body = node.body and replace(node.body, nodes=tuple(_with_storages(inner, change) for inner in node.body.nodes))
    return replace(node, memory=tuple(map(change, node.memory)), writes=tuple(map(change, node.writes)), body=body)


def _with_inner(node: Node) -> Iterator[Node]:
    """Yields a node, and the nodes of a region."""
    yield node
    for inner in node.body.nodes if node.body is not None else ():
        yield from _with_inner(inner)
