"""The Trainer under `dp_mode="cyclic-pp"` and `"cyclic-mp"`: logs, evaluation, checkpoints that move between the forms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright import MeshwrightError, verify
from meshwright.runtime.launch.workers import Workers
from meshwright.train.data.batches import Position, numbered_steps
from meshwright.train.data.collate import Collate, stacked
from meshwright.train.data.row_reader import RowReader
from meshwright.train.data.sampler import Sampler
from meshwright.train.data.step_rows import StepRows
from meshwright.train.measure import measure
from tests.conftest import Pool
from tests.support.delayed_rule import Delayed, trainer_language
from tests.support.thin import slow
from tests.support.trainers import distance, gpt2, ours, series, text
from tests.train.test_cyclic_forms import device_of
from tests.train.test_cyclic_trainer import HOW, PLAN, ROWS, STEPS, batches, same, tools
from tests.train.test_cyclic_training import batch, cuts_of, mlp, watched_segments

SECOND = ("transformer.h.2", "transformer.h.3", "transformer.ln_f", "lm_head")


def trainer(folder: Path, workers: Workers, model: nn.Module, form: str, **more: Any) -> mw.Trainer:
    mode = "cyclic" if form == "replicated" else f"cyclic-{form}"
    given = {"parallel": {**PLAN, "dp_mode": mode}, "optimizers": tools(model), **HOW, **more}
    return ours(model, folder, text(ROWS), workers, **given)


def serial(form: str) -> tuple[nn.Module, list[float]]:
    """The delayed rule in one process; each device adds its own gradients first."""
    model = gpt2()
    optimizer, scheduler = tools(model)
    late = Delayed(model, 2, 2, lambda name: int(name.startswith(SECOND)), trainer_language)
    late.device_of, late.aliases = lambda s, i: device_of(form, 2, s, i), {"lm_head.weight": "transformer.wte.weight"}
    return model, late.train(batches(STEPS), optimizer, scheduler)


@pytest.mark.parametrize("form", ["pp", slow("mp")])
def test_logs_evaluation_checkpoints_and_resume(form: str, tmp_path: Path, workers: Workers) -> None:
    expected, losses = serial(form)
    model = gpt2()
    run = trainer(tmp_path, workers, model, form, eval_dataset=text(12), eval_strategy="steps", eval_steps=4)
    output = run.train()
    assert same(model, expected), distance(model, expected)
    assert output.global_step == STEPS and output.training_loss == pytest.approx(sum(losses) / STEPS, rel=1e-6)
    history = run.state.log_history
    assert series(history, "loss") == pytest.approx([sum(losses[at - 3 : at]) / 3 for at in (3, 6, 9)], rel=1e-6)
    assert all(norm > 0 for norm in series(history, "grad_norm"))
    plain = ours(model, tmp_path / "plain", text(12), per_device_eval_batch_size=16).evaluate(text(12))
    assert [entry["step"] for entry in history if "eval_loss" in entry] == [4, 8, 11]
    assert series(history, "eval_loss")[-1] == pytest.approx(plain["eval_loss"], rel=1e-6)
    assert history[-1]["train_samples_per_second"] > 0
    again = gpt2(seed=5)
    resumed = trainer(tmp_path, workers, again, form, logging_steps=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert same(again, expected), distance(again, expected)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["pp", "mp"])
def test_checkpoints_move_between_forms(form: str, tmp_path: Path, workers: Workers) -> None:
    """All forms save both versions of what they read late, so they follow one rule, up to the order of sums."""
    whole, moved = gpt2(), gpt2()
    trainer(tmp_path / "whole", workers, whole, "replicated", max_steps=8, save_strategy="no").train()
    trainer(tmp_path / "moved", workers, moved, "replicated", max_steps=5).train()
    for steps, other in ((6, form), (8, "replicated")):
        moved = gpt2(seed=5)
        last = 5 if steps == 6 else 6
        run = trainer(tmp_path / "moved", workers, moved, other, max_steps=steps)
        run.train(resume_from_checkpoint=str(tmp_path / "moved" / f"checkpoint-{last}"))
    assert distance(moved, whole) < 1e-5
    plain = gpt2(seed=5)
    run = trainer(tmp_path / "moved", workers, plain, form, max_steps=9, parallel={"dp": 2})
    run.train(resume_from_checkpoint=str(tmp_path / "moved" / "checkpoint-6"))
    assert 0 < distance(plain, moved) < 1


def counted(plan: dict[str, Any]) -> tuple[int, list[int], list[float]]:
    """On a rank: the collectives inside a segment, the rows of the batches that it loads, and the losses of its steps."""
    loss = nn.functional.cross_entropy
    with mw.parallelize(mlp(), batch("mlp", 0, 9), plan, loss=loss, device="cpu", check_capture=False) as session:
        calls, rows = watched_segments(session.engine)
        data = [(torch.arange(6.0) * (i + 1) / 60, i % 3) for i in range(25)]
        source = session.source_for_rank(RowReader(Collate(stacked, None), seed=0).source(data))
        sampler = Sampler(25, StepRows(3, 1, 3), 0)
        results = session.train(list(numbered_steps(source, sampler, Position(0, 0))))
        assert [result.rows for result in results] == [9, 9, 7]
    return len(calls), rows, [result.loss for result in results]


def test_ranks_load_the_rows_that_they_run_and_have_no_collectives(pool: Pool) -> None:
    """Of three microbatches, a worker of the first stage runs one, and the two workers of the second take turns."""
    found = pool.run(counted, {"dp": 3, "dp_mode": "cyclic-mp", "stages": cuts_of("mlp", 3)}, ranks=6)
    assert [calls for calls, _, _ in found] == [0] * 6
    assert [rows for _, rows, _ in found] == [[3, 3, 2], [3, 3, 2], [3, 3, 3], *([[9, 9, 7]] * 3)]
    other = pool.run(counted, {"dp": 3, "dp_mode": "cyclic-pp", "stages": cuts_of("mlp", 3)}, ranks=3)
    assert [(calls, rows) for calls, rows, _ in other] == [(0, [9, 9, 7])] * 3
    assert found[0][2] == pytest.approx(other[0][2], rel=1e-6)


def small() -> nn.Module:
    return mlp()


def small_batch(step: int) -> Any:
    return batch("mlp", step, 12)


@pytest.mark.parametrize("plan", [{"dp_mode": "cyclic-pp"}, slow({"dp_mode": "cyclic-mp", "options": {"rule": "v1"}})], ids=str)
def test_verify_passes(plan: dict[str, Any], workers: Workers) -> None:
    found = verify(small, small_batch, {"dp": 3, **plan}, steps=4, loss=nn.functional.cross_entropy, workers=workers)
    assert found.passed


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        ({"dp": 2, "dp_mode": "cyclic-pp", "pp": 2}, 'pp=2 and dp_mode="cyclic-pp" cannot be combined'),
        ({"dp": 2, "dp_mode": "cyclic-mp", "options": {"chunks": 3}}, "at least one microbatch per stage: 3 stages, got 2"),
        ({"dp": 2, "dp_mode": "cyclic-mp", "microbatches": 4}, "one microbatch per copy and step: dp=2, got microbatches=4"),
    ],
)
def test_what_cannot_be_trained_is_refused(plan: dict[str, Any], what: str, tmp_path: Path, workers: Workers) -> None:
    with pytest.raises(MeshwrightError, match=what):
        trainer(tmp_path, workers, gpt2(), "pp", parallel=plan).train()


def test_unequal_rows_are_refused_by_ranks_that_join_microbatches() -> None:
    source = RowReader(Collate(stacked, None), seed=0).source([(torch.zeros(3 + i // 2), 0) for i in range(4)])
    with pytest.raises(MeshwrightError, match=r"the size \(3,\) in microbatch 0 and \(4,\) in microbatch 1"):
        replace(source, copies=2, several=(0, 1)).numbered(Position(0, 0), [0, 1, 2, 3])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["pp", "mp"])
def test_predictions_and_a_measurement(form: str, tmp_path: Path, workers: Workers) -> None:
    model, rows = gpt2(), text(5)
    run = trainer(tmp_path, workers, model, form)
    ids = torch.tensor([row["input_ids"] for row in rows])
    assert torch.allclose(torch.from_numpy(run.predict(rows).predictions), model(ids).logits, atol=1e-5)
    found = measure(run, steps=2)
    assert found is not None and (found.schedule.first, found.schedule.steps) == (1, 3)
    assert all(cost.forward_s > 0 and cost.backward_s > 0 and cost.activation_bytes > 0 for cost in found.costs)
