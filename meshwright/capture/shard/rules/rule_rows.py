"""Operations that work on each row separately: rows stay cut, all other dimensions are whole.

Their parameters are whole on every rank. Over the axes that cut rows, a gradient is a partial sum until gradients are reduced.
"""

from __future__ import annotations

from typing import Any

from meshwright.capture.shard.layouts.layout import Layout, axes_of, whole
from meshwright.capture.shard.layouts.refusals import no_rule
from meshwright.capture.shard.layouts.walk import ShardWalk
from meshwright.capture.shard.layouts.walk_task import Made
from meshwright.capture.trace.graph import Node, Ref, mapped

_NAMES = (
    *(
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "convolution",
        "group_norm",
        "pixel_shuffle",
        "pixel_unshuffle",
    ),
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "channel_shuffle", "im2col", "col2im"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d", "grid_sampler", "prelu"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_bicubic2d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
BY_ROWS = tuple(f"aten.{name}" for name in _NAMES)


def by_rows(walk: ShardWalk, node: Node) -> Made | None:
    """Rows as they are cut, everything else whole."""
    source, sizes = node.args[0].name, walk.sizes
    if sizes.grows.get(source) != 0 or sizes.grows.get(node.name) != 0 or node.writes or node.random:
        return None
    rows = walk.layout(source)[0]
    if walk.shape(node.name)[0] != walk.shape(source)[0]:
        return None
    work = axes_of((rows,))
    names = walk.tensors((node.args, node.kwargs))
    if any(name != source and name in sizes.grows for name in names):
        raise no_rule(node, "two of its arguments have rows")
    for name in filter(walk.is_parameter, names):
        walk.found.replicated.setdefault(walk.parameter(name), node.target)
    layouts: dict[str, Layout] = {name: whole(walk.shape(name)) for name in names}
    layouts[source] = (rows, *whole(walk.shape(source)[1:]))
    given = {name: walk.read(name, layouts[name], work) for name in names}

    def leaf(x: Any) -> Any:
        return (given[x.name] if x.name in given else sizes.numbers[x.name]) if isinstance(x, Ref) else x

    result: Layout = (rows, *whole(walk.shape(node.name)[1:]))
    return walk.call(node.target, mapped(node.args, leaf), result, mapped(dict(node.kwargs), leaf))
