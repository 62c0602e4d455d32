"""Finds layers that are equal: the same operations on tensors of the same sizes, with parameters of the same shapes.

Equal layers cost the same, so one of them is walked or timed for all. Blocks of a transformer are equal layers. Names of
parameters, values and modules do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any

from torch import nn

from meshwright.capture.cut.liveness import Line
from meshwright.capture.trace.graph import Node, NodeKind, Ref, mapped, refs


def layer_kinds(line: Line, places: Sequence[int], model: nn.Module) -> list[str]:
    """Return a text for each layer; equal layers have equal texts."""
    free: dict[str, str] = {}
    learning = frozenset(name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad)
    return [_kind(line, first, last, free, learning) for first, last in pairwise(places)]


def _kind(line: Line, first: int, last: int, free: dict[str, str], learning: frozenset[str]) -> str:
    by_name = line.flat.by_name
    tokens = {name: f"in{k}:{by_name[name].size}" for k, name in enumerate(line.crossings[first])}
    states: dict[str, str] = {}

    def token(name: str) -> str:
        node = by_name[name]
        if name in tokens:
            return tokens[name]
        if node.kind is NodeKind.STATE:  # a parameter that is used twice is not the same as two parameters
            how = "learns" if node.target in learning else "fixed" if node.target in line.parameters else "buffer"
            return states.setdefault(node.target, f"state{len(states)}:{how}:{node.size}")
        return _free_token(line, node, free)

    lines = []
    for number, node in enumerate(line.work[first:last]):
        lines.append(f"{node.target}{_arguments(node, token)}{node.size}{node.several}{_body(node)}")
        tokens[node.name] = f"op{number}"
    ends = [ref.name for ref in refs(line.flat.result)] if last == len(line.work) else line.crossings[last]
    text = "\n".join((*lines, *map(token, ends), f"last={last == len(line.work)}", f"first={first == 0}"))
    return sha256(text.encode()).hexdigest()


def _free_token(line: Line, node: Node, known: dict[str, str]) -> str:
    """Describe a value that is computed from the batch alone, by all that it is computed from."""
    found: list[Node] = [node]
    while found:
        at = found[-1]
        missing = [line.flat.by_name[name] for name in line.needs[at.name] if name not in known]
        if missing:
            found += missing
            continue
        found.pop()
        if at.kind is NodeKind.CALL:
            text = f"{at.target}{_arguments(at, known.__getitem__)}{at.size}{_body(at)}"
            text += "".join(known[name] for name in line.needs[at.name])
            known[at.name] = sha256(text.encode()).hexdigest()
        else:
            name = at.target if at.kind is NodeKind.COLUMN else ""
            known[at.name] = f"{at.kind.value}:{name}:{at.size}:{at.constant}{_body(at)}"
    return known[node.name]


def _arguments(node: Node, token: Any) -> str:
    return repr(mapped((node.args, node.kwargs), lambda leaf: token(leaf.name) if isinstance(leaf, Ref) else leaf))


def _body(node: Node) -> str:
    return "" if node.body is None else node.body.digest
