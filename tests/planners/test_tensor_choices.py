"""Tensor modes of a search: every mode and box is priced, and the plain line keeps what lies between layers whole."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

np = pytest.importorskip("numpy")

import meshwright as mw  # noqa: E402
from meshwright import LayerCost, MatrixProduct, Parallel, Profile  # noqa: E402
from meshwright.capture.shard.captured_rows import captured_rows  # noqa: E402
from meshwright.costs.modes import mode  # noqa: E402
from meshwright.costs.scheme import Save  # noqa: E402
from meshwright.planners._search.tensor_costs import tensor_choices, tensor_saved, tensor_seconds  # noqa: E402
from meshwright.train.profiling.profile_model import flatten_for_costs  # noqa: E402
from tests.support import captured_models as small  # noqa: E402

HIDDEN, TOKENS = 64, 32
TEXT = partial(small.text, rows=8, length=16)
WIDE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8}
BLOCK = LayerCost(
    "block", (1.0,), (1.0,), (1.0,), output_bytes=4.0 * HIDDEN * TOKENS, saved_bytes=80.0 * HIDDEN * TOKENS,
    parameter_bytes=48.0 * HIDDEN**2, flops=1e9,
)  # fmt: skip
TABLE = LayerCost("table", (0.0,), (0.0,), (0.0,), output_bytes=4.0 * HIDDEN * TOKENS, saved_bytes=8.0 * TOKENS)
PROFILE = Profile((TABLE, BLOCK), rows=(1,), tokens_per_row=TOKENS)


@pytest.mark.parametrize(("tp", "boxes"), [(2, 3), (4, 6), (8, 10)])
def test_every_box_is_tried(tp: int, boxes: int) -> None:
    found = tensor_choices(PROFILE, tp)
    assert len({choice.asked.box for choice in found if choice.tensor == "box"}) == boxes
    assert len({choice.name for choice in found}) == len(found), "names tell them apart"
    for choice in found:
        assert Parallel.of(choice.keywords()).tp == tp


def test_the_cheapest_box_follows_from_the_rows() -> None:
    """Few rows favour modes that move activations, many rows those that move weights."""

    def cheapest(rows: int) -> tuple[int, ...]:
        found = min(
            (choice for choice in tensor_choices(PROFILE, 8) if choice.tensor == "box"),
            key=lambda choice: sum(float(part.sum()) for part in tensor_seconds(PROFILE, choice, rows, 0.0, 1e9)),
        )
        assert found.asked.box is not None
        return found.asked.box

    assert cheapest(1)[0] == 1 and cheapest(512) == (8, 1, 1)


def test_only_the_plain_line_keeps_whole_tensors() -> None:
    saved, output = (np.array([getattr(layer, name) for layer in PROFILE.layers]) for name in ("saved_bytes", "output_bytes"))
    kept = {choice.name: tensor_saved(PROFILE, choice, saved, output) for choice in tensor_choices(PROFILE, 4)}
    assert kept["line sequence"].tolist() == (saved / 4).tolist()
    assert kept["line"].tolist() == [saved[0] / 4, 4 * output[1] + (saved[1] - 4 * output[1]) / 4]


FAMILIES = {
    "gpt2": (partial(small.gpt2, n_embd=32, n_head=8), TEXT),
    "llama": (partial(small.llama, **WIDE, num_key_value_heads=4), TEXT),
    "bert": (partial(small.bert, **WIDE), TEXT),
    "t5": (partial(small.t5, d_model=32, d_kv=4, num_heads=8, d_ff=64), small.pairs),
    "vit": (partial(small.vit, **WIDE), small.pictures),
}


@pytest.mark.parametrize(
    "name", ["gpt2", "vit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "bert", "t5"))]
)
def test_words_of_a_model_are_those_of_its_local_programs(name: str) -> None:
    """All but those of tables, norms and the loss, which are a large part of models with four layers only."""
    build, batch = FAMILIES[name]
    model, example = build(), batch(0)
    rows = 8
    shapes = {column: tuple(value.shape) for column, value in example.items()}
    captured = captured_rows(model, flatten_for_costs(model, example), ranks=2, save=Save.SHARDS, shapes=shapes)
    counted = {(row.mode, row.grid): row for row in captured if row.feasible}
    profile = mw.profile_model(model, example, rows=(1, 2), repeats=1)
    assert len(counted) > 3
    for choice in tensor_choices(profile, 2):
        grid = mode(choice.tensor).grid(choice.asked)
        row = counted[grid.mode, tuple(size for _, size in grid.sizes)]
        there, back = tensor_seconds(profile, choice, rows, 0.0, profile.parameter_itemsize)
        least = 0.6 if name == "t5" else 0.8
        assert least <= there.sum() / float(row.words_forward or 0) <= 1.001, choice.name
        assert least <= back.sum() / float((row.words_backward or 0) + (row.words_sync or 0)) <= 1.001, choice.name


def test_attention_and_an_mlp_as_two_layers_cost_what_one_layer_costs() -> None:
    attention = (MatrixProduct(HIDDEN, (3 * HIDDEN,), TOKENS), MatrixProduct(HIDDEN, (HIDDEN,), TOKENS, contracts=True))
    mlp = (MatrixProduct(HIDDEN, (4 * HIDDEN,), TOKENS), MatrixProduct(4 * HIDDEN, (HIDDEN,), TOKENS, contracts=True))
    halves = Profile((TABLE, *(replace(BLOCK, products=each) for each in (attention, mlp))), rows=(1,), tokens_per_row=TOKENS)
    for choice in tensor_choices(PROFILE, 8):
        whole, parts = (tensor_seconds(each, choice, 4, 1e-6, 1e9) for each in (PROFILE, halves))
        assert [x.sum() for x in parts] == pytest.approx([x.sum() for x in whole], rel=1e-12)


@pytest.mark.parametrize("given", [(0, (3,)), (3, ()), (3, (0,)), (3, (3,), 0)])
def test_products_have_widths(given: tuple[Any, ...]) -> None:
    with pytest.raises(mw.MeshwrightError, match="widths and tokens of at least 1"):
        MatrixProduct(*given)


def test_a_profile_file_has_the_products() -> None:
    profile = replace(PROFILE, layers=(replace(BLOCK, products=(MatrixProduct(3, (4, 5), 6, contracts=True),)),))
    assert mw.profile_from_json(mw.profile_to_json(profile)) == profile
