"""Products by letters: a letter of the result that cuts an operand cuts all of them, a letter that is summed over is whole."""

from __future__ import annotations

from meshwright.capture.shard.layouts.layout import Dim, Layout, axes_of, bare, length, whole
from meshwright.capture.shard.layouts.walk import ShardWalk
from meshwright.capture.shard.layouts.walk_task import Made
from meshwright.capture.trace.graph import Node


def einsum(walk: ShardWalk, node: Node) -> Made | None:
    """Every letter has one layout; parameters have only letters that activations cut, and are whole otherwise."""
    text, names = str(node.args[0]).replace(" ", ""), [ref.name for ref in node.args[1]]
    if (
        "." in text
        or "->" not in text
        or len(node.args) > 2
        or any(len(set(t)) != len(t) for t in text.split("->")[0].split(","))
    ):
        return None
    terms, result = text.split("->")[0].split(","), text.split("->")[1]
    dims, taken = dict[str, Dim](), set[str]()
    for term, name in sorted(zip(terms, names, strict=True), key=lambda pair: -_cut(walk, pair[1])):
        for letter, dim in zip(term, walk.layout(name), strict=True):
            mine = axes_of(bare((dim,), walk.grid))
            known = letter in dims and axes_of((dims[letter],))
            padding = any(factor.real is not None for factor in dim)
            if letter in result and mine and not mine & taken and not known and not padding:
                dims[letter] = dim
                taken |= mine
            elif length(dim) > length(dims.get(letter, whole((0,))[0])):
                dims[letter] = whole((length(dim),))[0]
    layout: Layout = tuple(dims[letter] for letter in result)
    work = axes_of(layout)
    given = []
    for term, name in zip(terms, names, strict=True):
        shape = walk.shape(name)
        want = tuple(dims[letter] if length(dims[letter]) == n else whole((n,))[0] for letter, n in zip(term, shape, strict=True))
        if walk.is_parameter(name):
            walk.found.replicated.setdefault(walk.parameter(name), node.target)
        given.append(walk.read(name, want, work))
    return walk.call(node.target, (node.args[0], given), layout)


def _cut(walk: ShardWalk, name: str) -> int:
    return len(axes_of(bare(walk.layout(name), walk.grid)))
