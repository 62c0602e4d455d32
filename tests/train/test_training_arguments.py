"""Training arguments: Hugging Face's habits, one more field, and everything that is not done refused by name."""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser

import meshwright as mw
from meshwright import MeshwrightError, Parallel, TrainingArguments
from meshwright.ir.plan.plan_file import asked, plan_from_json, plan_to_json, read_plan
from meshwright.train.job_file import flags_to_arguments, read_job


def made(tmp_path: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), report_to="none", **more)


@pytest.mark.parametrize(
    ("device", "accumulation", "parallel", "microbatches", "rows"),
    [
        (8, 1, None, 1, 8),
        (8, 1, {"pp": 4}, 4, 8),
        (8, 2, {"pp": 4}, 4, 16),
        (2, 8, {"pp": 4}, 8, 16),
        (2, 6, {"pp": 4}, 6, 12),
        (4, 2, {"pp": 2, "dp": 3, "microbatches": 8}, 8, 24),
        (3, 1, {"pp": 2, "microbatches": 3}, 3, 3),
    ],
)
def test_rows_of_a_step_and_their_cuts(
    tmp_path: Path, device: int, accumulation: int, parallel: Any, microbatches: int, rows: int
) -> None:
    args = made(tmp_path, per_device_train_batch_size=device, gradient_accumulation_steps=accumulation, parallel=parallel)
    assert args.plan.microbatches == microbatches
    assert args.rows.step == rows


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"parallel": {"pp": 4}, "per_device_train_batch_size": 2}, "2 rows cannot be cut into 4 microbatches"),
        (
            {"parallel": {"pp": 2, "microbatches": 3}, "gradient_accumulation_steps": 2},
            "not a multiple of gradient_accumulation_steps=2",
        ),
        ({"parallel": "auto:"}, "names no cluster"),
        ({"parallel": {"pp": 2, "qq": 1}}, "parallel has no 'qq'"),
        ({"parallel": "nowhere.json"}, "cannot read the plan nowhere.json"),
        ({"parallel": '{"pp": 0}'}, "pp must be a whole number of at least 1"),
        ({"torch_compile": True}, "torch_compile=True is not supported"),
        ({"neftune_noise_alpha": 0.1}, "neftune_noise_alpha"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen='all' is not supported"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True is not supported"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(MeshwrightError, match=words):
        made(tmp_path, **more)


def test_context_parallelism_is_refused_by_name(tmp_path: Path) -> None:
    from accelerate import ParallelismConfig

    with pytest.raises(MeshwrightError, match=r"context parallelism \(cp_size=2\) is not supported"):
        made(tmp_path, parallelism_config=ParallelismConfig(cp_size=2))


def test_arguments_travel_and_are_written(tmp_path: Path) -> None:
    args = made(tmp_path, parallel=Parallel(pp=2, schedule="chimera", microbatches=4))
    assert pickle.loads(pickle.dumps(args)).plan == args.plan
    assert json.loads(args.to_json_string())["parallel"]["schedule"] == "chimera"
    assert args.world_size == 2 and args.process_index == 0 and args.train_batch_size == 8


def test_the_parser_of_hugging_face_reads_them(tmp_path: Path) -> None:
    flags = ["--output_dir", str(tmp_path), "--parallel", '{"pp": 2, "schedule": "gpipe"}', "--learning_rate", "0.5"]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(flags)
    assert args.plan.schedule == "gpipe" and args.learning_rate == 0.5


def test_gradient_checkpointing_is_recompute(tmp_path: Path) -> None:
    assert made(tmp_path, gradient_checkpointing=True).plan.recompute == "inline"
    assert made(tmp_path, gradient_checkpointing=True, parallel={"pp": 2, "recompute": "early"}).plan.recompute == "early"


def test_plans_are_files_in_two_forms(tmp_path: Path) -> None:
    plan = Parallel(pp=4, dp=2, schedule="chimera", microbatches=8, options={"mode": "doubling"})
    (tmp_path / "plan.json").write_text(plan_to_json(plan))
    (tmp_path / "plan.toml").write_text(
        'schema = 1\n[parallel]\npp = 4\ndp = 2\nschedule = "chimera"\nmicrobatches = 8\noptions = {mode = "doubling"}\n'
    )
    assert Parallel.of(read_plan(tmp_path / "plan.json")) == plan == Parallel.of(asked(str(tmp_path / "plan.toml")))
    assert plan_from_json(mw.plan_to_json(plan)) == plan
    assert made(tmp_path, parallel=str(tmp_path / "plan.toml"), per_device_train_batch_size=8).plan == plan


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"parallel": {"pp": 2}}', "no 'schema'"),
        ('{"schema": 2, "parallel": {"pp": 2}}', "its kind is None"),
        ('{"schema": 3, "kind": "plan", "parallel": {"pp": 2}}', "reads up to 2"),
        ('{"schema": 1, "parallel": {"pp": 2}, "pp": 2}', "unknown keys: pp"),
        ('{"schema": 1}', "no 'parallel'"),
        ("pp = 2", "not JSON"),
    ],
)
def test_plan_files_are_read_strictly(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(MeshwrightError, match=words):
        read_plan(tmp_path / "plan.json")


def test_flags_and_a_file_say_the_same(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        'schema = 1\nmodel = "gpt-tiny"\ndataset = "stdlib"\nlength = 32\n[parallel]\npp = 2\n'
        '[arguments]\nmax_steps = 5\nlearning_rate = 1e-3\nlr_scheduler_type = "cosine"\ndataloader_drop_last = true\n'
    )
    read = read_job(job)
    flags = ["--max-steps", "5", "--learning-rate", "1e-3", "--lr_scheduler_type=cosine", "--dataloader-drop-last"]
    assert flags_to_arguments(flags) == dict(read.arguments)
    assert read.parallel == {"pp": 2} and read.length == 32
    first, second = (
        read.trainer().args,
        mw.TrainingArguments(output_dir="trainer_output", parallel={"pp": 2}, **flags_to_arguments(flags)),
    )
    different = {key for key, value in asdict(first).items() if value != asdict(second)[key]}
    assert different <= {"logging_dir"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('model = "gpt-tiny"', "no 'schema'"),
        ("schema = 1", "no 'model'"),
        ('schema = 1\nmodel = "gpt-tiny"\nsteps = 3', "unknown keys: steps"),
        ('schema = 1\nmodel = "gpt-tiny"\n[arguments]\nmax_stepps = 3', "no training argument 'max_stepps'"),
        ('schema = 1\nmodel = "gpt-huge"', "there is no model 'gpt-huge'"),
        ('schema = 1\nmodel = "gpt-tiny"\ndataset = "moon"', "there is no data set 'moon'"),
        ('schema = 1\nmodel = "gpt-tiny"\n[parallel]\nqq = 3', "parallel has no 'qq'"),
        ('schema = 1\nmodel = "json:nothing"\ndataset = "stdlib"', "cannot import json:nothing"),
    ],
)
def test_jobs_are_read_strictly(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(MeshwrightError, match=words):
        read_job(tmp_path / "job.toml").trainer()
