"""The Trainer under `dp_mode="cyclic"`: logs, evaluation, checkpoints and exact resume, bit-equal to the delayed rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import MeshwrightError, Trainer, TrainingArguments
from meshwright.ir.action import Op, walk
from meshwright.ir.timeline import Lane
from meshwright.runtime.launch.workers import Workers
from meshwright.train.measure import measure
from tests.support.delayed_rule import Delayed, trainer_language
from tests.support.trainers import Notes, distance, gpt2, ours, series, text

STEPS = 11
PLAN = {"dp": 2, "dp_mode": "cyclic", "stages": ["transformer.h.2"]}
HOW = {
    "per_device_train_batch_size": 4,
    "train_sampling_strategy": "sequential",
    "max_steps": STEPS,
    "max_grad_norm": 0.0,
    "logging_steps": 3,
    "save_strategy": "steps",
    "save_steps": 5,
}
ROWS = 44  # five and a half steps of eight rows: every second epoch ends with a short step


def tools(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def batches(count: int) -> list[dict[str, Tensor]]:
    """The batches of the first steps: the rows in order, epoch after epoch."""
    data, found = text(ROWS), []
    while len(found) < count:
        for start in range(0, ROWS, 8):
            rows = data[start : start + 8]
            found.append({name: torch.tensor([row[name] for row in rows]) for name in rows[0]})
    return found[:count]


def trainer(folder: Path, workers: Workers, model: nn.Module, **more: Any) -> Trainer:
    given = {"parallel": PLAN, "optimizers": tools(model), **HOW, **more}
    return ours(model, folder, text(ROWS), workers, **given)


@pytest.fixture(scope="module")
def serial() -> tuple[nn.Module, list[float]]:
    """The delayed rule in one process."""
    model = gpt2()
    optimizer, scheduler = tools(model)
    second = ("transformer.h.2", "transformer.h.3", "transformer.ln_f")
    late = Delayed(model, 2, 2, lambda name: int(name.startswith(second)), trainer_language)
    return model, late.train(batches(STEPS), optimizer, scheduler)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_logs_evaluation_and_checkpoints(serial: Any, tmp_path: Path, workers: Workers) -> None:
    expected, losses = serial
    model, notes = gpt2(), Notes()
    run = trainer(tmp_path, workers, model, eval_dataset=text(12), eval_strategy="steps", eval_steps=4, callbacks=[notes])
    output = run.train()
    assert same(model, expected), distance(model, expected)
    assert output.global_step == STEPS and output.training_loss == pytest.approx(sum(losses) / STEPS, rel=1e-6)
    history = run.state.log_history
    assert [entry["step"] for entry in history if "loss" in entry] == [3, 6, 9]
    means = [sum(losses[at - 3 : at]) / 3 for at in (3, 6, 9)]
    assert series(history, "loss") == pytest.approx(means, rel=1e-6)
    assert series(history, "learning_rate") == pytest.approx([0.05 * 0.9**at for at in (2, 5, 8)])
    assert all(norm > 0 for norm in series(history, "grad_norm"))
    assert [entry["step"] for entry in history if "eval_loss" in entry] == [4, 8, 11]
    plain = ours(model, tmp_path / "plain", text(12), per_device_eval_batch_size=16).evaluate(text(12))
    assert series(history, "eval_loss")[-1] == pytest.approx(plain["eval_loss"], rel=1e-6)
    steps = [event for event in notes.events if event.startswith("step")]
    assert steps == [f"step {at}" for at in range(1, STEPS + 1)]
    for step in (5, 10, 11):
        assert (tmp_path / f"checkpoint-{step}").is_dir()
        assert notes.events.index(f"save {step}") > notes.events.index(f"step {step}")
    assert history[-1]["train_samples_per_second"] > 0


def test_predictions_and_a_measurement(tmp_path: Path, workers: Workers) -> None:
    model, rows = gpt2(), text(5)
    run = trainer(tmp_path, workers, model)
    ids = torch.tensor([row["input_ids"] for row in rows])
    assert torch.allclose(torch.from_numpy(run.predict(rows).predictions), model(ids).logits, atol=1e-5)
    found = measure(run, steps=2)
    assert found is not None and (found.schedule.first, found.schedule.steps) == (1, 3)
    assert all(cost.forward_s > 0 and cost.backward_s > 0 and cost.activation_bytes > 0 for cost in found.costs)
    spans = {str(span.entry) for span in found.timeline.spans if span.lane is Lane.COMPUTE}
    assert {str(a) for row in found.schedule.lists for a in walk(row) if a.op is Op.F} <= spans


def test_resume_gives_equal_bits(serial: Any, tmp_path: Path, workers: Workers) -> None:
    expected, _ = serial
    first = gpt2()
    whole = trainer(tmp_path, workers, first)
    whole.train()
    for step in (5, 10):
        again = gpt2(seed=5)
        run = trainer(tmp_path, workers, again, logging_steps=1)
        run.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert same(again, expected), distance(again, expected)


def test_other_modes_and_cyclic_resume_each_other(tmp_path: Path, workers: Workers) -> None:
    model = gpt2()
    trainer(tmp_path / "a", workers, model, max_steps=5).train()
    plain = gpt2(seed=5)
    trainer(tmp_path / "a", workers, plain, max_steps=6, parallel={"dp": 2}).train(resume_from_checkpoint=True)
    assert 0 < distance(plain, model) < 1
    cyclic = gpt2(seed=5)
    trainer(tmp_path / "a", workers, cyclic, max_steps=8).train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-6"))
    assert 0 < distance(cyclic, plain) < 1


def test_a_callback_that_stops_ends_with_the_segment(tmp_path: Path, workers: Workers) -> None:
    notes = Notes(stop_at=4)
    run = trainer(tmp_path, workers, gpt2(), callbacks=[notes], save_strategy="no", logging_steps=100)
    assert run.train().global_step == 6  # the epoch, which is shorter than a segment of 16 steps, ends after 6 steps


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"gradient_accumulation_steps": 2}, "one microbatch per copy and step, got gradient_accumulation_steps=2"),
        ({"parallel": {**PLAN, "schedule": "onef1b"}}, "cannot be combined"),
        ({"parallel": {**PLAN, "options": {"chunks": 3}}}, "cyclic needs 1 to 2 stages for 2 workers, got 3"),
        ({"parallel": {**PLAN, "options": {"stagger": "never"}}}, "option stagger cannot be 'never'"),
        ({"parallel": {"pp": 2, "schedule": "cyclic"}}, "cyclic has no flush"),
    ],
)
def test_what_cannot_be_trained_is_refused(more: dict[str, Any], what: str, tmp_path: Path, workers: Workers) -> None:
    with pytest.raises(MeshwrightError, match=what):
        trainer(tmp_path, workers, gpt2(), **more).train()


def test_half_precision_is_refused(tmp_path: Path, workers: Workers) -> None:
    with pytest.raises(MeshwrightError, match="a step cannot be skipped as a whole when fp16 overflows"):
        trainer(tmp_path, workers, gpt2(), fp16=True).train()


def test_rows_of_a_step_are_those_of_hugging_face(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=3, parallel={"dp": 4, "dp_mode": "cyclic"})
    assert args.rows.step == 12 and args.plan.microbatches == 4 and args.world_size == 4
