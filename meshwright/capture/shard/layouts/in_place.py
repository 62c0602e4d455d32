"""In-place operations: a local program makes new tensors instead, unless the old value is read again."""

from __future__ import annotations

from meshwright.capture.trace.graph import Flat, Node


def read_again(flat: Flat, node: Node) -> bool:
    """Whether the memory that an operation writes into is read later under another name than that of its result."""
    after = False
    for other in flat.nodes:
        if after:
            for name in other.reads:
                source = flat.by_name[name]
                if name != node.name and not set(source.memory).isdisjoint(node.writes) and not _follows(flat, name, node.name):
                    return True
        after |= other.name == node.name
    return False


def _follows(flat: Flat, name: str, source: str) -> bool:
    """Whether a value is computed from another."""
    todo, seen = [name], set[str]()
    while todo:
        at = todo.pop()
        if at == source:
            return True
        if at not in seen:
            seen.add(at)
            todo += flat.by_name[at].reads
    return False
