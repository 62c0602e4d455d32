"""The zoo: every family is what the page says, at two sizes in one process; some of each kind train on workers."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import default_data_collator

from meshwright import Parallel
from meshwright.runtime.launch.workers import Workers
from meshwright.train.verify.verify import momentum, rank_trace
from meshwright.train.verify.verify_case import Case, prepare_case
from tests.conftest import Pool
from tests.support.trainers import ours, reference, series
from tests.zoo.compare import Result, difference, plain, run
from tests.zoo.every import FAMILIES, step, still
from tests.zoo.family import Batch, cast
from tests.zoo.plain import ReadsPadding
from tests.zoo.study import Verdict, study
from tests.zoo.table import PAGE, row, rows_of, verdict_of

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
ROWS = rows_of(PAGE)
QUICK = ("llama", "vit", "writes in place before an embedding")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES])
def test_every_family_is_what_the_page_says(name: str) -> None:
    found = study(FAMILIES[name])
    assert found.verdict in (Verdict.EXACT, Verdict.REFUSED), f"{found.verdict.value}: {found.note}"
    assert row(found) == ROWS.get(name), "python -m tests.zoo --write docs/zoo.md"


def test_every_row_of_the_page_is_exact_or_refused() -> None:
    assert ROWS.keys() <= FAMILIES.keys()
    assert {verdict_of(line) for line in ROWS.values()} <= {"exact", "refused"}


@pytest.mark.slow
def test_the_page_has_every_family_and_most_are_exact() -> None:
    assert ROWS.keys() == FAMILIES.keys()
    assert len(ROWS) >= 80
    listed = [verdict_of(line) for name, line in ROWS.items() if FAMILIES[name].kind != "tricky"]
    assert listed.count("exact") >= 5 / 6 * len(listed)


@pytest.mark.slow
def test_padded_places_of_an_encoder_in_evaluation() -> None:
    found = study(replace(FAMILIES["nn.Transformer"], name="reads padding", build=ReadsPadding))
    assert found.verdict is Verdict.EXACT


RUNS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"pp": 2}),
    ("llama tied, padded left", {"pp": 4, "schedule": "chimera", "microbatches": 4}),
    ("llama packed", {"pp": 2, "schedule": "zero_bubble"}),
    ("gemma3", {"pp": 2, "schedule": "interleaved", "options": {"chunks": 2}, "microbatches": 2}),
    ("bert", {"pp": 4, "recompute": "inline"}),
    ("deberta v2", {"pp": 2}),
    ("t5", {"pp": 4}),
    ("mbart", {"pp": 2, "schedule": "gpipe"}),
    ("mixtral", {"pp": 2}),
    ("gpt oss", {"pp": 4}),
    ("mamba", {"pp": 2}),
    ("recurrent gemma", {"pp": 2}),
    ("rwkv", {"pp": 2}),
    ("vit", {"pp": 2, "schedule": "chimera"}),
    ("swin", {"pp": 4}),
    ("convnext", {"pp": 2}),
    ("whisper", {"pp": 2, "dp": 1}),
    ("speech to text", {"pp": 4}),
    ("vip llava", {"pp": 2}),
    ("git", {"pp": 4}),
    ("patchtst", {"pp": 2}),
    ("U-Net", {"pp": 2}),
    ("LSTM tagger", {"pp": 2}),
    ("recommender", {"pp": 2}),
    ("experts by index", {"pp": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), RUNS, ids=[f"{name} {plan['pp']}" for name, plan in RUNS])
def test_families_train_on_workers_as_the_model_does_by_itself(pool: Pool, name: str, plan: dict[str, Any]) -> None:
    """The loss and every gradient of the first step, against a plain loop over microbatches in this process."""
    dtype = "float32" if FAMILIES[name].kind == "experts" or FAMILIES[name].dtype is torch.float32 else "float64"
    parallel = Parallel.of({"microbatches": 2, **plan})
    case = Case(partial(still, name, dtype), partial(step, name), parallel, 1, dtype, 0, None, momentum)
    case, _, run = prepare_case(case)
    traces = pool.run(rank_trace, case, run, ranks=parallel.processes)
    mine = Result()
    for trace in traces:
        mine.gradients |= trace.gradients[0]
    sums = [trace.sums[0] for trace in traces if trace.sums.get(0, (0.0, 0.0))[1]]
    mine.loss = sum(loss for loss, _ in sums) / sum(weight for _, weight in sums)
    own = alone(name, dtype, parallel.microbatches)
    assert mine.loss == pytest.approx(own.loss, rel=1e-6), "transformers computes its losses in single precision"
    error, where = difference(replace(mine, loss=0.0), replace(own, loss=0.0))
    assert error <= (1e-5 if dtype == "float32" else 1e-9), where


def alone(name: str, dtype: str, microbatches: int) -> Result:
    """The plain model in this process."""
    model = still(name, dtype).train()
    batch: Batch = cast(step(name, 0), getattr(torch, dtype))
    found = run(plain(model), model, batch, FAMILIES[name].items, train=True, keyed=False, count=microbatches)
    found.outputs = []
    return found


def rows_of(name: str, seed: int, count: int = 16) -> list[Batch]:
    """A data set: rows of a batch, one by one."""
    family = FAMILIES[name]
    batch = cast(family.batch(count, family.sizes[0][1], seed), torch.float32)
    return [{key: t[row] for key, t in batch.items()} for row in range(count)]


TRAINED = ("gemma2", "roberta", "pegasus", "jetmoe", "lfm2", "beit", "whisper", "git", "hidden states in a dictionary")


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"pp": 2}, {"pp": 4, "schedule": "chimera"}], ids=["2", "4"])
@pytest.mark.parametrize("name", TRAINED)
def test_trainers_of_both_libraries_log_the_same(name: str, plan: dict[str, Any], tmp_path: Path, workers: Workers) -> None:
    """Three steps and an evaluation after each; dropout is off, for the two draw from other streams."""
    more = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "eval_dataset": rows_of(name, 9, 6)}
    more |= {"learning_rate": 1e-3, "data_collator": default_data_collator}
    log = reference(still(name, "float32"), tmp_path / "theirs", rows_of(name, 3), **more)
    trainer = ours(still(name, "float32"), tmp_path / "ours", rows_of(name, 3), workers, parallel=plan, **more)
    trainer.train()
    for key in ("loss", "grad_norm", "eval_loss"):
        assert series(trainer.state.log_history, key) == pytest.approx(series(log, key), rel=2e-5), key
