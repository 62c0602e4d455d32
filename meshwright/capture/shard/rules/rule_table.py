"""The rule of every operation, by name: how it runs on shards, and how a light value is made in a given layout."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.capture.shard.layouts.walk_task import Push, Rule
from meshwright.capture.shard.rules import (
    rule_along,
    rule_attention,
    rule_einsum,
    rule_elements,
    rule_losses,
    rule_norms,
    rule_products,
    rule_rows,
    rule_tables,
    rule_views,
)

_RESHAPES = (
    *("aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten"),
    *("aten.squeeze", "aten.unsqueeze", "aten.view_as", "aten.reshape_as"),
)
_PERMUTES = ("aten.permute", "aten.transpose", "aten.t", "aten.numpy_T", "aten.T", "aten.mT", "aten.swapaxes")


def _table(*rows: tuple[tuple[str, ...], Rule]) -> dict[str, Rule]:
    return {name: rule for names, rule in rows for name in names}


RULES: Mapping[str, Rule] = _table(
    (rule_elements.ELEMENTS, rule_elements.element),
    (("aten.copy",), rule_elements.copied),
    (("aten.dropout",), rule_elements.dropout),
    (_RESHAPES, rule_views.reshape),
    (_PERMUTES, rule_views.permute),
    (("aten.expand", "aten.expand_as"), rule_views.expand),
    (("aten.slice", "aten.narrow"), rule_views.slices),
    (("aten.select",), rule_views.select),
    (("aten.split", "aten.chunk", "aten.split_with_sizes", "aten.unbind"), rule_views.split),
    (("operator.getitem",), rule_views.getitem),
    (("aten.cat",), rule_views.cat),
    (("aten.stack",), rule_views.stack),
    (("aten.repeat_interleave",), rule_views.repeat_interleave),
    (("aten.linear", "aten.addmm", "aten.mm"), rule_products.product),
    (("aten.matmul", "aten.bmm", "aten.baddbmm"), rule_attention.matmul),
    (("aten.embedding",), rule_tables.lookup),
    (("aten.conv1d", "aten.conv2d", "aten.conv3d"), rule_tables.convolution),
    (("aten.layer_norm", "aten.rms_norm"), rule_norms.norm),
    (("aten.mean", "aten.sum"), rule_norms.reduction),
    (rule_along.ALONG, rule_along.along),
    (rule_rows.BY_ROWS, rule_rows.by_rows),
    (("aten.einsum",), rule_einsum.einsum),
    (rule_elements.SHAPE_ONLY, rule_elements.shape_only),
    (("aten.scaled_dot_product_attention",), rule_attention.attention),
    (("aten.cross_entropy_loss",), rule_losses.cross_entropy),
    (("aten.mse_loss", "aten.l1_loss", "aten.smooth_l1_loss", "aten.binary_cross_entropy_with_logits"), rule_losses.element_loss),
)

PUSHES: Mapping[str, Push] = {
    **dict.fromkeys(rule_elements.ELEMENTS, rule_elements.push_element),
    **dict.fromkeys(_RESHAPES, rule_views.push_reshape),
    **dict.fromkeys(_PERMUTES, rule_views.push_permute),
    **dict.fromkeys(("aten.expand", "aten.expand_as"), rule_views.push_expand),
    **dict.fromkeys(("aten.slice", "aten.narrow"), rule_views.push_slices),
    "aten.embedding": rule_tables.push_lookup,
}

WHOLE = frozenset(
    f"aten.{name}"
    for name in (
        *("batch_norm", "instance_norm", "group_norm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"),
        *("prelu", "lstm", "gru", "rnn_tanh", "rnn_relu", "_grouped_mm", "bmm", "baddbmm", "index", "index_select", "gather"),
        *("embedding_bag", "einsum", "bilinear", "masked_fill", "cat", "matmul"),
    )
)
"""Operations that read whole parameters on every rank where no rule cuts them: norms over the batch, recurrences, experts."""
