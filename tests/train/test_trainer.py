"""The Trainer does what the Hugging Face Trainer does in one process, under every plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import EarlyStoppingCallback

from meshwright import MeshwrightError, simulate
from meshwright.ir.timeline import Lane
from meshwright.report.comparison import versus
from meshwright.runtime.launch.workers import Workers
from meshwright.train.checkpoint import folders as rotate
from meshwright.train.measure import measure
from tests.support.thin import slow
from tests.support.trainers import Notes, accuracy, distance, gpt2, llama, ours, reference, series, summed_loss, text

MORE = {
    "eval_model_preparation_time", "tokens_per_second", "train_tokens_per_second", "train_step_time", "train_peak_mem_bytes",
}  # fmt: skip
"""What one of the two Trainers logs beside what both do."""

CLOSE = 1e-5
PLANS = [
    None,
    slow({"pp": 2}),
    {"pp": 2, "schedule": "chimera"},
    {"pp": 4, "schedule": "zero_bubble", "microbatches": 8},
]


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, float]]]:
    """GPT-2 with ties, uneven labels, a short last batch, warmup, decay and clipping, and an evaluation after each epoch."""
    model = gpt2()
    log = reference(model, tmp_path_factory.mktemp("hf"), text(), eval_dataset=text(21), eval_strategy="epoch")
    return model, log


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_losses_equal_the_hugging_face_trainer(
    hugging_face: tuple[Any, list[dict[str, float]]], plan: Any, tmp_path: Path, workers: Workers
) -> None:
    expected, log = hugging_face
    model = gpt2()
    trainer = ours(model, tmp_path, text(), workers, parallel=plan, eval_dataset=text(21), eval_strategy="epoch")
    output = trainer.train()
    found = trainer.state.log_history
    for key in ("loss", "grad_norm", "learning_rate", "epoch", "eval_loss"):
        assert series(found, key) == pytest.approx(series(log, key), rel=CLOSE), key
    assert [sorted(set(entry) - MORE) for entry in found] == [sorted(set(entry) - MORE) for entry in log]
    assert output.training_loss == pytest.approx(log[-1]["train_loss"], rel=CLOSE)
    assert distance(model, expected) < 2e-4


@pytest.mark.parametrize("plan", [slow({"pp": 2, "microbatches": 4}), {"pp": 2, "dp": 2}], ids=str)
def test_accumulation_is_microbatches(plan: Any, tmp_path: Path, workers: Workers) -> None:
    log = reference(llama(), tmp_path, text(), gradient_accumulation_steps=4, per_device_train_batch_size=4)
    device = 4 // plan.get("dp", 1)
    trainer = ours(
        llama(), tmp_path, text(), workers, parallel=plan, gradient_accumulation_steps=4, per_device_train_batch_size=device
    )
    trainer.train()
    for key in ("loss", "grad_norm", "epoch"):
        assert series(trainer.state.log_history, key) == pytest.approx(series(log, key), rel=CLOSE), key


def test_an_own_loss_gets_outputs_labels_and_the_number_of_items(tmp_path: Path, workers: Workers) -> None:
    log = reference(llama(), tmp_path, text(), compute_loss_func=summed_loss)
    trainer = ours(llama(), tmp_path, text(), workers, parallel={"pp": 2}, compute_loss_func=summed_loss)
    trainer.train()
    assert series(trainer.state.log_history, "loss") == pytest.approx(series(log, "loss"), rel=CLOSE)


def test_metrics_and_predictions_equal_the_hugging_face_trainer(tmp_path: Path, workers: Workers) -> None:
    model = gpt2()
    theirs = transformers.Trainer(
        gpt2(), transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"), compute_metrics=accuracy
    )
    expected = theirs.predict(text(21))  # type: ignore[arg-type]
    trainer = ours(model, tmp_path, None, workers, parallel={"pp": 2, "dp": 2}, compute_metrics=accuracy, eval_dataset=text(21))
    found = trainer.predict(text(21))
    assert found.predictions.shape == expected.predictions.shape
    assert torch.allclose(torch.from_numpy(found.predictions), torch.from_numpy(expected.predictions), atol=1e-5)
    assert found.metrics["test_accuracy"] == expected.metrics["test_accuracy"]
    metrics = trainer.evaluate()
    assert metrics["eval_rows"] == 21
    assert metrics["eval_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-2)
    assert trainer.state.log_history[-1]["eval_accuracy"] == metrics["eval_accuracy"]


def test_callbacks_are_told_and_what_they_note_comes_back(tmp_path: Path, workers: Workers) -> None:
    events = []
    for plan in (None, {"pp": 2}):
        notes = Notes(stop_at=3)
        trainer = ours(
            gpt2(), tmp_path, text(), workers, parallel=plan, callbacks=[notes], save_strategy="steps", save_steps=2,
            eval_dataset=text(8), eval_strategy="steps", eval_steps=2, logging_steps=2,
        )  # fmt: skip
        trainer.train()
        assert trainer.state.global_step == 3
        told = len(notes.events)
        trainer.evaluate(text(8))
        assert notes.events[told - 1 :] == ["end", "log", "evaluate epoch"]
        events.append(notes.events)
    assert events[0] == events[1]
    assert events[0][0] == "begin" and "save 2" in events[0]
    assert [e for e in events[0] if e.startswith("step")] == ["step 1", "step 2", "step 3"]


def test_the_log_is_a_file_of_json_lines(tmp_path: Path, workers: Workers) -> None:
    trainer = ours(gpt2(), tmp_path, text(), workers, parallel={"pp": 2}, max_steps=3, report_to=["tensorboard"])
    metrics = trainer.train().metrics
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 3]
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    assert json.loads((tmp_path / "train_results.json").read_text())["train_loss"] == metrics["train_loss"]
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 3
    assert [line["loss"] for line in lines[:3]] == series(trainer.state.log_history, "loss")
    assert list(tmp_path.rglob("events.out.tfevents*"))


@pytest.mark.parametrize("second", [slow(None), {"pp": 4, "schedule": "chimera"}], ids=str)
def test_a_run_goes_on_under_another_plan_as_if_it_had_not_stopped(second: Any, tmp_path: Path, workers: Workers) -> None:
    """Dropout is on: masks belong to step, microbatch and layer, not to the run."""
    common: dict[str, Any] = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "save_strategy": "steps"}
    plan = {"pp": 2, "microbatches": 4}
    whole = ours(gpt2(attn_pdrop=0.1), tmp_path / "whole", text(), workers, parallel=plan, **common, save_steps=100)
    whole.train()
    notes = Notes(stop_at=8)
    first = ours(
        gpt2(attn_pdrop=0.1), tmp_path / "parts", text(), workers, parallel=plan, callbacks=[notes], **common, save_steps=4
    )
    first.train()
    model = gpt2(seed=1, attn_pdrop=0.1)
    again = ours(model, tmp_path / "parts", text(), workers, parallel=second, **common, save_steps=100)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == whole.state.global_step == 12
    for key in ("loss", "learning_rate"):
        assert series(again.state.log_history, key) == pytest.approx(series(whole.state.log_history, key), rel=CLOSE), key
    assert distance(model, whole.model) < 1e-4


class Fails(transformers.TrainerCallback):
    """Raises on the last rank right after a save has begun."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 and not state.is_world_process_zero:
            raise ValueError("this callback does not like step 2")


def test_a_checkpoint_on_its_way_outlives_the_failure_of_the_run(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"parallel": {"pp": 2}, "save_strategy": "steps", "save_steps": 2}
    with pytest.raises(MeshwrightError, match="does not like step 2"):
        ours(gpt2(), tmp_path, text(), callbacks=[Fails()], **plan).train()
    assert (found := rotate.last_good(tmp_path)) is not None and found.name == "checkpoint-2"


def test_a_run_that_had_ended_takes_no_more_steps(tmp_path: Path) -> None:
    more: dict[str, Any] = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3}
    first = ours(gpt2(), tmp_path, text(), **more)
    first.train()
    model = gpt2(seed=1)
    again = ours(model, tmp_path, text(), **more)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3 and series(again.state.log_history, "loss") == series(first.state.log_history, "loss")
    assert distance(model, first.model) == 0


@pytest.mark.parametrize("kept", [True, slow(False)])
def test_callbacks_go_on_with_what_a_checkpoint_has_of_them(kept: bool, tmp_path: Path, workers: Workers) -> None:
    """Nothing gets better here, so each evaluation but the first takes some patience."""
    more: dict[str, Any] = {
        "learning_rate": 0.0, "eval_dataset": text(8), "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps",
        "save_steps": 1, "metric_for_best_model": "loss", "load_best_model_at_end": True,
    }  # fmt: skip
    first = ours(gpt2(), tmp_path, text(), max_steps=3, **more, callbacks=[EarlyStoppingCallback(5)])
    first.train()
    patience = EarlyStoppingCallback(5)
    again = ours(
        gpt2(), tmp_path, text(), workers, parallel={"pp": 2}, callbacks=[patience],
        restore_callback_states_from_checkpoint=kept, **more,
    )  # fmt: skip
    again.train(resume_from_checkpoint=True)
    assert patience.early_stopping_patience_counter == 5
    assert again.state.global_step == (6 if kept else 8)


def test_a_job_is_measured_beside_its_prediction(tmp_path: Path, workers: Workers) -> None:
    """One traced step, with every action and message of its schedule, and costs from the steps before it."""
    found = measure(ours(gpt2(), tmp_path, text(), workers, parallel={"pp": 2, "schedule": "chimera"}))
    predicted = simulate(found.schedule, found.costs)
    assert versus(predicted, found.timeline).unmatched == 0
    assert all(cost.forward_s > 0 and cost.input_s > 0 for cost in found.costs)
    measured = [span for span in found.timeline.spans if span.lane is Lane.COMPUTE]
    assert {span.worker for span in measured} == {0, 1} and all(span.start_s <= span.end_s for span in measured)
