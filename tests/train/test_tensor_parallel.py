"""Tensor parallelism on real processes: plans with boxes under pipelines equal the user's model in one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright import MeshwrightError, Parallel, plan_from_json, plan_to_json
from meshwright.train.models import small_models
from tests.conftest import Pool
from tests.support import captured_models as small
from tests.support.trainers import gpt2, ours, text

GPT2 = partial(small.gpt2, n_embd=32, n_head=8, n_layer=2)
LLAMA = partial(small.llama, hidden_size=32, intermediate_size=64, num_attention_heads=8, num_key_value_heads=4)
BATCH = partial(small.text, rows=8, length=12)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def verified(pool: Pool, build: Any, steps: int = 3, **plan: Any) -> mw.Certificate:
    found = pool.verify(build, BATCH, steps=steps, optimizer=sgd, **plan)
    assert found.passed, (found.max_relative_error, found.worst, found.problems)
    assert found.weight_error <= 1e-11 and found.replicas_equal
    return found


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 2, "pp": 2, "schedule": "chimera", "microbatches": 4},
        {"tp": 2, "sequence": True, "pp": 2, "schedule": "zero_bubble", "microbatches": 4},
        {"box": (2, 2, 1), "microbatches": 2},
        {"tp": 4, "tensor": "grid", "microbatches": 2, "save": "gathered"},
        {"tp": 4, "tensor": "tesseract", "depth": 1, "microbatches": 2},
        {"tp": 2, "dp": 2, "microbatches": 2, "recompute": "inline"},
    ],
    ids=["line-chimera", "sequence-zero_bubble", "box", "grid", "tesseract", "line-dp"],
)
def test_a_box_trains_as_one_process(pool: Pool, plan: dict[str, Any]) -> None:
    verified(pool, GPT2, **plan)


MODES: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 4},
    {"tp": 2, "sequence": True},
    {"box": (2, 2, 1)},
    {"box": (1, 2, 2)},
    {"tp": 4, "tensor": "grid"},
    {"tp": 4, "tensor": "tesseract", "depth": 1},
]


@pytest.mark.slow
@pytest.mark.parametrize("build", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("schedule", ["onef1b", "chimera", "zero_bubble"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_mode_under_every_kind_of_pipeline(pool: Pool, mode: dict[str, Any], schedule: str, build: Any) -> None:
    verified(pool, build, **mode, pp=2, schedule=schedule, microbatches=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [{"tp": 8}, {"box": (2, 2, 2)}, {"tp": 8, "tensor": "tesseract", "depth": 2}, {"tp": 8, "sequence": True}],
    ids=str,
)
def test_eight_ranks(pool: Pool, mode: dict[str, Any]) -> None:
    verified(pool, GPT2, **mode, microbatches=1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_transports_that_block_in_order(pool: Pool, mode: dict[str, Any]) -> None:
    verified(pool, GPT2, steps=2, **mode, pp=2, microbatches=2, transport="strict")


def test_the_norm_of_a_box_is_that_of_one_process(pool: Pool) -> None:
    """With clipping active every gradient depends on it: a part that is counted twice or not at all changes all weights."""
    found = pool.verify(GPT2, BATCH, steps=2, optimizer=sgd, clip=0.01, box=(2, 2, 1), microbatches=2)
    assert found.passed and found.clip == 0.01, (found.max_relative_error, found.worst, found.problems)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"tp": 0}, "tp must be a whole number of at least 1"),
        ({"box": (2, 2)}, "box must be three whole numbers"),
        ({"box": (2, 2, 1), "tp": 3}, "box .2, 2, 1. has 4 ranks, tp is 3"),
        ({"box": (2, 1, 1), "tensor": "grid"}, 'box .2, 1, 1. is the shape of tensor="box"'),
        ({"tp": 2, "pp": 2, "width": (2, 1)}, "width .2, 1. and tp 2 cannot be combined"),
        ({"tp": 2, "save": "all"}, "save must be one of shards, gathered"),
        ({"tp": 2, "overlap": 1}, "overlap must be True or False"),
        ({"tp": 2, "replicate": "lm_head"}, "replicate must list modules by name"),
    ],
)
def test_plans_that_contradict_themselves(plan: dict[str, Any], words: str) -> None:
    with pytest.raises(MeshwrightError, match=words):
        Parallel(**plan)


def test_a_box_sets_its_ranks_and_travels_in_files() -> None:
    plan = Parallel(pp=2, box=(2, 2, 1), dp=3, replicate=["lm_head"])
    assert (plan.tp, plan.tensor, plan.processes) == (4, "box", 24)
    assert plan_from_json(plan_to_json(plan)) == plan
    assert "tp" not in plan_to_json(Parallel(pp=2)), "a plan without a box is written as before"


def no_flush() -> dict[str, Any]:
    return {"tp": 2, "pp": 2, "schedule": "pipedream", "microbatches": 2}


@pytest.mark.parametrize(
    ("plan", "more", "words"),
    [
        ({"tp": 3}, {}, r"c_attn.weight: size 32 does not divide by 3 \(p=3\)(.|\n)*size 33"),
        ({"tp": 5, "tensor": "grid"}, {}, "grid needs a square number of ranks, got 5"),
        ({"tp": 2, "tensor": "ring"}, {}, "no tensor mode 'ring'"),
        ({"tp": 2, "overlap": True}, {}, "overlap=True with tp=2 does not run yet"),
        ({"tp": 2, "recompute": "2GB"}, {}, "a recompute budget with tp=2 does not run yet"),
        ({"tp": 2}, {"precision": "bf16", "dtype": "float32"}, "precision bf16 with tp=2 does not run yet"),
        (no_flush(), {}, "pipedream has no flush and keeps versions of parameters"),
        ({"box": (4, 1, 1), "microbatches": 4}, {}, r"the rows of a microbatch: size 2 does not divide by 4 \(w=4\)"),
    ],
)
def test_what_a_box_cannot_do_is_refused_before_workers_start(plan: Any, more: Any, words: str) -> None:
    with pytest.raises(MeshwrightError, match=words):
        mw.verify(GPT2, BATCH, plan, steps=1, **more)


def test_lists_of_layers_and_training_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match="tp=2 shards the graph of a captured model, but this model is a list of layers"):
        mw.verify(small_models.mlp, small_models.mlp_batch, {"tp": 2}, steps=1)
    with pytest.raises(MeshwrightError, match=r"tp=2: only meshwright.verify runs tensor parallelism so far"):
        ours(gpt2(), tmp_path, text(), parallel={"tp": 2}).train()
