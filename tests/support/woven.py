"""A pass over sharded layers in pieces, as real runs make it, on threads of one process."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from meshwright.capture.shard.sharded import ShardPlan, open_plan
from meshwright.capture.shard.woven_layer import WovenLayer
from meshwright.tensor.wires.wires import Wires
from tests.support.sharded import Pass, Reference


def woven_pass(ref: Reference, plan: ShardPlan, *, split: bool = False, chained: bool = True) -> Pass:
    """All layers as one chain, or one after another; with `split` weight gradients come after all others."""

    def work(model: nn.Module, wires: Wires) -> Tensor:
        layers = open_plan(model, plan, wires)
        rest: list[Any] = []
        for layer in layers:
            layer.train()
            layer.deferred_slot.rest = rest if split else None
        if chained:
            values = WovenLayer.chained(layers)((), ref.batch)
        else:
            values, again = (), dict[int, Any]()
            for layer in layers:
                values = layer(*values, made_again=again, **{name: ref.batch[name] for name in layer.batch_columns})
        values[0].backward()
        assert bool(rest) == split
        roles = {role: {p.weight for p in plan.settled.products if p.role == role} for role in ("expand", "contract", "table")}
        weights = (roles["expand"] | roles["contract"]) - roles["table"]
        early = [name for name, p in model.named_parameters() if name in weights and p.grad is not None]
        assert bool(early) != split, "weight gradients of products come in W, or in B"
        for job, targets in rest:
            assert not targets and not job()
        assert not wires.log.differences()
        return values[0].detach()

    return work
