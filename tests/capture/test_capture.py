"""Capture in one process: captured layers compute what the model computes, in both modes and at any size; what crosses, ties."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright
from meshwright import MeshwrightError, ModelGraph
from meshwright.capture.trace.export import flatten
from meshwright.capture.trace.graph import Flat
from meshwright.runtime.stage.layers import columns_of
from meshwright.train.setup.captured_layers import Uncut, through
from tests.support import captured_models as c
from tests.support.layers_of_models import layers_for

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
Build = Callable[[], nn.Module]
Data = Callable[[int], Any]

FAMILIES: dict[str, tuple[Build, Data]] = {
    "gpt2": (partial(c.gpt2, resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1), c.text),
    "gpt2 eager": (partial(c.gpt2, attn_implementation="eager"), c.text),
    "llama": (c.llama, c.text),
    "bert": (partial(c.bert, hidden_dropout_prob=0.1), c.text),
    "t5": (c.t5, c.pairs),
    "vit": (c.vit, c.pictures),
    "long skip": (c.LongSkip, c.tokens),
    "neox": (partial(c.family, "GPTNeoX"), c.text),
    "opt": (partial(c.family, "OPT", ffn_dim=32, word_embed_proj_dim=16, dropout=0.1), c.text),
    "bloom": (partial(c.family, "Bloom", n_layer=4, n_head=4), c.text),
    "qwen3": (partial(c.family, "Qwen3", head_dim=8, tie_word_embeddings=True), c.text),
}
DECODERS = ("gpt2", "gpt2 eager", "llama", "neox", "opt", "bloom", "qwen3")
SLOW = ("gpt2 eager", "neox", "qwen3")


def names(*wanted: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in wanted or FAMILIES]


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[name][0]().double()


@cache
def flat(name: str) -> Flat:
    return flatten(model(name), FAMILIES[name][1](0))


@cache
def graph(name: str) -> ModelGraph:
    from meshwright.capture.model_graph import capture

    return capture(model(name), None, flat=flat(name))


def gradients(output: Tensor, built: nn.Module) -> dict[str, Tensor]:
    built.zero_grad(set_to_none=True)
    output.sum().backward()
    return {name: p.grad.clone() for name, p in built.named_parameters() if p.grad is not None}


def compared(name: str, batch: Any) -> None:
    """Loss and every gradient in evaluation, where nothing is drawn."""
    built = model(name).eval()
    layers = layers_for(built, batch, 2, flat=flat(name))
    columns = batch if isinstance(batch, dict) else dict(zip(flat(name).columns, batch, strict=True))
    found = through(layers, columns)
    expected = Uncut.of(built, batch)({}, columns)
    torch.testing.assert_close(found[0], expected, rtol=1e-12, atol=0)
    mine, theirs = gradients(found[0], built), gradients(expected, built)
    assert mine.keys() == theirs.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(mine[key], tensor, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("name", names())
def test_captured_layers_are_the_model(name: str) -> None:
    compared(name, FAMILIES[name][1](3))


@pytest.mark.parametrize(("rows", "length"), [(1, 10), (5, 10), (3, 17), (2, 2)])
def test_any_number_of_rows_and_any_length(rows: int, length: int) -> None:
    compared("gpt2", c.text(7, rows=rows, length=length))
    compared("llama", c.text(7, rows=rows, length=length))


def test_parameters_and_buffers_are_the_models_own() -> None:
    built = model("t5")
    layers = layers_for(built, None, 3, flat=flat("t5"))
    own = {id(p): name for name, p in built.named_parameters()}
    assert {name: own[id(p)] for p, name in layers.names.items()} == {name: name for name in layers.names.values()}
    assert len(layers.names) == len(own)
    assert layers.ties == ((0, 1, 2),), "the embedding is read by encoder, decoder and head"


def test_training_draws_and_evaluation_does_not() -> None:
    built, batch = model("gpt2"), c.text(0)
    layers = layers_for(built, batch, 2, flat=flat("gpt2"))

    def run() -> Tensor:
        return through(layers, batch)[0].detach()

    assert not torch.equal(run(), run())
    for layer in layers.modules:
        layer.eval()
    assert torch.equal(run(), run())


@pytest.mark.parametrize("name", names(*DECODERS))
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_one_hidden_state_crosses_in_decoders(name: str, stages: int) -> None:
    for part in graph(name).cuts(stages).parts[:-1]:
        assert [value.shape for value in part.boundary] == [(c.ROWS, c.LENGTH, 16)]


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_are_balanced(name: str, stages: int) -> None:
    found = graph(name)
    costs = [layer.flops for layer in found.layers]
    best = min(
        max(sum(costs[a:b]) for a, b in pairwise((0, *inner, len(costs))))
        for inner in combinations(range(1, len(costs)), stages - 1)
    )
    assert found.cuts(stages).heaviest <= 1.1 * best


def test_a_long_skip_is_carried_and_charged() -> None:
    cuts = graph("long skip").cuts(2)
    (boundary, _) = cuts.parts
    assert len(boundary.boundary) == 2
    assert "carrying 1 skip over it" in boundary.why
    assert [value.since for value in boundary.boundary if value.since < boundary.last - 1] == [0]


def test_no_cut_inside_attention_or_a_feed_forward_part() -> None:
    found = graph("gpt2")
    assert [layer.name for layer in found.layers[:4]] == [
        "transformer.wte",
        "transformer.h.0.attn",
        "transformer.h.0.mlp",
        "transformer.h.1.attn",
    ]
    assert found.layers[-1].name == "lm_head"
    assert found.layers[-1].flops > 0.9 * 2 * c.ROWS * c.LENGTH * 16 * c.VOCABULARY


def test_masks_and_labels_are_columns_where_they_are_read() -> None:
    layers = layers_for(model("gpt2"), None, 4, flat=flat("gpt2"))
    columns = [{name for layer in layers.of_stage(stage) for name in columns_of(layer)} for stage in (0, 3)]
    assert columns[1] == {"input_ids", "attention_mask", "labels"}
    assert "labels" not in columns[0]


def test_labels_are_counted_behind_the_shift() -> None:
    batch = c.text(2)
    layers = layers_for(model("gpt2"), None, 2, flat=flat("gpt2"))
    assert layers.weigh is not None
    assert layers.weigh(batch) == float((batch["labels"][:, 1:] != -100).sum())
    whole = layers_for(model("t5"), None, 2, flat=flat("t5"))
    assert whole.weigh is not None
    assert whole.weigh(c.pairs(2)) == float((c.pairs(2)["labels"] != -100).sum())


def test_a_decoy_of_the_same_shape_is_no_tie() -> None:
    found = meshwright.capture(c.LongSkip(decoy=True), c.tokens(0))
    assert [tie.name for tie in found.ties] == ["first.weight"]


def test_meta_gives_the_same_layers() -> None:
    with torch.device("meta"):
        built = c.gpt2()
    batch = {name: t.to("meta") for name, t in c.text(0).items()}
    assert meshwright.capture(built, batch) == meshwright.capture(c.gpt2(), c.text(0))


def test_a_split_backward_finds_every_product_and_lookup() -> None:
    """Weight gradients of a captured model wait for their W as those of its modules would."""
    from meshwright.runtime.stage.split_backward import Deferred, run

    built, batch = model("gpt2 eager"), c.text(0)
    layers = layers_for(built, batch, 2, flat=flat("gpt2 eager"))
    expected = gradients(through(layers, batch)[0], built)
    built.zero_grad(set_to_none=True)
    deferred = Deferred(nn.ModuleList(layers.modules))
    loss = through(layers, batch)[0]
    deferred.begin()
    loss.backward()
    rest = deferred.end()
    assert {name for name, p in built.named_parameters() if p.grad is not None} == {n for n in expected if "ln_" in n}
    run(rest)
    for name, p in built.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-12, atol=1e-15)


def test_a_model_that_writes_into_its_batch_leaves_the_batch_alone() -> None:
    torch.manual_seed(0)
    built, batch = c.ChangesItsBatch().double(), c.tokens(0)
    layers = layers_for(built, batch, 3)
    columns = dict(zip(("tokens", "labels"), c.tokens(4), strict=True))
    before = {name: t.clone() for name, t in columns.items()}
    found = through(layers, columns)[0]
    weight = layers.weigh(columns) if layers.weigh else None
    assert all(torch.equal(columns[name], t) for name, t in before.items())
    changed = {name: t.clone() for name, t in columns.items()}
    torch.testing.assert_close(found, built(**changed), rtol=1e-12, atol=0)
    assert weight == float((changed["labels"] != -100).sum())


def test_norms_count_what_they_see_once_and_only_while_they_train() -> None:
    from meshwright.runtime.stage.moving_buffers import Moving

    torch.manual_seed(0)
    built, twin = c.Pictures().double(), c.Pictures().double()
    twin.load_state_dict(built.state_dict())
    batch = c.pictures(0)
    layers = layers_for(built, batch, 2)
    for name in ("train", "eval"):
        for part in (*layers.modules, twin):
            getattr(part, name)()
        torch.testing.assert_close(through(layers, batch)[0], twin(**batch)["loss"], rtol=1e-12, atol=0)
        moving = Moving(layers.modules)
        with moving.as_before(moving.copied()):
            through(layers, batch)
        for (key, mine), theirs in zip(built.named_buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs, msg=key)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x


class NeedsTwo(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask


class NeedsOne(nn.Module):
    """As libraries write it: everything has a default, and is needed all the same."""

    def forward(self, ids: Tensor | None = None, pixels: Tensor | None = None) -> Tensor:
        return pixels.square()  # type: ignore[union-attr]


X = torch.ones(4, 4)


@pytest.mark.parametrize(
    ("build", "batch", "what"),
    [
        (Branches, (X,), r"cannot be captured(.|\n)*test_capture.py:\d+, in forward: return self.layer"),
        (NeedsTwo, {"x": X}, "no column 'mask', which the model needs; it has 'x'"),
        (NeedsTwo, {"x": X, "mask": X, "more": X}, "does not take the column 'more'"),
        (NeedsTwo, (X,), "1 tensors, but the model needs 2: x, mask"),
        (NeedsTwo, {"x": X, "mask": [1]}, "the batch has list at 'mask'"),
        (NeedsOne, {"ids": X}, "model needs a column that the batch lacks .*; the batch has 'ids'"),
    ],
)
def test_what_cannot_be_captured_says_why(build: Build, batch: Any, what: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MeshwrightError, match=what):
        flatten(build(), batch)
    assert capfd.readouterr() == ("", "")
