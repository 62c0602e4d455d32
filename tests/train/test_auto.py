"""`parallel="auto"`: a plan is chosen for the model, the batch and the cluster, runs, and is compared with its prediction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch

import meshwright as mw
from meshwright import (
    Cluster,
    Device,
    LayerCost,
    Link,
    MeshwrightError,
    Parallel,
    Profile,
    TrainingArguments,
    parallelize,
    planned_file,
)
from meshwright.ir.plan.planned_file import PlannedFile
from meshwright.report import prediction_log
from meshwright.runtime.discover import device_speed
from meshwright.runtime.launch.workers import Workers
from meshwright.train.auto.auto_plan import AutoRequest, auto_request, chosen_plan
from meshwright.train.auto.found_devices import differences
from meshwright.train.auto.plan_refusal import PlanRefusal
from tests.support.paths import ROOT
from tests.support.trainers import distance, gpt2, ours, series, text

CLUSTER = """
schema = 1
[device.core]
memory = "4 GB"
fp32 = "20 GFLOPS"
reads = "8 GB/s"
launch = "50 us"
[[nodes]]
count = 1
per_node = 2
device = "core"
inside = {latency = "20 us", bandwidth = "4 GB/s"}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """Two cores that are not those of this machine, so that times are estimated and every run chooses the same plan."""
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def test_the_chosen_plan_trains_as_if_it_were_given(tmp_path: Path, cluster: Path, workers: Workers) -> None:
    model, again = gpt2(), gpt2()
    trainer = ours(model, tmp_path / "auto", text(), workers, parallel=f"auto:{cluster}", per_device_train_batch_size=4)
    output = trainer.train()
    planned = planned_file(tmp_path / "auto" / "plan.json")
    assert planned.predicted is not None and planned.made_for is not None
    assert planned.made_for["batch"] == 8 == trainer.args.rows.step, "4 rows for each of 2 devices, whatever the plan"
    assert planned.parallel == trainer.args.planned.parallel and 1 <= planned.parallel.processes <= 2
    assert output.metrics["predicted_step_time"] == planned.predicted["step_s"] > 0
    assert planned.predicted["measured_step_s"] == output.metrics["train_step_time"] > 0

    device = 8 // planned.parallel.dp
    given = str(tmp_path / "auto" / "plan.json")
    same = ours(again, tmp_path / "given", text(), workers, parallel=given, per_device_train_batch_size=device)
    same.train()
    assert series(same.state.log_history, "loss") == series(trainer.state.log_history, "loss")
    assert distance(model, again) == 0.0


def test_copied_arguments_still_choose_a_plan(tmp_path: Path, cluster: Path) -> None:
    """Else a copy would train in one process and say nothing."""
    wish = f"auto:{cluster}"
    args = TrainingArguments(output_dir=str(tmp_path), parallel=wish, report_to="none", use_cpu=True)
    assert args.to_dict()["parallel"] == wish and args.plan.processes == 1
    for copy in (replace(args, learning_rate=0.5), TrainingArguments(**args.to_dict())):
        assert copy.auto == wish and copy.planned is None


@pytest.mark.slow
def test_the_next_plan_shows_the_error_of_the_last(tmp_path: Path, cluster: Path, workers: Workers) -> None:
    first = ours(gpt2(), tmp_path / "1", text(), workers, parallel=f"auto:{cluster}", max_steps=2)
    first.train()
    device = first.args.planned.made_for["profile"]["device"]
    off = median(prediction_log.earlier_errors(device))
    assert off > 0
    second = ours(gpt2(), tmp_path / "2", text(), workers, parallel=f"auto:{cluster}", max_steps=2)
    second.train()
    assert second.args.planned.predicted["error"] == max(first.args.planned.predicted["error"], off)
    layer = LayerCost("layer", (1.0,), (1.0,), (1.0,), output_bytes=1.0, parameter_bytes=1.0)
    plan = mw.plan(Profile((layer,) * 2), Cluster(Link(), devices=(Device(),) * 2), microbatches=4)
    shown = prediction_log.with_earlier_errors(plan, device)
    assert shown.error > plan.error and (shown.parallel, shown.step_s) == (plan.parallel, plan.step_s), "only the band changes"


def test_a_damaged_log_of_predictions_is_no_error(cache: Path) -> None:
    prediction_log.keep_prediction("core", 1.1, 1.0)
    prediction_log.keep_prediction("core", 1.3, 1.0)
    prediction_log.keep_prediction("other", 9.0, 1.0)
    with prediction_log.log_file().open("a") as file:
        file.write('{"device": "core"}\n[1\n' + "[" * 5000 + '\n{"device": "core", "predicted_s": 1, "measured_s": 0}\n')
    assert prediction_log.earlier_errors("core") == pytest.approx([0.1, 0.3])
    assert prediction_log.earlier_errors("nothing") == []
    prediction_log.log_file().write_bytes(b"\xff\xfe\x00")
    assert prediction_log.earlier_errors("core") == []


def test_a_prediction_that_was_too_short_is_inside_the_band_of_its_error(cache: Path) -> None:
    """Half of the measured time is off by 100 %, as twice is. A band of 50 % would end below what was measured."""
    for predicted_s, measured_s in ((1.0, 2.0), (2.0, 1.0)):
        error = prediction_log.off_by(predicted_s, measured_s)
        low, high = prediction_log.band_of(predicted_s, error)
        assert error == 1.0 and low <= measured_s <= high
        prediction_log.keep_prediction("core", predicted_s, measured_s)
    assert prediction_log.earlier_errors("core") == [1.0, 1.0]
    line = prediction_log.comparison_line
    assert line(1.0, 2.0, 1.0) == "plan: predicted step 1 s (0.5 to 2 s), measured 2 s: too short by 100%, inside the band"
    assert line(1.0, 2.0, 0.5) == "plan: predicted step 1 s (0.6667 to 1.5 s), measured 2 s: too short by 100%, outside the band"
    assert line(1.2, 1.0, 0.0) == "plan: predicted step 1.2 s, measured 1 s: too long by 20%"


def test_refusals(tmp_path: Path, cluster: Path, workers: Workers) -> None:
    with pytest.raises(MeshwrightError, match="names no cluster"):
        TrainingArguments(output_dir=str(tmp_path), parallel="auto:")
    with pytest.raises(MeshwrightError, match="is chosen by a Trainer"):
        parallelize(gpt2(), text()[0], "auto")
    trainer = ours([gpt2()], tmp_path, text(), workers, parallel=f"auto:{cluster}")
    with pytest.raises(MeshwrightError, match="needs one module"):
        trainer.train()
    trainer = ours(gpt2(), tmp_path, text(), workers, parallel="auto:no-such-cluster")
    with pytest.raises(MeshwrightError, match="no-such-cluster"):
        trainer.train()


def test_devices_that_are_not_those_of_the_cluster() -> None:
    """Less memory than the plan needs is refused, another kind is reported, more memory and rounding are neither."""
    cluster = Cluster(Link(1e-5, 1e9), devices=(Device("a100", 80e9),) * 2)
    planned = PlannedFile(Parallel(dp=2), predicted={"peak_bytes": [40e9]})  # 37.6e9 without the reserve
    a100, small, core = Device("a100-sxm4-80gb", 79e9), Device("a100-pcie", 37e9), Device("core of x86_64", 38e9)
    assert differences("c.toml", cluster, planned, [a100, a100]) == []
    with pytest.raises(MeshwrightError, match=r"rank 1 has 37 GB of memory, but the cluster c.toml says 80 GB, .* up to 37.6 GB"):
        differences("c.toml", cluster, planned, [a100, small])
    (note,) = differences("c.toml", cluster, planned, [core, core])
    assert note.startswith("the cluster c.toml has devices a100, but ranks run on core of x86_64")


def test_a_cluster_with_more_memory_than_this_machine(
    tmp_path: Path, cluster: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_speed, "_memory", lambda device, sharers: 1e6)
    trainer = ours(gpt2(), tmp_path, text(), workers, parallel=f"auto:{cluster}")
    with pytest.raises(MeshwrightError, match=r"rank 0 has 0.001 GB of memory, but the cluster .* says 4 GB"):
        trainer.train()


def test_a_plan_that_cannot_run_the_short_last_step_is_not_chosen() -> None:
    """A box of two ranks divides the rows of microbatches: not 5 rows of a last step, nor 6 in four microbatches."""
    box = {"tp": 2, "tensor": "box", "box": [2, 1, 1], "microbatches": 1}
    example = {name: torch.tensor([row[name] for row in text()[:4]]) for name in text()[0]}
    model = gpt2()
    refusal = PlanRefusal(model, example)
    assert refusal(box, 4) is None
    refusal.last_rows = 6
    assert refusal(box, 4) is None
    assert "size 1 does not divide by 2" in str(refusal({**box, "microbatches": 4}, 4))
    refusal.last_rows = 5
    assert "size 5 does not divide by 2" in str(refusal(box, 4))
    assert refusal({"pp": 2, "microbatches": 4}, 4) is None, "a pipeline takes any rows"
    args = TrainingArguments(output_dir="out", parallel="auto", per_device_train_batch_size=4)
    assert auto_request(args, model, example, 37).epoch_rows == 37
    args.dataloader_drop_last = True
    assert auto_request(args, model, example, 37).epoch_rows == 0


@pytest.mark.parametrize(
    ("optimizer", "divisible"),
    [
        ("adamw_torch_fused", True), ("sgd", True), ("adafactor", False), ("adamw_torch_8bit", False),
        (torch.optim.AdamW, True), (torch.optim.LBFGS, False), (torch.nn.Linear, False), (lambda params: None, False),
    ],
)  # fmt: skip
def test_which_optimizers_step_on_parts(optimizer: object, divisible: bool) -> None:
    named = {"optim": optimizer} if isinstance(optimizer, str) else {}
    args = TrainingArguments(output_dir="out", parallel="auto", **named)
    assert auto_request(args, gpt2(n_layer=1), {}, own_optimizer=None if named else optimizer).divisible == divisible


def test_plans_do_not_divide_the_state_of_other_optimizers(tmp_path: Path) -> None:
    """Such plans would be refused when training starts. Here updates take most of a step, and memory is slow."""
    path = tmp_path / "slow.toml"
    path.write_text(CLUSTER.replace("8 GB/s", "20 MB/s").replace("4 GB/s", "400 GB/s").replace("20 GF", "20 TF"))
    example = {name: torch.tensor([row[name] for row in text()[:2]]) for name in text()[0]}
    request = AutoRequest(gpt2(n_layer=1), example, 2, cluster=str(path))
    divided, whole = (chosen_plan(replace(request, divisible=divisible)).parallel for divisible in (True, False))
    assert divided.mode.is_zero or divided.tp > 1
    assert not whole.mode.is_zero and whole.tp == 1


def test_a_batch_that_copies_cannot_share_is_refused(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), parallel="auto")
    with pytest.raises(MeshwrightError, match="7 rows of a step cannot be shared equally by 2"):
        args.take_plan(PlannedFile(Parallel(dp=2)), 7)


def planned_with(cluster: str) -> str:
    """The schedule and degrees that this rank gets. Only rank 0 has the file."""
    example = {name: torch.tensor([row[name] for row in text()[:2]]) for name in text()[0]}
    name = cluster if torch.distributed.get_rank() == 0 else "a file that is not here.toml"
    found = chosen_plan(AutoRequest(gpt2(n_layer=1), example, 2, cluster=name)).parallel
    return f"{found.schedule} {found.degrees}"


def test_only_rank_0_reads_the_cluster(cluster: Path, workers: Workers) -> None:
    one, other = workers.run(planned_with, str(cluster), ranks=2)
    assert one == other
    with pytest.raises(MeshwrightError, match=r"not\.toml"):
        workers.run(planned_with, "not.toml", ranks=2)


@pytest.mark.slow
def test_this_machine_is_measured(tmp_path: Path) -> None:
    """The whole way of a user: `meshwright train` measures cores and links, times layers, searches, trains, compares."""
    command = [sys.executable, "-m", "meshwright", "train", "gpt-tiny", "--plan", "auto", "--max-steps", "6"]
    command += ["--output-dir", str(tmp_path / "out"), "--per-device-train-batch-size", "4"]
    found = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "plan: predicted step" in found.stdout
    planned = planned_file(tmp_path / "out" / "plan.json")
    assert planned.made_for is not None and planned.made_for["profile"]["source"] == "measured"


@pytest.mark.slow
def test_rank_0_of_torchrun_plans_for_all(tmp_path: Path, cluster: Path) -> None:
    def run(where: str, ranks: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "29731"]
        command += [
            "-m",
            "meshwright",
            "train",
            "gpt-tiny",
            "--plan",
            where,
            "--max-steps",
            "4",
            "--output-dir",
            str(tmp_path / "o"),
        ]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)

    found = run("auto", 2)
    assert found.returncode == 0, found.stderr
    assert json.loads((tmp_path / "o" / "plan.json").read_text())["made_for"]["cluster"]["devices"] == 2
    few = run(f"auto:{cluster}", 1)
    assert few.returncode != 0 and "has 2 devices, but the job has 1 ranks" in few.stderr
