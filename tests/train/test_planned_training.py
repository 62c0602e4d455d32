"""Plans as planners write them are trained as planned: their lists, their ranks, on local workers and under torchrun."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2LMHeadModel
from typer.testing import CliRunner

import meshwright as mw
from meshwright import MeshwrightError, Parallel, StageCost, plan_file_json, schedules
from meshwright.ir.action import actions
from meshwright.ir.plan.planned_file import parallel_input
from meshwright.ir.timeline import Lane
from meshwright.planners._planned_text import planned_text
from meshwright.report.prediction_log import earlier_errors
from meshwright.runtime.launch import torchrun as torchrun_job
from meshwright.runtime.launch.torchrun import _Exit, _refuse_other_members, _wait_idle
from meshwright.runtime.watchdog.board import Board
from meshwright.runtime.watchdog.failure import Failure, FailureKind
from meshwright.train.auto.planned_inputs import _crowd
from meshwright.train.models.small_models import mlp, mlp_batch
from meshwright.train.setup.captured_layers import listed_layers
from meshwright.train.setup.where import refuse_world
from tests.conftest import Pool
from tests.support.command import app
from tests.support.paths import ROOT, SUPPORT
from tests.support.trainers import distance, gpt2, ours, series, text

COSTS = tuple(StageCost(f, i, w) for f, i, w in ((0.02, 0.04, 0.01), (0.006, 0.03, 0.02), (0.04, 0.014, 0.018)))
AUTO = {"variant": "auto", "memory": 5}


def planned(tmp_path: Path, **more: Any) -> tuple[Path, Parallel]:
    """A plan whose order costs have shaped, as a file."""
    plan = Parallel(pp=3, schedule="zero_bubble", options=AUTO, microbatches=4, costs=COSTS, **more)
    kept = schedules.with_order(plan)
    path = tmp_path / "plan.json"
    path.write_text(plan_file_json(kept, predicted={"step_s": 0.4, "lower_bound_s": 0.3, "peak_bytes": [1.0, 1.0, 1.0]}))
    return path, kept


def test_a_planned_zero_bubble_trains_in_exactly_its_planned_lists(pool: Pool, tmp_path: Path) -> None:
    """What ran is traced on the ranks: the compute of each worker, in the order in which it began."""
    path, plan = planned(tmp_path, ranks=(4, 0, 2))
    assert plan.order is not None
    unshaped = schedules.build("zero_bubble", workers=3, microbatches=4, **AUTO)
    assert plan.order.lists != unshaped.lists, "built again without its costs, it would be another order"
    trainer = ours(gpt2(), tmp_path / "run", text(), pool.started(), parallel=str(path), max_steps=6)
    found = mw.measure(trainer, steps=1).timeline
    for worker, wanted in enumerate(plan.order.lists):
        spans = sorted((s for s in found.spans if s.worker == worker and s.lane is Lane.COMPUTE), key=lambda span: span.start_s)
        ran = [str(a._replace(mb=a.mb % 4)) for s in spans for a in actions(s.entry) if a.op.value in "FBIW"]
        assert ran == [str(a) for entry in wanted for a in actions(entry)]


def test_a_run_is_resumed_on_other_ranks(pool: Pool, tmp_path: Path) -> None:
    """Trained on shuffled ranks with idle ones, stopped, evaluated, and resumed on others: the losses of a run without ranks."""
    plan: dict[str, Any] = {"pp": 2, "dp": 2, "dp_mode": "zero-1", "microbatches": 2}
    workers, more = pool.started(), {"eval_dataset": text(8), "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    straight, first, second = (gpt2(n_layer=2) for _ in range(3))
    plain = ours(straight, tmp_path / "plain", text(), workers, parallel=plan, **more)
    plain.train()
    before = ours(first, tmp_path / "run", text(), workers, parallel={**plan, "ranks": (5, 1, 3, 6)}, **more)
    before.train()
    wanted = series(plain.state.log_history, "loss")
    assert series(before.state.log_history, "loss") == pytest.approx(wanted, rel=1e-5)
    assert before.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    assert distance(first, straight) < 1e-5
    after = ours(second, tmp_path / "run", text(), workers, parallel={**plan, "ranks": (0, 2, 1, 3)}, **more)
    after.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert series(after.state.log_history, "loss") == pytest.approx(wanted, rel=1e-5)
    assert distance(second, straight) < 1e-5


def test_stages_of_unequal_width_run_in_the_order_of_spp(pool: Pool) -> None:
    """Also with rows that no team divides: 7 rows in 3 microbatches."""
    costs = [StageCost(0.02, 0.02, 0.02, output_bytes=1e6, gradient_bytes=1e6)] * 3
    for options in ({}, {"strict": False}):
        plan = {"pp": 3, "width": (2, 1, 1), "schedule": "listed", "microbatches": 3, "options": options, "costs": costs}
        found = pool.verify(mlp, few_rows, steps=2, **plan)
        assert found.passed, found.problems or found.worst


def few_rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return mlp_batch(step, rows=7)


def test_a_chosen_plan_runs(pool: Pool, tmp_path: Path) -> None:
    """From a planner's stages to a plan file to training: cuts, widths and devices."""
    stages = (mw.PlanStage(0, 6, (3, 1)), mw.PlanStage(7, 15, (4,)))
    plan = schedules.with_order(mw.runnable(mw.Plan("spp", stages, 4, step_s=1.0, lower_bound_s=1.0, peak_bytes=(0.0,) * 3)))
    found = pool.verify(mlp, mlp_batch, steps=2, **plan.given() | {"options": None})
    assert found.passed and found.parallel["ranks"] == (3, 1, 4) and found.schedule == "listed"
    assert listed_layers(mlp(), 2, (7,)).starts == (0, 7, 16)


def test_cuts_that_a_list_of_layers_cannot_have_are_refused() -> None:
    for cuts, said in (((0,), "does not cut 16 layers into 2 stages"), ((16,), "from 1 to 15"), (("a.b",), "names modules")):
        with pytest.raises(MeshwrightError, match=said):
            listed_layers(mlp(), 2, cuts)
    with pytest.raises(MeshwrightError, match="does not cut 16 layers into 3 stages"):
        listed_layers(mlp(), 3, (5,))


def test_a_plan_for_another_batch_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan_file_json(Parallel(pp=2), made_for={"batch": 64, "precision": "fp32"}))
    mw.TrainingArguments(output_dir=str(tmp_path), parallel=str(path), per_device_train_batch_size=64, report_to="none")
    assert not caplog.records
    mw.TrainingArguments(output_dir=str(tmp_path), parallel=str(path), per_device_train_batch_size=32, report_to="none")
    assert "was made for other inputs, so its prediction does not hold: batch was 64, is 32" in caplog.text


def made(tmp_path: Path, name: str = "plan.json", **made_for: Any) -> str:
    """A plan for one worker with a prediction, as a file. The digest of `parallel` is its own, or that of another one."""
    path, plan = tmp_path / name, Parallel(microbatches=2)
    if made_for.get("parallel", "edited") != "edited":
        made_for["parallel"] = parallel_input(plan)
    elif "parallel" in made_for:
        made_for["parallel"] = parallel_input(Parallel(microbatches=4))
    path.write_text(plan_file_json(plan, predicted={"step_s": 0.5, "error": 0.25}, made_for=made_for))
    return str(path)


def facts() -> dict[str, Any]:
    """What the planner writes into `made_for` for the model and the data of these tests."""
    columns = {name: torch.tensor([row[name] for row in text()[:2]]) for name in text()[0]}
    machine = mw.Cluster(devices=(mw.Device("core", 4e9, {"fp32": 1e10}, bytes_per_s=1e10),) * 2)
    profile = mw.profile_model(gpt2(), columns, rows=(1, 2), cluster=machine, estimate=True)
    found = mw.plan(profile, machine, batch=8, planner="search")
    return dict(json.loads(planned_text(found, profile, machine, batch=8))["made_for"])


def test_a_run_of_a_plan_file_is_compared_with_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kept for the band if the file fits the run, and if not, it is said why."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fits = facts()
    assert {"batch", "length", "model", "parallel", "precision"} <= set(fits), "what a run can compare"

    def trained(**changed: Any) -> mw.Trainer:
        path = made(tmp_path, **{**fits, **changed})
        found = ours(gpt2(), tmp_path / "run", text(), None, parallel=path, per_device_train_batch_size=8, max_steps=3)
        metrics[:] = [found.train().metrics]
        return found

    metrics: list[dict[str, float]] = []
    trainer = trained()
    assert (metrics[0]["predicted_step_time"], metrics[0]["predicted_error"]) == (0.5, 0.25) and not trainer.other_inputs
    assert len(earlier_errors("core")) == 1 and not (tmp_path / "run" / "plan.json").exists()
    assert "was made for" not in caplog.text
    other_model = {"digest": "0", "text": "9 layers with 1 MB of parameters"}
    changes = {"length": (7, "length was 7, is 16"), "model": (other_model, "model was '9 layers with 1 MB of parameters', is '")}
    changes["profile"] = ({"device": "a100"}, "device was 'a100', is 'core of ")
    for name, (value, said) in changes.items():
        caplog.clear()
        trainer = trained(**{name: value})
        assert "predicted_step_time" not in metrics[0] and said in trainer.other_inputs[0]
        assert f"the plan was made for other inputs, so its prediction does not hold: {said}" in caplog.text
    caplog.clear()
    trainer = trained(parallel="edited")
    assert "predicted_step_time" not in metrics[0] and trainer.other_inputs == ("parallel was 'as planned', is 'edited'",)
    assert "its prediction does not hold: parallel was 'as planned', is 'edited'" in caplog.text
    assert len(earlier_errors("core")) == 1 and not earlier_errors("a100"), "only what fits is kept"


def test_a_run_with_gradient_checkpointing_is_not_compared_with_a_plan_without_recompute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = made(tmp_path, profile={"device": "core"})
    more = {"per_device_train_batch_size": 8, "max_steps": 2, "gradient_checkpointing": True}
    trainer = ours(gpt2(), tmp_path / "run", text(), None, parallel=path, **more)
    metrics = trainer.train().metrics
    said = "recompute was none, is inline by gradient_checkpointing"
    assert trainer.other_inputs == (said,) and said in caplog.text
    assert "predicted_step_time" not in metrics and not earlier_errors("core")


def test_train_prints_predicted_against_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "plan.json"
    for batch, said in (
        (4, "plan: predicted step 9 s, measured"),
        (8, "not compared: the plan was made for other inputs: batch"),
    ):
        path.write_text(plan_file_json(Parallel(), predicted={"step_s": 9.0}, made_for={"batch": batch}))
        flags = ("--max-steps", "2", "--per-device-train-batch-size", "4", "--output-dir", str(tmp_path / "o"), "--length", "8")
        done = run("train", "gpt-tiny", "--plan", str(path), *flags)
        assert done.exit_code == 0 and said in done.output, (done.output, done.exception)


def test_rows_of_microbatches_are_the_batch_that_a_plan_is_made_for(tmp_path: Path) -> None:
    profile, cluster, path = (tmp_path / name for name in ("profile.json", "cluster.json", "plan.json"))
    layer = mw.LayerCost("layer", (1.0,), (1.0,), (1.0,), output_bytes=1.0, parameter_bytes=1.0)
    profile.write_text(mw.profile_to_json(mw.Profile((layer,) * 2, rows=(2,))))
    cluster.write_text('{"bytes_per_s": [[0, 1e9], [1e9, 0]], "memory_bytes": [1e9, 1e9], "latency_s": 0}')
    flags = ("-n", "3", "--rows", "2", "--planner", "spp", "--json")
    done = run("plan", "--profile", str(profile), "--cluster", str(cluster), *flags, "-o", str(path))
    assert done.exit_code == 0, done.output
    assert json.loads(path.read_text())["made_for"]["batch"] == 6


# -- the command line


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def test_simulate_shows_the_prediction_of_a_plan_beside_its_own(tmp_path: Path) -> None:
    path, plan = planned(tmp_path, ranks=(4, 0, 2))
    done = run("simulate", str(path), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert plan.order is not None
    wanted = mw.simulate(mw.lower(plan.order, costs=COSTS), COSTS).makespan_s
    assert found["makespan_s"] == pytest.approx(wanted) and found["plan"]["predicted"]["step_s"] == 0.4
    assert found["plan"]["ratio_to_predicted"] == pytest.approx(wanted / 0.4)
    shown = run("simulate", str(path)).output
    assert "ranks 4, 0, 2 (idle: 1, 3)" in shown and "predicted 0.4 s" in shown
    for flag in (["--steps", "2"], ["--workers", "3"], ["--microbatches", "8"], ["--option", "memory=3"]):
        refused = run("simulate", str(path), *flag)
        assert isinstance(refused.exception, MeshwrightError) and f"which decides {flag[0]}" in str(refused.exception)


def test_flags_that_the_costs_of_a_plan_replace_are_refused(tmp_path: Path) -> None:
    path, _ = planned(tmp_path, ranks=(4, 0, 2))
    for flag, value in (("--forward", "0.5"), ("--sync-cost", "1"), ("--split", "1:3"), ("--recompute-cost", "1")):
        refused = run("simulate", str(path), flag, value)
        assert isinstance(refused.exception, MeshwrightError) and f"which replace {flag}" in str(refused.exception)


def test_workers_without_cores_of_their_own_are_not_compared_with_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    args = mw.TrainingArguments(output_dir="o")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert _crowd(args, 2) == ()
    assert _crowd(args, 3) == ("each worker had a core of its own, 3 workers share 2 cores",)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert _crowd(args, 3) == (), "under torchrun, some ranks are on other hosts"


def test_simulate_says_whose_times_layers_take(tmp_path: Path) -> None:
    plan = Parallel(pp=2, schedule="listed", microbatches=2, costs=COSTS[:2], ranks=(1, 0))
    path = tmp_path / "plan.json"
    path.write_text(plan_file_json(plan, made_for={"profile": {"device": "core of x86_64"}}))
    assert "layers take the times of core of x86_64" in run("simulate", str(path), "--cluster", "dgx-a100").output
    assert "layers take" not in run("simulate", str(path), "--cluster", "laptop").output


def test_simulate_says_that_a_plan_was_made_for_another_cluster(tmp_path: Path) -> None:
    plan = Parallel(pp=2, schedule="listed", microbatches=2, costs=COSTS[:2], ranks=(2, 0))
    path, cluster = tmp_path / "plan.json", tmp_path / "cluster.json"
    path.write_text(plan_file_json(plan, made_for={"cluster": {"digest": "0123"}}))
    cluster.write_text('{"bytes_per_s": [[0, 1, 1], [1, 0, 1], [1, 1, 0]], "latency_s": 0.01}')
    done = run("simulate", str(path), "--cluster", str(cluster))
    assert done.exit_code == 0 and "note: priced again: cluster was '0123', is '" in done.output
    assert run("simulate", str(path)).output.count("priced again") == 0


def test_simulate_says_that_a_plan_was_edited(tmp_path: Path) -> None:
    """Its costs are those of the plan before: a moved cut or another recompute would seem to take the same time."""
    path, plan = tmp_path / "plan.json", Parallel(pp=3, microbatches=4, costs=COSTS)
    path.write_text(plan_file_json(plan, predicted={"step_s": 0.4}, made_for={"parallel": parallel_input(plan)}))
    notes = json.loads(run("simulate", str(path), "--json").output)["plan"]["notes"]
    assert not any("edited" in note for note in notes)
    data = json.loads(path.read_text())
    data["parallel"]["recompute"] = "inline"
    path.write_text(json.dumps(data))
    notes = json.loads(run("simulate", str(path), "--json").output)["plan"]["notes"]
    assert "its prediction and its costs are those of another plan: parallel was 'as planned', is 'edited'" in notes


def test_simulate_says_that_devices_are_too_small(tmp_path: Path) -> None:
    """On another cluster than that of the plan, each worker on its own devices."""
    path, cluster = tmp_path / "plan.json", tmp_path / "cluster.json"
    plan = Parallel(pp=2, microbatches=4, costs=COSTS[:2], ranks=(2, 0))
    path.write_text(plan_file_json(plan, predicted={"step_s": 0.4, "needed_bytes": [3e9, 1e9]}))
    for memory, said in (
        ((2e9, 1.0, 4e9), []),
        ((2e9, 1.0, 3.05e9), ["worker 0 needs 3 GB and a reserve"]),
        ((9e8, 1, 4e9), ["worker 1"]),
    ):
        links = {"memory_bytes": memory, "bytes_per_s": [[1e9] * 3] * 3, "latency_s": 0.0}
        cluster.write_text(json.dumps(links))
        notes = json.loads(run("simulate", str(path), "--cluster", str(cluster), "--json").output)["plan"]["notes"]
        found = [note for note in notes if "needs" in note]
        assert len(found) == len(said) and all(a.startswith(b) for a, b in zip(found, said, strict=True)), notes


def test_a_plan_for_more_devices_than_the_cluster_has_is_refused(tmp_path: Path) -> None:
    """Copies sum gradients, with and without network cards that devices share."""
    path = tmp_path / "plan.json"
    path.write_text(plan_file_json(Parallel(pp=2, dp=8, schedule="onef1b", microbatches=2, costs=COSTS[:2])))
    for name in ("dgx-a100", "laptop"):
        refused = run("simulate", str(path), "--cluster", name)
        assert isinstance(refused.exception, MeshwrightError) and "there is no device 15" in str(refused.exception), refused


@pytest.mark.slow
def test_a_plan_is_emulated_on_its_ranks(tmp_path: Path) -> None:
    path, _ = planned(tmp_path, ranks=(4, 0, 2))
    done = run("simulate", str(path), "--emulate", "stamped", "--repeat", "1", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["measured"]["modelled_makespan_s"] == pytest.approx(found["makespan_s"], rel=0.01)


@pytest.mark.slow
def test_sums_of_a_plan_are_emulated_on_its_ranks(tmp_path: Path) -> None:
    """The holders of a stage are other ranks than workers."""
    path = tmp_path / "plan.json"
    costs = [StageCost(0.01, 0.01, 0.01, sync_s=0.02)] * 4
    path.write_text(plan_file_json(Parallel(pp=4, schedule="chimera", microbatches=4, costs=costs, ranks=(4, 0, 2, 1))))
    done = run("simulate", str(path), "--emulate", "stamped", "--repeat", "1", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["measured"]["modelled_makespan_s"] == pytest.approx(found["makespan_s"], rel=0.01)


@pytest.mark.slow
def test_verify_takes_a_plan_file_and_ranks(tmp_path: Path) -> None:
    path, _ = planned(tmp_path, ranks=(2, 0, 1))
    for plan in (["--plan", str(path)], ["--pp", "2", "--ranks", "2,0"]):
        done = run("verify", "mlp", *plan, "--steps", "1", "-o", str(tmp_path / "certificate.json"))
        assert done.exit_code == 0, done.output
        assert len(json.loads((tmp_path / "certificate.json").read_text())["parallel"]["ranks"]) in (2, 3)


def test_ranks_on_the_command_line_are_numbers() -> None:
    for verb in ("verify", "train"):
        found = run(verb, "mlp", "--ranks", "1,x")
        assert isinstance(found.exception, MeshwrightError) and "--ranks takes whole numbers" in str(found.exception)
    found = run("verify", "mlp", "--pp", "2", "--ranks", "1,0,2")
    assert isinstance(found.exception, MeshwrightError) and "ranks names 3 ranks, but the plan needs" in str(found.exception)


# -- torchrun


def torchrun(count: int, *arguments: str, script: str = "torchrun_ranks.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([*command, str(SUPPORT / script), *arguments], capture_output=True, text=True, env=env, timeout=500)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2, 1), (0, 2)], ids=["rank 0 is idle", "rank 1 is idle"])
def test_ranks_under_torchrun(pool: Pool, tmp_path: Path, ranks: tuple[int, ...]) -> None:
    plan = {"pp": 2, "ranks": list(ranks)}
    done = torchrun(3, str(tmp_path / "run"), json.dumps(plan))
    assert done.returncode == 0, done.stderr[-3000:]
    found = {line[0]: line[1:] for line in map(ast.literal_eval, filter(lambda t: t.startswith("("), done.stdout.splitlines()))}
    assert set(found) == set(ranks), "an idle rank ends when the others have trained"
    assert [rank for rank, (first, *_) in found.items() if first] == [min(ranks)], "one rank logs and saves"
    model = gpt2(n_layer=2)
    local = ours(model, tmp_path / "local", text(), pool.started(), parallel={"pp": 2}, max_steps=3, eval_dataset=text(8))
    local.train()
    for _, losses, loss in found.values():
        assert losses == pytest.approx(series(local.state.log_history, "loss"), rel=1e-5)
        assert loss == pytest.approx(local.evaluate()["eval_loss"], rel=1e-5)
    assert distance(GPT2LMHeadModel.from_pretrained(tmp_path / "run" / "saved"), model) < 1e-5
    assert (tmp_path / "run" / "checkpoint-2").is_dir()


@pytest.mark.slow
def test_a_job_that_does_not_fit_its_plan_is_refused(tmp_path: Path) -> None:
    for plan, said in (({"pp": 2}, "pp 2 x dp 1 = 2 ranks, but the job has 3"), ({"pp": 2, "ranks": [0, 5]}, "runs on rank 5")):
        done = torchrun(3, str(tmp_path / "run"), json.dumps(plan))
        assert done.returncode != 0 and said in done.stderr


@pytest.mark.slow
def test_an_idle_rank_ends_with_a_job_that_fails() -> None:
    done = torchrun(4, "raises", "forward", "shared", "60", "3,1,0", script="under_torchrun.py")
    assert done.returncode != 0
    assert "rank 1 (worker 1) failed in 1F2 (stage 1): ValueError: bad weights" in done.stderr
    assert "rank 2, which is idle, stops: rank 1 (worker 1) failed in 1F2" in done.stderr
    assert "rank 3 (worker 0): " in done.stderr, "what the others did, by their ranks"


@pytest.fixture
def default_sigterm() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("default_sigterm")
@pytest.mark.parametrize("fails", [True, False])
def test_an_idle_rank_that_is_told_to_stop_reads_the_failure_first(
    fails: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A launcher stops the ranks of its host when one fails, maybe before this one has looked."""
    monkeypatch.setattr(torchrun_job, "_LINGER_S", 1.0)
    board = Board(dist.HashStore(), (0, 1))
    with _Exit(board, 2) as exit_:
        os.kill(os.getpid(), signal.SIGTERM)
        if fails:
            threading.Timer(0.3, board.post, [Failure(1, FailureKind.RAISED, "ValueError: bad weights")]).start()
        with pytest.raises(SystemExit) as ended:
            _wait_idle(board, exit_, idle=1)
    told = capfd.readouterr().err
    if fails:
        assert ended.value.code == 1 and "rank 2, which is idle, stops: " in told and "bad weights" in told
    else:
        assert ended.value.code == 143 and "rank 2, which is idle, stopped by SIGTERM" in told


def test_a_script_that_handles_sigterm_itself_does_not_block_the_watchdog() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with _Exit(Board(dist.HashStore(), (0, 1)), 0) as exit_:
            assert exit_.told_to_stop() is None
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("idle_first", [False, True])
def test_a_rank_that_is_idle_in_its_own_plan_only_is_refused(idle_first: bool) -> None:
    """Rank 1 would wait until rank 0 has finished, and rank 0 for rank 1. Whoever comes later raises, and tells the other."""
    store = dist.HashStore()
    boards = {0: Board(store, (0, 1)), 1: Board(store, (0,))}
    first, second = (1, 0) if idle_first else (0, 1)
    _refuse_other_members(boards[first], first)
    _refuse_other_members(Board(store, boards[first].members), 2)
    assert boards[first].failure() is None, "a rank with the same plan agrees, idle or not"
    with pytest.raises(MeshwrightError, match=f"different plans: rank {first} has a plan for the ranks .*, rank {second} for"):
        _refuse_other_members(boards[second], second)
    told = boards[first].failure()
    assert told is not None and told.clean and told.fix == "use the same plan file on all ranks"


@pytest.mark.slow
def test_plans_with_other_idle_ranks_are_refused_under_torchrun(tmp_path: Path) -> None:
    plans = {"by rank": [{"pp": 2, "ranks": [0, 1]}, {"pp": 1, "ranks": [0]}]}
    begun = time.monotonic()
    done = torchrun(2, str(tmp_path / "run"), json.dumps(plans))
    assert done.returncode != 0 and "ranks have different plans" in done.stderr, done.stderr[-3000:]
    assert time.monotonic() - begun < 120, "without the comparison both wait for 300 seconds"


@pytest.fixture
def third_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of rank 2 in a job of three ranks."""
    for name, value in (("RANK", "2"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "2"), ("TORCHELASTIC_USE_AGENT_STORE", "True")):
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("third_of_three")
def test_jobs_that_cannot_have_idle_ranks_are_refused_before_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshwrightError, match="the plan has 2 ranks and the job 3"):
        mw.parallelize(mlp(), mlp_batch(0), {"pp": 2, "ranks": (2, 1)})
    refuse_world(Parallel(pp=2, ranks=(2, 1)))
    with pytest.raises(MeshwrightError, match="runs on rank 3, but the job has 3 ranks"):
        refuse_world(Parallel(pp=2, ranks=(3, 1)))
    with pytest.raises(MeshwrightError, match="needs pp 2 x dp 1 = 2 ranks, but the job has 3"):
        refuse_world(Parallel(pp=2))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    refuse_world(Parallel(pp=2, ranks=(0, 1)))
    with pytest.raises(MeshwrightError, match="rank 0 is idle, but the other ranks need its process"):
        refuse_world(Parallel(pp=2, ranks=(2, 1)))


@pytest.mark.usefixtures("third_of_three")
@pytest.mark.parametrize(("ranks", "index"), [((2, 1), 1), ((0, 1), 4), ((2, 0), 1), ((2,), 0)])
def test_one_rank_of_the_plan_is_the_first(tmp_path: Path, ranks: tuple[int, ...], index: int) -> None:
    """An idle rank is never the first one: it would save a model that nobody has trained."""
    args = mw.TrainingArguments(output_dir=str(tmp_path), parallel={"pp": len(ranks), "ranks": ranks}, report_to="none")
    assert args.process_index == index
