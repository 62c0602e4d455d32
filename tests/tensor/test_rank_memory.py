"""What a rank holds, counted without data, equals what a run with data keeps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.capture.shard.rank_memory import rank_memory
from meshwright.capture.shard.sharded import ShardPlan, open_plan
from meshwright.costs.scheme import Save
from meshwright.tensor.wires.lone_wires import DryWires
from tests.support.sharded import Reference, Request, box, cut_parameters, family, grid, line, plan_of


def kept_bytes(ref: Reference, plan: ShardPlan) -> tuple[int, int]:
    """Bytes of the parameters, and of what is alive for backward after a forward pass of the first rank on real tensors."""
    model, found = copy.deepcopy(ref.model), plan.settled
    cut_parameters(dict(model.named_parameters()), found.cuts, found.grid, 0)
    [layer] = open_plan(model, plan, DryWires(found.grid, 0))
    tensors: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        tensors[t.untyped_storage()._cdata] = t.detach()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss, *_ = layer(**{name: ref.batch[name] for name in layer.batch_columns})
    run: Any = loss.grad_fn
    while not hasattr(run, "call"):
        run = run.next_functions[0][0]
    for half in run.call[0].halves:  # what gathered values are made from again
        for trail in half.trails.values():
            tensors |= {source.untyped_storage()._cdata: source for _, _, source in trail.dropped}
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved = sum(t.untyped_storage().nbytes() for key, t in tensors.items() if key not in own)
    return sum(p.numel() * p.element_size() for p in model.parameters()), saved


@pytest.mark.parametrize("save", Save)
@pytest.mark.parametrize("asked", [line(2), line(2, sequence=True), box(2, 2, 1), box(1, 2, 2), grid(2)], ids=str)
def test_counted_without_data_is_kept_with_data(asked: Request, save: Save) -> None:
    ref = family("llama")
    plan = plan_of(ref, asked, save=save)
    memory = rank_memory(plan.settled, ref.model)
    assert (memory.weight_bytes, memory.saved_bytes) == kept_bytes(ref, plan)
