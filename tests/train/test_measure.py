"""Measured plans: bytes against an independent count, traced steps of a real run, the file of a measurement, the verb."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from meshwright import Lane, MeshwrightError, Timeline, costs_from_json, measure, measurement_from_json, measurement_to_json
from meshwright.runtime.launch.workers import Workers
from meshwright.train.loop.traced_steps import Traced
from meshwright.train.setup.captured_layers import through
from tests.support.command import app
from tests.support.trainers import Plain, gpt2, ours, text, vectors

ROWS = [(torch.full((8,), float(i)), torch.ones(8)) for i in range(64)]
FLOAT = 4


def two_stages(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Sequential(nn.Linear(16, 8), nn.Identity()))


PLANS = [{"pp": 2}, {"pp": 2, "schedule": "chimera"}, {"pp": 2, "dp": 2}, {"pp": 2, "recompute": "inline"}]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_bytes_are_those_of_a_count_by_hand(plan: dict[str, Any], tmp_path: Path, workers: Workers) -> None:
    """Two rows per microbatch, whatever the copies: what a Linear, a tanh and a mean of squares keep."""
    rows, batch = 2, 8
    found = measure(ours(two_stages(), tmp_path, ROWS, workers, parallel={**plan, "microbatches": 4},
                         per_device_train_batch_size=batch), steps=1)  # fmt: skip
    first, second = found.costs
    hidden = rows * 16 * FLOAT
    assert first.activation_bytes == rows * 8 * FLOAT + hidden  # the Linear's input, what tanh returned
    again = 2 if "recompute" in plan else 1  # a stage that runs twice has a copy of the target
    assert second.activation_bytes == hidden + again * rows * 8 * FLOAT  # the Linear's input, what the loss is of
    assert (first.output_bytes, first.gradient_bytes) == (hidden, hidden)
    assert (second.output_bytes, second.gradient_bytes) == (0, 0)
    assert [first.parameter_bytes, second.parameter_bytes] == [(8 * 16 + 16) * FLOAT, (16 * 8 + 8) * FLOAT]
    assert first.forward_s > 0 and second.backward_s > 0 and found.copies == plan.get("dp", 1)


def test_bytes_of_a_captured_model_are_what_its_graph_holds(tmp_path: Path) -> None:
    """Against a walk through the autograd graph, which knows nothing of hooks."""
    trainer = ours(gpt2(), tmp_path, text(), parallel={"microbatches": 2})
    [cost] = measure(trainer, steps=1).costs
    assert trainer.prepared is not None
    layers, example = trainer.prepared.open(trainer.module), trainer.reader.source(trainer.train_dataset).example(4)
    assert isinstance(example, dict)
    loss, *_ = through(layers, example)
    weights = [*trainer.module.parameters(), *trainer.module.buffers(), *example.values()]
    others = {t.untyped_storage().data_ptr() for t in weights}
    held = {s.data_ptr(): s.nbytes() for s in saved_in(loss) if s.data_ptr() not in others}
    assert cost.activation_bytes == sum(held.values()) > 100_000
    assert cost.parameter_bytes == sum(p.numel() * FLOAT for p in trainer.module.parameters())


def saved_in(loss: Tensor) -> list[torch.UntypedStorage]:
    """The memory of all tensors that the nodes of a graph have saved."""
    todo, seen, found = [loss.grad_fn], set(), []
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            value = getattr(node, name) if name.startswith("_saved_") else None
            if isinstance(value, Tensor) and (value.dim() or value.dtype is not torch.float64):  # a number of Python is one
                found.append(value.untyped_storage())
        todo += [following for following, _ in node.next_functions]
    return found


def test_traced_steps_leave_a_run_as_it_is(tmp_path: Path, workers: Workers) -> None:
    """Losses and weights bit for bit; the trace has four steps, the measurement the last of them."""
    found = []
    for traced in (None, Traced(tmp_path / "trace.json")):
        trainer = ours(two_stages(), tmp_path / "run", ROWS, workers, parallel={"pp": 2, "microbatches": 4}, max_steps=8)
        trainer.traced = traced
        trainer.train()
        found.append(([entry.get("loss") for entry in trainer.state.log_history], list(trainer.module.parameters())))
    (plain, before), (losses, after) = found
    assert plain == losses and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    kept = measurement_from_json((tmp_path / "run" / "measurement.json").read_text())
    assert kept.steps == (3, 6) and kept.timeline.workers == 2
    forwards = [str(span.entry) for span in kept.timeline.spans if span.lane is Lane.COMPUTE and "0F" in str(span.entry)]
    assert forwards == ["0F0", "0F1", "0F2", "0F3"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {f"0F{mb}" + (f"#{mb // 4}" if mb // 4 else "") for mb in range(16)} <= names and "0F16#4" not in names


def test_ranks_that_share_a_worker_are_measured_as_one(tmp_path: Path, workers: Workers) -> None:
    """Losses bit for bit; a worker's parts weigh what its rank holds: less than the whole, more than a half of it."""
    losses, plan = [], {"pp": 2, "tp": 2, "microbatches": 2}
    for traced in (None, Traced(tmp_path / "trace.json")):
        trainer = ours(gpt2(), tmp_path / "run", text(), workers, parallel=plan, max_steps=5)
        trainer.traced = traced
        trainer.train()
        losses.append([entry.get("loss") for entry in trainer.state.log_history])
    assert losses[0] == losses[1]
    kept = measurement_from_json((tmp_path / "run" / "measurement.json").read_text())
    assert kept.timeline.workers == 2 and kept.copies == 1
    forwards = [str(span.entry) for span in kept.timeline.spans if span.lane is Lane.COMPUTE and "F" in str(span.entry)]
    assert sorted(forwards) == ["0F0", "0F1", "1F0", "1F1"]
    whole = sum(p.numel() * FLOAT for p in gpt2().parameters()) + 256 * 16 * FLOAT  # the tied table is on both workers
    assert whole / 2 < sum(cost.parameter_bytes for cost in kept.costs) < 0.6 * whole


@pytest.mark.parametrize(("steps", "traced"), [(1, (1, 1)), (3, (1, 3)), (5, (2, 5))])
def test_a_short_run_traces_its_last_steps(steps: int, traced: tuple[int, int], tmp_path: Path) -> None:
    trainer = ours(two_stages(), tmp_path, ROWS, max_steps=steps)
    trainer.traced = Traced()
    trainer.train()
    kept = measurement_from_json((tmp_path / "measurement.json").read_text())
    assert kept.steps == traced and kept.costs[0].activation_bytes > 0 and kept.costs[0].forward_s > 0
    ours(two_stages(), tmp_path, ROWS, max_steps=1).train()
    assert not (tmp_path / "measurement.json").exists()  # a new run has measured nothing


@pytest.mark.parametrize("wrong", [{"first": 0}, {"steps": 0}, {"steps": True}])
def test_steps_that_cannot_be_traced_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(MeshwrightError, match="whole number of at least 1"):
        Traced(**wrong)


def test_a_measurement_comes_back_from_its_file(tmp_path: Path) -> None:
    found = measure(ours(Plain(), tmp_path, vectors(64)), steps=1)
    text_ = measurement_to_json(found)
    assert measurement_from_json(text_) == found
    data = json.loads(text_)
    for change, reason in [
        ({"costs": {"stages": data["costs"]["stages"] * 2}}, "has costs for 2 stages"),
        ({"steps": [4, 3]}, "steps 4 to 3 are an empty range"),
        ({"timeline": 5}, "'timeline' of a measurement"),
        ({"schema": 9}, "this version reads up to 1"),
        ({"more": 1}, "unknown keys: more"),
    ]:
        with pytest.raises(MeshwrightError, match=reason):
            measurement_from_json(json.dumps({**data, **change}))


def called(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), catch_exceptions=True)


def test_the_verb_reads_a_run_and_its_costs_are_read_by_others(tmp_path: Path) -> None:
    run, costs, both = tmp_path / "run", tmp_path / "costs.json", tmp_path / "both.json"
    job = (
        "tests.support.trainers:Plain",
        "--dataset",
        "tests.support.trainers:vectors",
        "--max-steps",
        "6",
        "--save-strategy",
        "no",
    )
    trained = called("train", *job, "--output-dir", str(run), "--trace", str(tmp_path / "trace.json"))
    assert trained.exit_code == 0, trained.output
    assert "trace.json" in trained.output and (tmp_path / "trace.json").exists()
    done = called("measure", str(run), "-o", str(costs), "--trace", str(both))
    assert done.exit_code == 0, done.output
    assert "bottleneck: " in done.output and "predicted " in done.output
    assert {"predicted", "measured"} <= {e["args"]["name"] for e in json.loads(both.read_text())["traceEvents"] if e["ph"] == "M"}
    [row] = costs_from_json(costs.read_text())
    assert row.activation_bytes > 0 and row.parameter_bytes == sum(p.numel() * FLOAT for p in Plain().parameters())
    simulated = called("simulate", "gpipe", "-w", "1", "-n", "2", "--costs", str(costs), "--json")
    peak = json.loads(simulated.output)["workers"][0]["peak_bytes"]
    assert peak == 2 * row.activation_bytes + 2 * row.parameter_bytes  # of two microbatches; weights and their gradients
    compared = called("compare", "-w", "1", "-n", "2", "--costs", str(costs), "--json")
    assert compared.exit_code == 0 and json.loads(compared.output)["rows"]
    numbers = json.loads(called("measure", str(run), "--json").output)
    assert numbers["steps"] == [3, 6] and numbers["bottleneck"]["sentence"] and numbers["versus"]["unmatched"] == 0
    assert numbers["costs"][0]["activation_bytes"] == row.activation_bytes


def test_the_verb_runs_a_model_with_the_flags_of_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("tests.support.trainers:Plain", "--dataset", "tests.support.trainers:vectors", "--microbatches", "2", "--steps", "1")
    done = called("measure", *words, "--per-device-train-batch-size", "4", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["microbatches"] == 2 and "capture: " in done.stderr
    assert not list(tmp_path.iterdir())  # nothing is written unless it is asked for


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["."], "not a run with --trace"),
        ([".", "--pp", "2"], "--pp would have no effect"),
        ([".", "--max-steps", "2"], "--max-steps would have no effect"),
        (
            ["tests.support.trainers:Plain", "--dataset", "tests.support.trainers:vectors", "--steps", "0"],
            "steps must be a whole number of at least 1",
        ),
        (["tests.support.trainers:Plain", "--dataset", "tests.support.trainers:vectors"], "too short to measure"),
        (["gpt-tiny", "-o", "/nonexistent/costs.json"], "cannot write"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = called("measure", *words)
    assert isinstance(done.exception, MeshwrightError) and reason in str(done.exception)


def test_a_timeline_of_the_predicted_step_matches(tmp_path: Path) -> None:
    """Every action of the schedule is in the measured step once."""
    found = measure(ours(two_stages(), tmp_path, ROWS, parallel={"microbatches": 4}), steps=1)
    assert isinstance(found.timeline, Timeline)
    names = [str(span.entry) for span in found.timeline.spans if span.lane is Lane.COMPUTE and "U" not in str(span.entry)]
    assert sorted(n for n in names if n[1] in "FB") == sorted(f"0{op}{mb}" for op in "FB" for mb in range(4))
