"""Saved bytes of layers: what a dry walk predicts against what autograd keeps when the user's own model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.capture.cut.cut_points import LayerChain
from meshwright.capture.cut.dry_walk import DryLayer, TensorSize, WalkOptions, dry_walk
from meshwright.capture.cut.equal_layers import layer_kinds
from meshwright.capture.cut.liveness import Line
from meshwright.capture.cut.stage_modules import States, layer
from meshwright.capture.model_graph import capture, line_of
from meshwright.capture.trace.export import flatten
from meshwright.ir.model import ModelGraph
from tests.support.tiny_models import library

hf = library()

WIDTHS = {"num_hidden_layers": 3, "hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 4}


def gpt2() -> nn.Module:
    sizes = {"n_embd": 192, "n_layer": 3, "n_head": 4, "vocab_size": 100, "n_positions": 512}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**WIDTHS, num_key_value_heads=2, vocab_size=100, max_position_embeddings=512))


def bert() -> nn.Module:
    sizes = {**WIDTHS, "vocab_size": 100, "max_position_embeddings": 512}
    return hf.BertForMaskedLM(hf.BertConfig(**sizes, attention_probs_dropout_prob=0.0))


def t5() -> nn.Module:
    sizes = {"d_model": 192, "d_kv": 48, "d_ff": 768, "num_layers": 3, "num_heads": 4, "vocab_size": 100}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0))


def vit(size: int) -> nn.Module:
    sizes = {**WIDTHS, "image_size": size, "patch_size": 8, "num_labels": 10}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, hidden_dropout_prob=0.1))


def text(length: int, *, mask: bool) -> dict[str, Tensor]:
    """Two rows. With a mask, one of them is padded: only then does a model of transformers make its mask as a trace does."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 100, (2, length), generator=random)
    kept = torch.ones_like(ids)
    kept[0, -3:] = 0
    return {"input_ids": ids, **({"attention_mask": kept} if mask else {}), "labels": ids.clone()}


def pictures(size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([1, 2])}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]], str]] = {
    f"{name}-{length}": (build, lambda length=length, mask=mask: text(length, mask=mask), block)  # type: ignore[misc]
    for name, build, mask, block in (
        ("gpt2", gpt2, True, "transformer.h.1"),
        ("llama", llama, True, "model.layers.1"),
        ("bert", bert, True, "bert.encoder.layer.1"),
        ("t5", t5, False, "decoder.block.1"),
    )
    for length in (48, 160)
} | {
    f"vit-{size}": (lambda size=size: vit(size), lambda size=size: pictures(size), "")  # type: ignore[misc]
    for size in (32, 64)
}
"""Models, batches, and a block in the middle: layers at the ends also have the norms and dropouts beside the blocks."""
FAST = ("gpt2-48", "vit-32")


@contextmanager
def saving(model: nn.Module, into: dict[int, UntypedStorage]) -> Iterator[None]:
    """Notes every storage that autograd saves, without parameters."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            into[storage.data_ptr()] = storage  # a reference, so that the address is not used again
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield


def size_of(storages: dict[int, UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages.values())


def kept_by(model: nn.Module, batch: dict[str, Tensor], name: str) -> tuple[int, int]:
    """What autograd keeps of the whole model, and of one block."""
    every: dict[int, UntypedStorage] = {}
    of_block: dict[int, UntypedStorage] = {}
    inside = saving(model, of_block)
    block = model.get_submodule(name)

    def end(*_: Any) -> None:
        inside.__exit__(None, None, None)

    handles = [block.register_forward_pre_hook(lambda *_: inside.__enter__()), block.register_forward_hook(end)]
    with saving(model, every):  # the innermost hooks are the ones that are called, so what they note is added
        output = model(**batch)
    for handle in handles:
        handle.remove()
    assert output.loss is not None
    return size_of(every | of_block), size_of(of_block)


def walked(model: nn.Module, batch: dict[str, Tensor], options: WalkOptions | None = None) -> tuple[ModelGraph, list[DryLayer]]:
    flat = flatten(model, batch)
    line = line_of(model, flat)
    return capture(model, batch, flat=flat), dry_walk(line, LayerChain(line).starts, model, options)


def middle_block(model: nn.Module) -> str:
    """Where this release of transformers has the middle block."""
    return next(f"{name}.1" for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == 3)


@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES])
def test_saved_bytes_are_those_of_the_users_own_model(case: str) -> None:
    """Within 3 % for each block and for the model, attention included. Storages count once, parameters do not count."""
    build, batch, block = CASES[case]
    model = build()
    model.config.use_cache = False  # training needs no copies of keys and values for generation
    block = block or middle_block(model)
    whole, one = kept_by(model, batch(), block)
    graph, layers = walked(model, batch())
    assert [layer.saved_bytes for layer in graph.layers] == [layer.saved for layer in layers]
    assert sum(layer.saved for layer in layers) == pytest.approx(whole, rel=0.03)
    mine = [layer.saved_bytes for layer in graph.layers if f"{layer.name}.".startswith(f"{block}.")]
    assert mine and sum(mine) == pytest.approx(one, rel=0.03)


class Attention(nn.Module):
    """A block with fused attention and a feed-forward part."""

    def __init__(self, width: int = 32, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.inner(self.norm(x)).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.drop(self.outer(mixed.transpose(1, 2).reshape(rows, length, width)))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class Blocks(nn.Module):
    """Equal blocks and a loss."""

    def __init__(self, blocks: int = 3, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(dropout=dropout) for _ in range(blocks))
        self.last = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x).mean()


@cache
def captured(blocks: int = 3, *, dropout: float = 0.0, length: int = 16) -> tuple[nn.Module, Line]:
    with torch.device("meta"):
        model = Blocks(blocks, dropout=dropout)
    return model, line_of(model, flatten(model, {"x": torch.zeros(2, length, 32)}))


def of_blocks(options: WalkOptions | None = None, **more: Any) -> list[DryLayer]:
    model, line = captured(**more)
    return dry_walk(line, LayerChain(line).starts, model, options)


def test_attention_keeps_no_scores() -> None:
    """At length 4096: the input of the norm, its mean and deviation, its result, q k v, the result, one sum per head."""
    layer = of_blocks(length=4096, blocks=1)[0]
    rows, length, width, heads = 2, 4096, 32, 4
    assert layer.saved == 4 * rows * length * (width + 2 + width + 3 * width + width + heads)


def test_a_gpu_keeps_no_scores_under_dropout_and_one_byte_per_element_of_a_dropout() -> None:
    rows, length, width = 2, 16, 32
    gpu = WalkOptions(gpu=True)
    plain, dropped = ([sum(one.saved for one in of_blocks(how, dropout=rate)) for how in (gpu, None)] for rate in (0.0, 0.1))
    assert plain[0] == plain[1], "fused attention keeps the same on both"
    assert [a - b for a, b in zip(dropped, plain, strict=True)] == [3 * rows * length * width, 4 * 3 * rows * length * width]


@pytest.mark.parametrize("mixed", [None, torch.bfloat16])
def test_a_dry_walk_counts_what_a_real_run_of_the_layers_keeps(mixed: torch.dtype | None) -> None:
    """To the byte, in mixed precision too, with its copies of weights."""
    torch.manual_seed(0)
    blank, line = captured(dropout=0.1)
    model, batch = Blocks(dropout=0.1), {"x": torch.randn(2, 16, 32)}
    places, states = LayerChain(line).starts, States(model)
    values: tuple[Tensor, ...] = ()
    before: dict[int, UntypedStorage] = {}
    found = dry_walk(line, places, blank, WalkOptions(mixed=mixed))
    assert len(found) == len(places) - 1 > 3
    for (first, last), dry in zip(pairwise(places), found, strict=True):
        storages: dict[int, UntypedStorage] = {}
        module = layer(line, first, last, states)
        with saving(model, storages), torch.autocast("cpu", torch.bfloat16, enabled=mixed is not None):
            values = module(*values, **{name: batch[name] for name in module.batch_columns})
        assert dry.outputs == tuple(TensorSize(tuple(t.shape), t.dtype) for t in values)
        assert dry.saved == size_of({key: storages[key] for key in storages.keys() - before.keys()})
        values, before = tuple(t.detach().requires_grad_() for t in values), storages


def test_saved_and_transient_bytes_grow_linearly_with_rows() -> None:
    two, four, eight = (of_blocks(WalkOptions(rows=rows, transients=True, mixed=torch.bfloat16)) for rows in (2, 4, 8))
    for a, b, c in zip(two, four, eight, strict=True):
        assert c.saved - b.saved == 2 * (b.saved - a.saved) >= 0
        assert c.transient >= b.transient >= a.transient > 0
    assert sum(a.saved for a in two) > sum(c.saved for c in eight) / 4, "copies of weights do not grow with rows"


def test_equal_layers_are_recognised_and_others_are_not() -> None:
    model, line = captured(4)
    places = LayerChain(line).starts
    kinds = layer_kinds(line, places, model)
    assert len(kinds) == 10, "the first block has one cut more: nothing but the batch passes over its attention"
    assert kinds[2] == kinds[4] == kinds[6] and kinds[3] == kinds[5] == kinds[7] and len(set(kinds)) < 7
    frozen = Blocks(4)
    frozen.blocks[2].up.weight.requires_grad_(False)
    other = layer_kinds(line, places, frozen)
    assert [k for k in range(10) if other[k] != kinds[k]] == [6], "a weight that does not learn costs no gradient"


def test_the_transients_of_products_are_gradients() -> None:
    """A closed form: the backward of one product holds both gradients and that of the weight."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64, bias=False), nn.Linear(64, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x)).sum()

    model = One()
    line = line_of(model, flatten(model, {"x": torch.zeros(4, 64)}))
    options = [WalkOptions(rows=rows, transients=True) for rows in (8, 32)]
    first, last = zip(*(dry_walk(line, LayerChain(line).starts, model, each) for each in options), strict=True)
    assert (first[1].transient - first[0].transient) / 24 == 4 * 64, "its output gradient; the batch has none"
    assert (last[1].transient - last[0].transient) / 24 == 4 * 64, "its input gradient; that of a sum is one number"
    assert first[0].transient == 4 * 64 * (8 + 64), "the gradient of its weight does not grow with rows"
