"""Captured models under plans against the models themselves in one process: a cover of pairs, and the whole matrix."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest

from meshwright import MeshwrightError
from tests.conftest import Pool
from tests.support import captured_models as c
from tests.support.thin import thinned

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

MODELS: dict[str, tuple[Any, Any]] = {
    "gpt2": (c.gpt2, c.text),
    "gpt2 dropout": (partial(c.gpt2, resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1), c.text),
    "gpt2 eager": (partial(c.gpt2, attn_implementation="eager"), c.text),
    "llama": (c.llama, c.text),
    "llama tied": (partial(c.llama, tie_word_embeddings=True, num_key_value_heads=4), c.text),
    "bert": (c.bert, c.text),
    "t5": (c.t5, c.pairs),
    "vit": (c.vit, c.pictures),
    "long skip": (c.LongSkip, c.tokens),
    "decoy": (partial(c.LongSkip, decoy=True), c.tokens),
    "pictures": (c.Pictures, c.pictures),
    "bloom": (partial(c.family, "Bloom", n_layer=4, n_head=4, hidden_dropout=0.0), c.text),
    "opt": (partial(c.family, "OPT", ffn_dim=32, word_embed_proj_dim=16, dropout=0.0), c.text),
}
COVER = [
    ("gpt2", {"pp": 2, "microbatches": 4, "schedule": "zero_bubble"}),
    ("gpt2 dropout", {"pp": 4, "microbatches": 4, "schedule": "onef1b", "recompute": "inline"}),
    ("llama tied", {"pp": 2, "dp": 2, "microbatches": 2, "schedule": "chimera"}),
    ("t5", {"pp": 3, "microbatches": 4, "schedule": "onef1b"}),
    ("vit", {"pp": 2, "microbatches": 4, "schedule": "interleaved"}),
    ("long skip", {"pp": 4, "microbatches": 4, "schedule": "shifted"}),
    ("decoy", {"pp": 2, "dp": 2, "microbatches": 2, "schedule": "zero_bubble"}),
    ("long skip", {"pp": 2, "microbatches": 4, "schedule": "pipedream"}),
    ("bert", {"pp": 1, "dp": 2, "microbatches": 2}),
    ("pictures", {"pp": 2, "microbatches": 2, "schedule": "zero_bubble"}),
    ("pictures", {"pp": 2, "microbatches": 2, "recompute": "inline"}),
    ("decoy", {"pp": 3, "microbatches": 2, "stages": ["layers.1", "layers.6"]}),
]
SCHEDULES = ("onef1b", "interleaved", "chimera", "zero_bubble", "shifted")


@pytest.mark.parametrize(
    ("name", "plan"), thinned(COVER, 2, several=True), ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values()))
)
def test_plan_equals_the_model_itself(pool: Pool, name: str, plan: dict[str, Any]) -> None:
    build, data = MODELS[name]
    found = pool.verify(build, data, steps=5, **plan)
    assert found.passed, (found.worst, found.max_relative_error, found.problems)
    assert found.updates == 5 or plan.get("schedule") == "pipedream"


@pytest.mark.parametrize(
    "plan",
    [
        {"width": (1, 2)},
        pytest.param({"width": (1, 2), "dp_mode": "zero-1"}, marks=pytest.mark.slow),
        {"schedule": "chimera", "options": {"mode": "halving"}, "microbatches": 4},
    ],
    ids=["width", "zero", "halving"],
)
def test_a_float32_loss_over_split_rows_is_no_difference(pool: Pool, plan: dict[str, Any]) -> None:
    """The losses of transformers are float32 in a float64 model: halves of a microbatch round otherwise than the whole."""
    found = pool.verify(c.gpt2, c.text, steps=2, **{"pp": 2, "microbatches": 2, **plan})
    assert found.passed and found.loss_error < 1e-12, (found.loss_error, found.worst, found.problems)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("pp", [2, 4])
def test_whole_matrix(pool: Pool, name: str, schedule: str, dp: int, pp: int) -> None:
    build, data = MODELS[name]
    found = pool.verify(build, data, steps=5, pp=pp, dp=dp, schedule=schedule, microbatches=4 if dp == 1 else pp)
    assert found.passed, (found.worst, found.max_relative_error, found.problems)


@pytest.mark.slow
def test_experts_with_sparse_routing(pool: Pool) -> None:
    """Grouped products have no double precision."""
    with pytest.raises(MeshwrightError, match="does not run in float64"):
        pool.verify(c.mixtral, c.text, pp=2, microbatches=2)
    found = pool.verify(c.mixtral, c.text, steps=5, dtype="float32", pp=2, microbatches=2)
    assert found.passed, (found.worst, found.max_relative_error, found.problems)


@pytest.mark.parametrize(
    ("build", "data", "plan", "what"),
    [
        (c.LongSkip, c.tokens, {"pp": 11, "microbatches": 2}, "LongSkip has 10 layers and cannot be cut into 11 stages"),
        (c.LongSkip, c.only_tokens, {"pp": 2}, "the batch has 1 tensors, but the model needs 2: tokens, labels"),
        (c.LongSkip, c.no_labels, {"pp": 2}, "no column 'labels', which the model needs"),
        (c.LongSkip, c.tokens, {"pp": 2, "stages": ["layers.9"]}, "no layer of LongSkip begins with the module 'layers.9'"),
        (c.LongSkip, c.tokens, {"pp": 2, "stages": "layers.9"}, "stages must list the modules that stages begin with"),
    ],
)
def test_what_cannot_run_is_said_before_any_worker_starts(build: Any, data: Any, plan: dict[str, Any], what: str) -> None:
    from meshwright import verify

    with pytest.raises(MeshwrightError, match=what):
        verify(build, data, plan)


def cut_differently() -> None:
    """Each rank cuts in another place, and goes on as if it were right."""
    import torch.distributed as dist

    from meshwright import Parallel
    from meshwright.runtime.engine.engine import Engine
    from meshwright.runtime.engine.settings import Settings
    from meshwright.train.setup.build_schedule import lists_for
    from meshwright.train.verify.verify import momentum
    from tests.support.layers_of_models import layers_for

    layers = layers_for(c.LongSkip(), c.tokens(0), 2, cuts=[4 + dist.get_rank()])
    schedule = lists_for(Parallel(pp=2, microbatches=2), ties=layers.ties)
    Engine(schedule, layers, Settings(optimizer=momentum, microbatches=2))


def test_ranks_that_cut_differently_are_told_so(pool: Pool) -> None:
    with pytest.raises(MeshwrightError, match=r"ranks cut the model in different ways: rank 0 has [0-9a-f]+, rank 1 has"):
        pool.run(cut_differently, ranks=2)
