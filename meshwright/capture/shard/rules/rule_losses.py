"""Losses over cut scores: sums over the classes of a row, then over the rows."""

from __future__ import annotations

import math

from meshwright.capture.shard.layouts.layout import Factor, Layout, axes_of, bare, local, whole
from meshwright.capture.shard.layouts.refusals import no_rule
from meshwright.capture.shard.layouts.steps import Local, Offset, StepKind
from meshwright.capture.shard.layouts.walk import ShardWalk
from meshwright.capture.shard.layouts.walk_task import Made
from meshwright.capture.shard.rules.rule_elements import broadcast, operand
from meshwright.capture.trace.graph import Node, Ref
from meshwright.tensor.moves import Move, MoveKind

NONE, MEAN, SUM = 0, 1, 2


def cross_entropy(walk: ShardWalk, node: Node) -> Made | None:
    """A vocabulary that is cut: the largest score, the sum of exponentials and the target's score come from all parts."""
    scores, target = (arg.name for arg in node.args[:2])
    rest = dict(zip(("weight", "reduction", "ignore_index", "label_smoothing"), node.args[2:], strict=False)) | dict(node.kwargs)
    layout, size = walk.layout(scores), walk.flat.by_name[target].size
    if not axes_of(bare(layout, walk.grid)):
        return None
    reduction, ignored = rest.get("reduction", MEAN), walk.plain(rest.get("ignore_index", -100))
    plain = rest.get("weight") is None and not rest.get("label_smoothing") and size is not None and not size.learns
    if not plain or reduction not in (MEAN, SUM) or len(layout) != 2 or len(layout[-1]) != 1:
        raise no_rule(node, "it is no plain cross entropy of rows of scores, summed or averaged")
    rows, classes = layout
    cut, over = axes_of(bare((classes,), walk.grid)), axes_of(bare((rows,), walk.grid))
    x, labels = walk.read(scores), walk.read(target, (rows,))
    first = Offset(classes[0].axes, local((classes[0],), walk.grid))
    one: Layout = (rows,)
    if classes[0].real is not None:
        x = Local(walk.step(StepKind.LOCAL, "known_scores", (x, first, classes[0].real), shape=None))
    largest = walk.step(StepKind.LOCAL, "largest", (x,), layout=one, learns=False)
    if cut:
        shape = (local(rows, walk.grid),)
        move = Move(MoveKind.MAXIMUM, walk.grid.wide(cut), shape, shape)
        largest = walk.step(StepKind.MOVE, "maximum", (Local(largest),), move=move, shape=shape, learns=False)
    pair: Layout = (rows, (Factor(2),))
    parts = walk.local("loss_parts", (x, Local(largest), labels, first, ignored), pair)
    summed = walk.moved(parts.step, pair, pair, parts=cut, path=node.path)
    two: Layout = whole((2,))
    sums = walk.local("loss_sum", (Local(summed), labels, ignored), two)
    total = walk.moved(sums.step, two, two, parts=over, path=node.path)
    return walk.local("loss_of", (Local(total), reduction == MEAN), ())


def element_loss(walk: ShardWalk, node: Node) -> Made | None:
    """A loss of every element, summed or averaged: mean squares, binary cross entropy."""
    names = [arg.name for arg in node.args[:2] if isinstance(arg, Ref)]
    if not any(axes_of(bare(walk.layout(name), walk.grid)) for name in names):
        return None
    place = 4 if "binary" in node.target else 2
    reduction = node.argument(place, "reduction", MEAN)
    shape = tuple(max(sizes) for sizes in zip(*(walk.shape(name) for name in names), strict=True))
    if reduction not in (MEAN, SUM) or len(names) != 2 or any(arg is not None for arg in node.args[2:place]) or node.kwargs:
        raise no_rule(node)
    layout = broadcast(walk, names, shape)
    if any(factor.real is not None for dim in layout for factor in dim):
        raise no_rule(node, "its scores are padded")
    given = [walk.read(name, operand(walk.shape(name), layout), axes_of(layout)) for name in names]
    args = (*given, None, None, NONE) if place == 4 else (*given, NONE, *walk.plain(node.args[place + 1 :]))
    each = walk.call(node.target, args, layout)
    total = walk.call("aten.sum.default", (Local(each.step),), ())
    step = walk.moved(total.step, (), (), parts=axes_of(layout), path=node.path)
    return Made(step, ()) if reduction == SUM else walk.call("aten.div.Tensor", (Local(step), float(math.prod(shape))), ())
