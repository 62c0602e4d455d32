"""Counts the memory of a rank of a grid: its parameter shards, and the tensors that a microbatch saves for the backward.

The layers of the rank run once on the meta device, with wires that send nothing, and the tensors that autograd saves are counted.
With `save="shards"` gathered values are dropped and gathered again, so their sources are counted instead. Attention is counted
as fused kernels save it: query, key, value, mask, result and one number per query.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from meshwright.capture.cut.dry_walk import states_like
from meshwright.capture.cut.stage_modules import States
from meshwright.capture.shard.emit import shard_layers
from meshwright.capture.shard.layouts.layout import local_shape
from meshwright.capture.shard.settle import Settled
from meshwright.capture.trace.graph import NodeKind
from meshwright.capture.trace.operations import function_of
from meshwright.costs.declared import CollectiveKind, SentWords
from meshwright.costs.scheme import Grid, Save
from meshwright.tensor.wires.lone_wires import DryWires
from meshwright.tensor.wires.wires import StartedCollective, TotalKind, done

_ATTENTION = function_of("aten.scaled_dot_product_attention.default")


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Elements and bytes of a rank's parameters, and of the tensors that one microbatch saves for the backward."""

    weight_words: int
    weight_bytes: int
    saved_words: int
    saved_bytes: int


def rank_memory(settled: Settled, model: nn.Module) -> RankMemory:
    """Counts the memory of the first rank of a settled model. Only names, shapes and dtypes of the model are read."""
    states = _local_states(settled, model)
    held = {id(p): p for p in states.parameters.values() if states.first[p] in settled.cuts}.values()
    try:
        saved = _saved(settled, states)
    except Exception:  # an operation that needs values cannot run on the meta device: every result is assumed to be saved
        steps = [step for program in settled.programs for step in program.steps if step.learns and step.shape is not None]
        words = sum(prod(step.shape or ()) for step in steps)
        size = max((p.element_size() for p in held), default=4)
        saved = words, words * size
    return RankMemory(sum(p.numel() for p in held), sum(p.numel() * p.element_size() for p in held), *saved)


class _Sources(DryWires):
    """Wires that send nothing and record the source of every gathered value."""

    def __init__(self, grid: Grid, rank: int) -> None:
        super().__init__(grid, rank)
        self.gathered: dict[int, tuple[Tensor, Tensor]] = {}

    def _carry(self, sent: SentWords, t: Tensor, dim: int, op: TotalKind) -> StartedCollective:
        result = self.stand_in(sent, t, dim)
        if sent.kind is CollectiveKind.GATHER:
            self.gathered[_key(result)] = result, t
        return done(result)

    def source(self, t: Tensor) -> Tensor:
        """Returns the source of a gathered value, or the value itself."""
        while _key(t) in self.gathered:
            t = self.gathered[_key(t)][1]
        return t


def _key(t: Tensor) -> int:
    return id(t.untyped_storage())


class _Attention(Function):
    """Attention that computes nothing and saves the tensors that a fused kernel saves."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Returns an empty result, with positions before heads in memory, as the kernels return it."""
        shape = (*query.shape[:-1], value.shape[-1])
        result = query.new_empty((shape[0], shape[2], shape[1], *shape[3:])).transpose(1, 2) if len(shape) == 4 else None
        result = query.new_empty(shape) if result is None else result
        if mask is not None and mask.dtype is torch.bool:  # kernels add it to scores
            mask = query.new_empty(mask.shape)
        ctx.save_for_backward(query, key, value, mask, result, query.new_empty(query.shape[:-1]))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Never called: only a forward is run."""
        raise NotImplementedError


class _FusedAttention(TorchFunctionMode):
    """Replaces attention by `_Attention`. The meta device would decompose it and save its probabilities."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function, or the replacement of attention."""
        if function is _ATTENTION:
            mask = args[3] if len(args) > 3 else (kwargs or {}).get("attn_mask")
            return _Attention.apply(*args[:3], mask)  # type: ignore[no-untyped-call]
        return function(*args, **(kwargs or {}))


def _saved(settled: Settled, states: States) -> tuple[int, int]:
    meta, wires = torch.device("meta"), _Sources(settled.grid, 0)
    nodes = [node for node in settled.line.flat.nodes if node.kind is NodeKind.COLUMN and node.size is not None]
    columns = {
        node.target: torch.empty(settled.sizes.shapes[node.name], dtype=getattr(torch, node.size.dtype), device=meta)
        for node in nodes
        if node.size is not None
    }
    found: dict[int, Tensor] = {}

    def keep(t: Tensor) -> Tensor:
        kept = wires.source(t) if settled.scheme.save is Save.SHARDS else t
        found.setdefault(_key(kept), kept.detach())  # detached, so that the graph can be freed
        return t

    values: tuple[Tensor, ...] = ()
    again: dict[int, object] = {}
    with _FusedAttention(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        for layer in shard_layers(settled, states, wires, meta):
            layer.train()
            values = layer(*values, made_again=again, **{name: columns[name] for name in layer.batch_columns})
    own = {_key(parameter) for parameter in states.parameters.values()}
    sizes = [(t.untyped_storage().nbytes(), t.element_size()) for key, t in found.items() if key not in own]
    return sum(size // each for size, each in sizes), sum(size for size, _ in sizes)


def _local_states(settled: Settled, model: nn.Module) -> States:
    """Returns the parameter shards of a rank, without data."""

    def shard(name: str, whole: Tensor) -> Tensor:
        cut = settled.cuts.get(name)
        if cut is None:
            return whole.detach().to("meta")
        return torch.empty(local_shape(cut.layout, settled.grid), dtype=whole.dtype, device="meta")

    return states_like(model, shard)
