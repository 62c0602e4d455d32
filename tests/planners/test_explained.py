"""The explanation of a plan is true: parts add up, stated changes help, and answers change where they are said to change."""

from __future__ import annotations

import json
import random
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("numpy")

import meshwright as mw
from meshwright import Cluster, Device, LayerCost, MeshwrightError, Profile
from meshwright.cli._parts.next_commands import Planned, next_commands
from meshwright.ir.cluster import Host, Link
from meshwright.ir.files.cluster_writer import cluster_to_toml
from meshwright.ir.files.profile_json import profile_to_json
from meshwright.planners import NothingFitsError
from meshwright.planners._flip_points import Answers, QuantityScale, _flip, batch_scale, signature, with_links, with_memory
from meshwright.planners._limits import Asked, PlanLimits
from meshwright.planners._nearest_fit import with_least_memory
from meshwright.report.plan_text import plan_text
from tests.support.command import app
from tests.support.paths import ROOT

SLOW = pytest.mark.slow


def problem(seed: int, *, hosts: int = 2) -> tuple[Profile, Cluster, int]:
    """A small model with random layers, on hosts of one device, and a batch. Memory is tight for every second seed."""
    choose = random.Random(seed)
    count = choose.randint(3, 4)
    layers = []
    for n in range(count):
        one = [choose.uniform(0.5, 2.0) * 1e-3 for _ in range(3)]
        times = [(t, 1.8 * t, 3.4 * t) for t in one]
        sizes = {"output_bytes": 1e6, "saved_bytes": choose.uniform(2e6, 6e6), "parameter_bytes": choose.uniform(2e6, 2e7)}
        layers.append(LayerCost(f"block {n}", *times, **sizes, transient_bytes=5e5, flops=1e9))
    profile = Profile(tuple(layers), rows=(1, 2, 4), tokens_per_row=64)
    held = sum(layer.parameter_bytes for layer in layers)
    size = choose.uniform(2.0, 5.0) * held if seed % 2 else 1e11
    device = Device("gpu", size, {"fp32": 1e13}, bytes_per_s=1e12)
    host = Host(1, Link(1e-6, 4e10), Link(1e-5, choose.choice((2e9, 1e10))))
    return profile, Cluster(devices=(device,) * hosts, hosts=(host,) * hosts), choose.choice((8, 16))


def planned(profile: Profile, cluster: Cluster, batch: int, **more: Any) -> mw.Plan:
    return mw.plan(profile, cluster, batch=batch, planner="search", **more)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=SLOW) for seed in range(4, 16) if seed != 9)])
def test_parts_add_up(seed: int) -> None:
    """In problem 9 nothing fits."""
    plan = planned(*problem(seed))
    assert sum(plan.causes.values()) == pytest.approx(plan.step_s, rel=1e-9)
    assert set(plan.causes) == {"compute", "tensor communication", "fill and drain", "sync", "update"}
    assert min(plan.causes.values()) >= -1e-12
    assert [use.total for use in plan.memory] == pytest.approx(list(plan.peak_bytes), rel=1e-9)
    assert plan.step_s >= plan.lower_bound_s > 0 and plan.name
    assert {other.row.get("schedule") for other in plan.alternatives if other.row}.isdisjoint({plan.row["schedule"]})
    for rival in plan.rivals:
        assert rival.row["seconds"] == pytest.approx(rival.step_s - plan.step_s)
    for other in plan.alternatives:
        assert other.reason.split(":")[0].split(" ")[0] in {"slower", "as", "memory", "not"}, other


@pytest.mark.parametrize(
    ("seed", "asked"),
    [(1, {"schedule": "onef1b"}), *(pytest.param(seed, {}, marks=SLOW) for seed in (0, 1, 2, 3, 4, 5, 7, 11))],
)
def test_answers_change_where_they_are_said_to(seed: int, asked: dict[str, Any]) -> None:
    """5 % beyond a flip point the answer is another one, 5 % before it is the present one."""
    profile, cluster, batch = problem(seed)

    def answer(cluster: Cluster, batch: int) -> str:
        try:
            return signature(planned(profile, cluster, batch, **asked))
        except NothingFitsError:
            return signature(None)

    plan = planned(profile, cluster, batch, explain=True, **asked)
    mine, kinds = signature(plan), set()
    for flip in plan.flips:
        more, kinds = flip["direction"] == "more", kinds | {flip["what"]}
        if flip["what"] == "batch":
            scale = batch_scale(plan, Asked(profile, cluster, None, batch, PlanLimits()))
            at = flip["size"] / scale.step
            sizes = [round(scale.step * value) for value in (scale.before(at, more=more), at, scale.beyond(at, more=more))]
            before, here, beyond = (answer(cluster, size) for size in sizes)
        else:
            change = with_links if flip["what"] == "links" else with_memory
            near, far = (0.95, 1.05) if more else (1.05, 0.95)
            nearer = flip["factor"] * near
            nearer = max(nearer, 1.0) if more else min(nearer, 1.0)
            factors = (nearer, flip["factor"], flip["factor"] * far)
            before, here, beyond = (answer(change(cluster, factor), batch) for factor in factors)
        assert before == mine, flip
        assert here != mine and beyond != mine, flip
    assert kinds or seed != 1


def test_links_are_scaled_with_cards_and_racks() -> None:
    host = Host(2, Link(1e-6, 1e10), Link(1e-5, 1e9), cards=1, rack=1)
    cluster = Cluster(hosts=(host, host), spine=Link(1e-5, 5e8))
    assert with_links(cluster, 1.0) == cluster
    twice = with_links(cluster, 2.0)
    assert twice.hosts[0] == replace(host, inside=Link(1e-6, 2e10), card=Link(1e-5, 2e9)) and twice.spine == Link(1e-5, 1e9)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in range(1, 8))])
def test_every_change_that_is_said_to_fit_fits(seed: int) -> None:
    profile, cluster, batch = problem(seed)
    asked = {"schedule": "gpipe"} if seed % 3 == 0 else {"tensor": False} if seed % 3 == 1 else {}
    small = replace(cluster, devices=tuple(replace(d, memory_bytes=2.5e7) for d in cluster.devices))
    with pytest.raises(NothingFitsError, match="no plan fits") as error:
        planned(profile, small, batch, **asked)
    assert error.value.changes, "there is always a change"
    for change in error.value.changes:
        match change:
            case {"memory_bytes": size}:
                assert size == error.value.needed_bytes and planned(profile, with_least_memory(small, size), batch, **asked)
            case {"batch": size}:
                assert size < batch and planned(profile, small, size, **asked)
            case {"without": _}:
                assert planned(profile, small, batch)


def blocks_of(saved: float) -> Profile:
    times = ((0.01, 0.016), (0.01, 0.016), (0.01, 0.015))
    block = LayerCost("block", *times, output_bytes=2e6, saved_bytes=saved, parameter_bytes=2e7)
    return Profile((block,) * 8, rows=(1, 2))


@pytest.mark.parametrize(("memory", "smaller"), [(0.6e9, 8), (0.4e9, 2)])
def test_a_smaller_batch_is_found_between_those_that_contradict_the_request(memory: float, smaller: int) -> None:
    """A batch of 1 cannot be shared by two copies: the halvings end before it."""
    host = Host(8, Link(1e-5, 5e9), Link(0.0, 1e9))
    cluster = Cluster(devices=(Device(memory_bytes=memory),) * 8, hosts=(host,))
    profile = Profile(tuple(replace(layer, output_bytes=4e7) for layer in blocks_of(4e7).layers), rows=(1, 2))
    with pytest.raises(NothingFitsError) as error:
        mw.plan(profile, cluster, planner="search", dp=2, pp=4, schedule="gpipe", batch=64)
    assert {"batch": smaller} in error.value.changes
    assert mw.plan(profile, cluster, planner="search", dp=2, pp=4, schedule="gpipe", batch=smaller).step_s > 0


def test_a_batch_is_not_halved_below_the_rows_of_a_microbatch() -> None:
    """A step without microbatches has no plan, and no bound ever ends the search for one."""
    cluster = Cluster(devices=(Device(memory_bytes=1e9),) * 4, hosts=(Host(4, Link(0.0, 5e9), Link(0.0, 5e9)),))
    with pytest.raises(NothingFitsError) as error:
        mw.plan(blocks_of(6e7), cluster, planner="search", batch=64, rows=16)
    assert all(change.get("batch", 16) >= 16 for change in error.value.changes)


def test_fewer_microbatches_are_a_change_where_rows_are_not_known() -> None:
    layer = LayerCost("block", (1.0,), (1.0,), (1.0,), output_bytes=10.0, saved_bytes=10.0, parameter_bytes=1.0)
    cluster = Cluster(devices=(Device(memory_bytes=100.0),) * 2, bandwidths=((0.0, 9.0), (9.0, 0.0)))
    asked = {"planner": "search", "schedule": "gpipe", "pp": 2, "dp": 1}
    with pytest.raises(NothingFitsError) as error:
        mw.plan(Profile((layer,) * 2), cluster, microbatches=64, **asked)
    (fewer,) = [change["microbatches"] for change in error.value.changes if "microbatches" in change]
    assert mw.plan(Profile((layer,) * 2), cluster, microbatches=fewer, **asked).step_s > 0


def test_the_tightest_worker_is_the_one_whose_device_is_the_fullest() -> None:
    """A worker on a large device holds more and has more room."""
    large, small = (Device(kind, size, {"fp32": speed}) for kind, size, speed in (("large", 4e10, 4.0), ("small", 4e8, 1.0)))
    cluster = Cluster(devices=(large, small), bandwidths=((0.0, 1e10), (1e10, 0.0)))
    plan = mw.plan(blocks_of(1e7), cluster, batch=8, planner="search", schedule="onef1b", pp=2, dp=1)
    peaks, shares = list(plan.peak_bytes), [use.total / use.reserve for use in plan.memory]
    tightest = shares.index(max(shares))
    assert plan.row["peak_bytes"] == peaks[tightest] < max(peaks)
    text = plan_text(plan, blocks_of(1e7), cluster)
    assert f"memory of the tightest worker ({tightest}), {peaks[tightest] / 1e9:.4g} of 0.4 GB" in text


def run(*flags: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["plan", *flags])
    if isinstance(found.exception, MeshwrightError):
        return 2, found.stdout, str(found.exception)
    return found.exit_code, found.stdout, found.stderr


TEXT = str(ROOT / "tests/data/bert-24-pbs-6.txt")


@pytest.fixture
def eight(tmp_path: Path) -> str:
    matrix = [[0.0 if a == b else 2.5e10 for b in range(8)] for a in range(8)]
    path = tmp_path / "matrix.json"
    path.write_text(json.dumps({"memory_bytes": [16e9] * 8, "bytes_per_s": matrix, "latency_s": 1e-5}))
    return str(path)


@pytest.mark.parametrize(
    ("flags", "what", "fix"),
    [
        (["-n", "20000"], "a step of 20000 microbatches is too long to simulate: at most 16384", "larger microbatches"),
        (["--pp", "40"], "a pipeline of 40 workers needs as many layers", "--pp 8"),
        (["--pp", "16"], "pp 16 needs 16 devices, the cluster has 8", "--pp 8"),
        (["--pp", "4", "--dp", "4"], "pp 4 x dp 4 needs 16 devices", "--dp 2"),
        (["--schedule", "chimera", "--pp", "3"], "chimera does not run with pp 3, 16 microbatches on 8 devices", "--pp 8"),
        (["--schedule", "pipedream"], "delayed parameters", "onef1b"),
        (["--schedule", "shifted", "--pp", "1"], "shifted does not run with pp 1, 16 microbatches on 8 devices", "--pp 8"),
        (["--planner", "spp", "--schedule", "chimera"], "it takes no --schedule chimera", "--planner search"),
        (["--planner", "spp", "--pp", "2"], "it takes no --pp 2", "--planner search"),
        (["--split-rows", "odd"], "one of even, uneven, ignore, got 'odd'", "--split-rows uneven"),
        (["--split-rows", "even"], "rows of a microbatch, which are not known", "--rows"),
        (["--split-rows", "even", "--rows", "6", "--dp", "4"], "4 copies cannot share the 6 rows", "--rows 4"),
        (["--batch", "30", "--microbatches", "16"], "30 cannot be cut into 16 microbatches", "--batch 16"),
        (["--batch", "32", "--planner", "search"], "in rows, but this profile does not know its rows", "microbatches"),
        (["--length", "5"], "--length is for a MODEL", "meshwright profile MODEL --length"),
        (["--precision", "bf16"], "--precision is for a MODEL", "meshwright profile MODEL --precision"),
        (["--seconds", "nan"], "nan seconds", "--seconds"),
        (["--pp", "0"], "pp must be a whole number of at least 1, got 0", "--pp 1"),
    ],
)
def test_contradictions_are_refused_with_numbers(eight: str, flags: list[str], what: str, fix: str) -> None:
    code, _, error = run("--profile", TEXT, "--cluster", eight, *flags)
    assert code == 2 and what in error and fix in error.split("try:")[1], error


def test_a_planner_without_memory_modes_names_the_search(tmp_path: Path) -> None:
    """`spp` is the default for microbatches. If its plans do not fit, the first change is the planner that has others."""
    (tmp_path / "c.toml").write_text(
        'schema = 1\n[device.v100]\nmemory = "1.0 GB"\n[[nodes]]\ncount = 2\nper_node = 4\ndevice = "v100"\n'
        "inside = {bytes_per_s = 25e9}\ncard = {bytes_per_s = 3e9}\n"
    )
    asked = ["--profile", TEXT, "--cluster", str(tmp_path / "c.toml"), "-n", "8", "--json"]
    code, out, _ = run(*asked)
    found = json.loads(out)
    assert (
        code == 3
        and found["fix"].startswith("--planner search, or devices with")
        and found["changes"][0] == {"planner": "search"}
    )
    assert run(*asked, "--planner", "search")[0] == 0


@pytest.mark.parametrize(
    "flags",
    [["--batch", "0"], ["--planner", "foo"], ["--schedule", "pipedream"], ["--pp", "64"], ["--batch", "7", "--dp", "2"], []],
)
def test_requests_are_refused_before_a_model_is_profiled(monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    monkeypatch.setattr("meshwright.cli._parts.request_layers._profiled_layers", lambda *_: pytest.fail("profiled"))
    batch = [] if not flags or "--batch" in flags else ["--batch", "8"]
    assert run("gpt-tiny", "--cluster", "laptop", *flags, *batch)[0] == 2


def test_rows_that_change_nothing_are_noted() -> None:
    """A published profile does not say how times depend on rows."""
    asked = ["--profile", TEXT, "--cluster", "2xdgx-a100", "-n", "4", "--planner", "even", "--rows", "2", "--json"]
    note = "--rows changes nothing without --split-rows even or uneven"
    for more, is_said in (([], True), (["--split-rows", "uneven"], False)):
        assert any(note in each for each in json.loads(run(*asked, *more)[1])["notes"]) is is_said


def test_a_precision_is_refused_that_a_profile_has_not(tmp_path: Path) -> None:
    """Also the one that is the default for a model; the precision of the profile itself is not refused."""
    profile, cluster, _ = problem(0)
    (tmp_path / "p.json").write_text(profile_to_json(replace(profile, precision="bf16")))
    (tmp_path / "c.toml").write_text(cluster_to_toml(cluster))
    given = ["--profile", str(tmp_path / "p.json"), "--cluster", str(tmp_path / "c.toml"), "--batch", "8", "--json"]
    code, _, error = run(*given, "--precision", "fp32")
    assert code == 2 and "--precision is for a MODEL" in error, error
    assert run(*given)[0] == run(*given, "--precision", "bf16")[0] == 0


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        (["--batch", "64", "-n", "2"], "--batch 8"),
        (["--batch", "64", "-n", "2", "--rows", "32"], "--batch 8 --rows 4"),
        (["--batch", "64", "--rows", "32"], "without --rows 32"),
    ],
)
def test_the_change_that_fits_can_be_typed(tmp_path: Path, flags: list[str], fix: str) -> None:
    """Rows that follow from --batch and --microbatches are changed by flags that do not contradict each other."""
    profile, cluster, _ = problem(0)
    small = replace(cluster, devices=tuple(replace(d, memory_bytes=1.5e8) for d in cluster.devices))
    (tmp_path / "p.json").write_text(profile_to_json(profile))
    (tmp_path / "c.toml").write_text(cluster_to_toml(small))
    given = ["--profile", str(tmp_path / "p.json"), "--cluster", str(tmp_path / "c.toml"), "--planner", "search", "--json"]
    code, text, _ = run(*given, *flags)
    found = json.loads(text)
    assert code == 3 and fix in found["fix"].split(", or "), found
    keys = {"--batch": "batch", "--rows": "rows"}
    if fix.startswith("without"):
        assert {"without": fix.removeprefix("without ")} in found["changes"]
        assert run(*given, *flags[:2])[0] == 0
    else:
        words = fix.split()
        assert dict(zip([keys[word] for word in words[::2]], map(int, words[1::2]), strict=True)) in found["changes"]
        assert run(*given, *fix.split(), *flags[2:4])[0] == 0


def test_requests_of_a_microbatch_choose_the_search(eight: str) -> None:
    """A schedule that was asked for is never ignored, whatever the default planner."""
    code, text, _ = run("--profile", TEXT, "--cluster", eight, "-n", "8", "--schedule", "chimera", "--pp", "8", "--json")
    found = json.loads(text)
    assert code == 0 and found["parallel"]["schedule"] == "chimera" and found["parallel"]["pp"] == 8
    kinds = {"step_s": float, "lower_bound_s": float, "gap": float, "planning_s": float, "parallel": dict, "stages": list}
    assert all(isinstance(found[key], kind) for key, kind in kinds.items())
    assert len(found["peak_bytes"]) == 8 and all(0 < peak <= 16e9 for peak in found["peak_bytes"])
    for stage in found["stages"]:
        first, last = stage["layers"]
        assert first <= last and stage["width"] == len(stage["devices"]) and 0 <= stage["recompute"] <= 1
    assert all({"plan", "step_s", "reason"} <= set(other) for other in found["alternatives"])


def test_rows_of_a_text_profile_limit_widths(eight: str) -> None:
    code, text, _ = run("--profile", TEXT, "--cluster", eight, "-n", "8", "--rows", "3", "--split-rows", "even", "--json")
    assert code == 0 and all(stage["width"] in (1, 3) for stage in json.loads(text)["stages"])


def test_the_next_commands_run(eight: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    given = ["--profile", TEXT, "--cluster", eight, "--microbatches", "8", "--planner", "search", "--no-explain"]
    code, text, _ = run(*given)
    assert code == 0
    steps = [line.strip() for line in text.split("next:")[1].splitlines() if line.strip()]
    write = shlex.split(steps[0].replace("-o plan.json", f"-o {file}"))
    assert (
        "--no-explain" in write
        and write[:2] == ["meshwright", "plan"]
        and CliRunner().invoke(app, write[1:]).exit_code == 0
        and file.exists()
    )
    look = shlex.split(steps[1].replace("plan.json", str(file)))
    done = CliRunner().invoke(app, look[1:])
    assert look[:2] == ["meshwright", "simulate"] and done.exit_code == 0, done.output


@pytest.mark.parametrize(("mode", "drops"), [("box", True), ("line", False)])
def test_ranks_that_divide_rows_drop_a_short_last_step(mode: str, drops: bool) -> None:
    """The data set of a preset does not divide by the batch, so `train` would refuse the command."""
    parallel = {"pp": 1, "dp": 1, "tp": 2, "tensor": mode}
    plan = mw.Plan("search", (mw.PlanStage(0, 1, (0, 1)),), 1, 1.0, 1.0, (1.0,), parallel=parallel)
    planned = Planned(plan, problem(0)[1], "laptop", "gpt-tiny", None, None, "fp32", 8, Path("plan.json"))
    *_, train = next_commands(cast(typer.Context, None), planned)
    assert train.startswith("meshwright train gpt-tiny") or "torchrun" in train
    assert ("--dataloader-drop-last" in train) is drops


GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
VIT = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 16, "intermediate_size": 16}
VIT |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}


def printed_training(tmp_path: Path, config: dict[str, Any]) -> str:
    """The command that trains a Hugging Face configuration, as `plan` prints it. Without that speed layers would be timed."""
    model, cluster, plan = (tmp_path / name for name in ("config.json", "cluster.toml", "plan.json"))
    model.write_text(json.dumps(config))
    one = Device("gpu", 1e10, {"fp32": 1e13}, bytes_per_s=1e12)
    cluster.write_text(cluster_to_toml(Cluster(devices=(one,), hosts=(Host(1, Link(), Link()),))))
    code, text, error = run(str(model), "--cluster", str(cluster), "--batch", "4", "--no-explain", "-o", str(plan))
    assert code == 0, error
    return text.splitlines()[-1].strip()


def test_the_printed_training_of_a_text_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = shlex.split(printed_training(tmp_path, GPT2))
    assert words[:2] == ["meshwright", "train"] and words[words.index("--dataset") + 1] == "stdlib"
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0 and "20 steps" in done.output, (done.output, done.exception)


def test_a_data_set_that_nobody_knows_is_a_placeholder(tmp_path: Path) -> None:
    train = printed_training(tmp_path, VIT)
    assert "--dataset DATASET" in train and "# DATASET: rows for this model, for example package.module:function" in train
    assert shlex.split(train, comments=True)[-2:] == ["--max-steps", "20"], "a shell leaves the note out"


def test_each_host_starts_as_many_processes_as_it_has_devices() -> None:
    """torchrun numbers ranks host by host: with 4 processes on the host of 2 devices, rank 2 would be on the wrong host."""
    stages = tuple(mw.PlanStage(n, n, (n,)) for n in range(7))
    plan = mw.Plan("search", stages, 1, 1.0, 1.0, (1.0,) * 7, parallel={"pp": 7})

    def launched(*counts: int) -> list[str]:
        hosts = tuple(Host(count, Link(1e-6, 1e9), Link(1e-5, 1e9)) for count in counts)
        cluster = Cluster(devices=(Device(),) * sum(counts), hosts=hosts)
        planned = Planned(plan, cluster, "c.toml", "gpt-tiny", None, None, "fp32", 8, Path("plan.json"))
        return [step for step in next_commands(cast(typer.Context, None), planned) if "meshwright train" in step]

    small, large = launched(2, 2, 4, 4)
    assert small.startswith("torchrun --nnodes 3 --node-rank N --nproc-per-node 2 ") and "# N: 0 to 1, the number of" in small
    assert large.startswith("torchrun --nnodes 3 --node-rank 2 --nproc-per-node 4 "), "the fourth host has no rank of the plan"
    (equal,) = launched(4, 4)
    assert equal.startswith("torchrun --nnodes 2 --node-rank N --nproc-per-node 4 ") and "MASTER: the address of" in equal
    assert launched(8)[0].startswith("meshwright train")


def test_a_single_device(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"memory_bytes": [64e9], "bytes_per_s": [[0]], "latency_s": 0.0}))
    for planner in ("even", "spp", "search"):
        code, text, _ = run("--profile", TEXT, "--cluster", str(path), "-n", "4", "--planner", planner, "--json")
        found = json.loads(text)
        assert code == 0 and [stage["devices"] for stage in found["stages"]] == [[0]]


def test_earlier_errors_are_the_band(tmp_path: Path, eight: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.report.prediction_log import keep_prediction

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep_prediction("", 1.3, 1.0)
    flags = ["--profile", TEXT, "--cluster", eight, "-n", "8", "--planner", "search", "--no-explain"]
    assert json.loads(run(*flags, "--json")[1])["error"] == pytest.approx(0.3)
    text = run(*flags)[1]
    assert "1 earlier run" in text and "uncertain by 30%" in text


def test_tensor_modes_that_cannot_run_are_never_returned() -> None:
    """The planner asks whether the model can run under the mode of a plan, marks what cannot, and takes the next best."""
    profile, cluster, batch = problem(1, hosts=4)
    profile = replace(profile, layers=tuple(replace(layer, saved_bytes=4e7) for layer in profile.layers))
    cluster = with_links(cluster, 50.0)
    cluster = replace(cluster, devices=tuple(replace(d, memory_bytes=3.5e8) for d in cluster.devices))
    free = planned(profile, cluster, batch, pp=1, dp=1)
    assert free.parallel["tp"] > 1
    asked: list[tuple[Any, Any]] = []

    def refusal(keywords: Any, rows: int | None) -> str | None:
        asked.append((keywords["tp"], rows))
        return "3 heads do not divide by 4" if keywords["tp"] == 4 else None

    found = planned(profile, cluster, batch, pp=1, dp=1, refusal=refusal)
    assert found.parallel.get("tp", 1) != 4 and asked
    assert "not runnable: 3 heads do not divide by 4" in {other.reason for other in found.alternatives}


@pytest.mark.parametrize("microbatches", [["-n", "8"], ["-n", "8", "--explain"], ["-n", "4", "--batch", "8"]])
def test_the_default_planner_is_that_of_the_help(tmp_path: Path, microbatches: list[str]) -> None:
    profile, cluster, _ = problem(0)
    (tmp_path / "p.json").write_text(profile_to_json(profile))
    (tmp_path / "c.toml").write_text(cluster_to_toml(cluster))
    rows = [] if "--batch" in microbatches else ["--rows", "4"]
    given = ["--profile", str(tmp_path / "p.json"), "--cluster", str(tmp_path / "c.toml"), "--json"]
    code, text, error = run(*given, *microbatches, *rows)
    assert code == 0, error
    assert json.loads(text)["planner"] == ("spp" if microbatches == ["-n", "8"] else "search")


def test_verify_is_said_to_need_a_model_without_dropout() -> None:
    """Devices that share rows draw their own random numbers, so no single process is comparable."""
    profile, cluster, _ = problem(0)
    for widths, draws, said in (((2, 1), True, True), ((2, 1), False, False), ((1, 1), True, False)):
        found = replace(planned(profile, cluster, 16), parallel={"pp": 2, "width": list(widths)})
        asked = Planned(found, cluster, "c.toml", "gpt-tiny", None, None, "fp32", 16, Path("p.json"), None, lambda d=draws: d)
        (line,) = [line for line in next_commands(typer.Context(typer.main.get_command(app)), asked) if "verify" in line]
        assert ("# without dropout" in line) is said


@dataclass
class Islands:
    """Answers that are another plan at some values only."""

    scale: QuantityScale
    others: set[int]

    def same(self, value: float) -> bool:
        return round(value) not in self.others


@pytest.mark.parametrize(("others", "found"), [({20}, None), ({20, *range(31, 41)}, 31), (set(range(18, 41)), 18)])
def test_a_single_value_with_another_answer_does_not_hide_those_beyond(others: set[int], found: float | None) -> None:
    """The first look is at 20, which is alone: neither 19 nor 21 have another answer."""
    scale = QuantityScale("batch", lambda _: cast(Asked, None), 10, 1)
    assert _flip(cast(Answers, Islands(scale, others)), more=True) == found


def test_layers_without_time_or_memory_are_planned() -> None:
    """A plan without any time has no ratios to others, and a device without memory no share that is used."""
    idle = Profile(tuple(LayerCost(f"{n}", (0.0,), (0.0,), (0.0,), output_bytes=0.0) for n in range(4)))
    three = Cluster(devices=(Device("gpu", 1e9),) * 3)
    for planner in ("even", "spp", "search"):
        assert mw.plan(idle, three, microbatches=4, planner=planner).step_s == 0.0
    mixed = Cluster(devices=(Device("gpu", 1e9), Device("gpu", 0.0)))
    layers = Profile(tuple(LayerCost(f"{n}", (1.0,), (1.0,), (1.0,), output_bytes=1e3, parameter_bytes=1e3) for n in range(4)))
    assert mw.plan(layers, mixed, microbatches=4, planner="search").parallel["ranks"] == [0]
    none = Cluster(devices=(Device("gpu", 0.0),) * 2)
    assert mw.plan(idle, none, microbatches=4, planner="search").step_s == 0.0
