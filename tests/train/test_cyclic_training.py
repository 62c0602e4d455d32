"""`dp_mode="cyclic"` trains by the delayed rule, bit for bit, however its steps are cut into segments."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright import Parallel
from meshwright.runtime.stage.batch import Own
from meshwright.train.data.batches import Position, numbered_steps
from meshwright.train.data.collate import Collate, stacked
from meshwright.train.data.row_reader import RowReader
from meshwright.train.data.sampler import Sampler
from meshwright.train.data.step_rows import StepRows
from meshwright.train.prepared import RunRequest, prepare
from tests.conftest import Pool
from tests.support.delayed_rule import Delayed, labelled, language, split
from tests.support.paths import ROOT, SUPPORT
from tests.support.thin import slow
from tests.support.trainers import gpt2

STEPS = 8
CUTS = ["blocks.1", "blocks.2", "blocks.3"]
RULES = {"v1": ({"rule": "v1"}, None), "v2": ({}, 0), "margin 1": ({"margin": 1}, 1)}


class Wide(nn.Module):
    """A linear layer with a nonlinearity."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Conv(nn.Module):
    """A convolution with batch normalization."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Chain(nn.Module):
    """Blocks one after another, as a user writes them."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return Chain(Wide(6, 12), Wide(12, 12), Wide(12, 12), nn.Linear(12, 3))


def deep() -> nn.Module:
    torch.manual_seed(5)
    return Chain(Wide(6, 12), *(Wide(12, 12) for _ in range(4)), nn.Linear(12, 3))


def convolutions() -> nn.Module:
    torch.manual_seed(4)
    head = nn.Sequential(nn.Conv2d(5, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(80, 3))
    return Chain(Conv(1, 4), Conv(4, 5), Conv(5, 5), head)


MODELS: dict[str, Any] = {"mlp": mlp, "deep": deep, "convolutions": convolutions, "gpt2": gpt2}


def batch(name: str, step: int, rows: int) -> Any:
    random = torch.Generator().manual_seed(step)
    if name == "gpt2":
        ids = torch.randint(0, 256, (rows, 12), generator=random)
        labels = ids.clone()
        labels[: rows // 2, : 1 + step % 5] = -100
        return {"input_ids": ids, "labels": labels}
    size = (rows, 6) if name in ("mlp", "deep") else (rows, 1, 6, 6)
    return torch.randn(size, generator=random), torch.randint(0, 3, (rows,), generator=random)


def tools(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.3)


def cuts_of(name: str, stages: int) -> list[str]:
    blocks = {"gpt2": [f"transformer.h.{i}" for i in range(1, 4)], "convolutions": [*CUTS[:2], f"{CUTS[2]}.0"]}
    return blocks.get(name, [f"blocks.{i}" for i in range(1, 6)])[: stages - 1]


def stage_of(name: str, stages: int, parameter: str) -> int:
    """The stage of a parameter in the user's model; the tied embedding of GPT-2 is in the first one."""
    if name != "gpt2":
        return min(int(parameter.split(".")[1]), stages - 1)
    if parameter.startswith("transformer.h."):
        return min(int(parameter.split(".")[2]), stages - 1)
    return stages - 1 if ".ln_f." in parameter else 0


def trained(name: str, plan: dict[str, Any], segments: Sequence[int], rows: int, clip: float | None) -> Any:
    """On a rank: the weights, the losses and the learning rates after training in these segments."""
    model = MODELS[name]()
    optimizer, scheduler = tools(model)
    loss = None if name == "gpt2" else nn.functional.cross_entropy
    first = batch(name, 0, rows)
    with mw.parallelize(
        model, first, plan, optimizer=optimizer, scheduler=scheduler, loss=loss, clip=clip, device="cpu", check_capture=False
    ) as session:
        results = []
        for count in segments:
            results += session.train([batch(name, len(results) + i, rows) for i in range(count)])
        session.broadcast_weights()
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return weights, [r.loss for r in results], [r.learning_rate for r in results], [r.grad_norm for r in results]


def expected(name: str, dp: int, stages: int, margin: int | None, rows: int, clip: float | None) -> Any:
    model = MODELS[name]()
    optimizer, scheduler = tools(model)
    loss = language if name == "gpt2" else labelled
    rule = Delayed(model, dp, stages, lambda parameter: stage_of(name, stages, parameter), loss, margin)
    losses = rule.train([batch(name, step, rows) for step in range(STEPS)], optimizer, scheduler, clip)
    return {n: p.detach() for n, p in model.named_parameters()}, losses


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), f"{name}: {(found[name] - tensor).abs().max()}"


CASES = [
    ("mlp", 2, 2, "v1"),
    slow(("mlp", 2, 2, "v2"), several=True),
    slow(("mlp", 2, 2, "margin 1"), several=True),
    slow(("mlp", 3, 3, "v2"), several=True),
    slow(("mlp", 3, 3, "v1"), several=True),
    slow(("mlp", 3, 3, "margin 1"), several=True),
    ("mlp", 4, 4, "margin 1"),
    slow(("mlp", 4, 4, "v1"), several=True),
    slow(("mlp", 4, 4, "v2"), several=True),
    ("mlp", 4, 2, "v2"),
    ("convolutions", 3, 3, "v2"),
    slow(("convolutions", 4, 4, "v1"), several=True),
    ("gpt2", 2, 2, "v2"),
    slow(("gpt2", 3, 3, "v1"), several=True),
    slow(("gpt2", 4, 4, "v2"), several=True),
    slow(("deep", 6, 6, "v2"), several=True),
    slow(("deep", 6, 6, "v1"), several=True),
]


@pytest.mark.parametrize(("name", "dp", "stages", "rule"), CASES)
def test_training_equals_the_delayed_rule_in_one_process(name: str, dp: int, stages: int, rule: str, pool: Pool) -> None:
    options, margin = RULES[rule]
    rows, clip = 4 * dp, None
    plan = {"dp": dp, "dp_mode": "cyclic", "options": {**options, "chunks": stages}, "stages": cuts_of(name, stages)}
    wanted, losses = expected(name, dp, stages, margin, rows, clip)
    whole = pool.run(trained, name, plan, [STEPS], rows, clip, ranks=dp)
    for weights, found, rates, _ in whole:
        equal(weights, wanted)
        assert found == pytest.approx(losses, rel=1e-6)
        assert rates == pytest.approx([0.05] * 2 + [0.015] * 3 + [0.0045] * 3)
    for segments in ([3, 1, 4], [1] * STEPS):
        again = pool.run(trained, name, plan, segments, rows, clip, ranks=dp)
        assert again[0][1:] == whole[0][1:]
        equal(again[0][0], wanted)


def test_clipping_is_by_unit(pool: Pool) -> None:
    plan = {"dp": 2, "dp_mode": "cyclic", "stages": cuts_of("mlp", 2)}
    wanted, _ = expected("mlp", 2, 2, 0, 8, 0.3)
    free, _ = expected("mlp", 2, 2, 0, 8, None)
    weights, _, _, norms = pool.run(trained, "mlp", plan, [5, 3], 8, 0.3, ranks=2)[0]
    equal(weights, wanted)
    assert not torch.equal(free["blocks.0.linear.weight"], wanted["blocks.0.linear.weight"])
    assert max(norms) > 0.3


@pytest.mark.parametrize("more", [{"transport": "torch"}, {"transport": "strict"}, {"options": {"stagger": "turns"}}], ids=str)
def test_transport_and_stagger_do_not_change_bits(more: dict[str, Any], pool: Pool) -> None:
    plan = {"dp": 3, "dp_mode": "cyclic", "stages": cuts_of("mlp", 3), **more}
    wanted, _ = expected("mlp", 3, 3, 0, 12, None)
    equal(pool.run(trained, "mlp", plan, [7, 1], 12, None, ranks=3)[2][0], wanted)


def late_once(plan: dict[str, Any], delay_s: float) -> dict[str, Tensor]:
    """On a rank: the weights after training in which worker 1 stops once for a while, in the middle of a forward."""
    model = mlp()
    optimizer, scheduler = tools(model)
    loss = nn.functional.cross_entropy
    how = {"optimizer": optimizer, "scheduler": scheduler, "loss": loss, "device": "cpu", "check_capture": False}
    with mw.parallelize(model, batch("mlp", 0, 12), plan, **how) as session:
        if session.rank == 1:
            stage, calls = session.engine.stages[1], count()
            forward = stage.forward
            stage.forward = lambda record: (next(calls) == 3 and time.sleep(delay_s)) or forward(record)  # type: ignore[method-assign]
        session.train([batch("mlp", step, 12) for step in range(STEPS)])
        session.broadcast_weights()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def test_a_late_worker_changes_nothing(pool: Pool) -> None:
    plan = {"dp": 3, "dp_mode": "cyclic", "stages": cuts_of("mlp", 3)}
    wanted, _ = expected("mlp", 3, 3, 0, 12, None)
    for weights in pool.run(late_once, plan, 0.05, ranks=3):
        equal(weights, wanted)


@pytest.mark.slow
def test_ranks_of_torchrun_train_as_local_workers(pool: Pool, tmp_path: Path) -> None:
    plan = {"dp": 2, "dp_mode": "cyclic", "stages": cuts_of("mlp", 2)}
    local = pool.run(trained, "mlp", plan, [3, 5], 8, None, ranks=2)
    script = str(SUPPORT / "torchrun_cyclic.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    for rank, (weights, *numbers) in enumerate(local):
        found = torch.load(tmp_path / f"{rank}.pt")
        equal(found[0], weights)
        assert str(found[1:]) == str(numbers), "losses, learning rates and norms"


def own_rows(plan: dict[str, Any]) -> list[float]:
    """On a rank: the losses if each rank gets only its own rows, and an evaluation of them."""
    rank, loss = torch.distributed.get_rank(), nn.functional.cross_entropy
    with mw.parallelize(mlp(), batch("mlp", 0, 8), plan, loss=loss, device="cpu", check_capture=False) as session:
        whole = [batch("mlp", step, 8) for step in range(3)]
        own = [Own(split(one, 2)[rank]) for one in whole]
        found = [result.loss for result in session.train(own)] + [session.evaluate(own[0]).loss]
        return [*found, session.evaluate(whole[0]).loss]


def test_own_rows_are_one_microbatch(pool: Pool) -> None:
    plan = {"dp": 2, "dp_mode": "cyclic", "stages": cuts_of("mlp", 2)}
    one, other = pool.run(own_rows, plan, ranks=2)
    assert one == other and one[-1] == pytest.approx(one[-2], rel=1e-6)
    rates = pool.run(trained, "mlp", plan, [1], 8, None, ranks=2)
    assert rates[0][1][0] == pytest.approx(one[0], rel=1e-6)


def resumed(plan: dict[str, Any], other: dict[str, Any]) -> Any:
    """On a rank: the weights after three steps, a saved state, and five more steps in a new session."""
    model = mlp()
    kept: dict[str, Any] = {}
    for chosen, steps in ((plan, range(3)), (other, range(3, STEPS))):
        optimizer, scheduler = tools(model)
        loss = nn.functional.cross_entropy
        how = {"optimizer": optimizer, "scheduler": scheduler, "loss": loss, "device": "cpu", "check_capture": False}
        with mw.parallelize(model, batch("mlp", 0, 8), chosen, **how) as session:
            if kept:
                session.load_state_dict(kept)
            session.train([batch("mlp", step, 8) for step in steps])
            kept = session.state_dict()
            session.broadcast_weights()
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        model = mlp()
    return weights, sorted(name for name in kept["tensors"] if name.startswith("previous/"))


def test_a_session_resumes_exactly(pool: Pool) -> None:
    plan = {"dp": 2, "dp_mode": "cyclic", "stages": cuts_of("mlp", 2)}
    wanted, _ = expected("mlp", 2, 2, 0, 8, None)
    for weights, previous in pool.run(resumed, plan, plan, ranks=2):
        equal(weights, wanted)
        assert previous == ["previous/blocks.0.linear.bias", "previous/blocks.0.linear.weight"]
    assert pool.run(resumed, plan, {"dp": 2}, ranks=2)[0][1] == []


COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier", "reduce")


def watched_segments(engine: Any) -> tuple[list[str], list[int]]:
    """The names of the collectives inside the segments that an engine runs from now on, and the rows of its batches."""
    calls: list[str] = []
    rows: list[int] = []
    run, cut = engine.run, engine._cut

    def watched(*args: Any) -> Any:
        kept = {name: getattr(torch.distributed, name) for name in COLLECTIVES}
        for name in COLLECTIVES:
            setattr(torch.distributed, name, lambda *a, _name=name, **k: calls.append(_name) or kept[_name](*a, **k))
        try:
            return run(*args)
        finally:
            for name, function in kept.items():
                setattr(torch.distributed, name, function)

    def noted(given: Any) -> Any:
        found = cut(given)
        rows.append(found.size)
        return found

    engine.run, engine._cut = watched, noted
    return calls, rows


def counted(plan: dict[str, Any]) -> tuple[int, list[int]]:
    """On a rank: the collectives inside a segment, and the rows of the batches that it loads."""
    model = mlp()
    loss = nn.functional.cross_entropy
    with mw.parallelize(model, batch("mlp", 0, 6), plan, loss=loss, device="cpu", check_capture=False) as session:
        calls, rows = watched_segments(session.engine)
        data = [(torch.randn(6), i % 3) for i in range(60)]
        reader = RowReader(Collate(stacked, None), seed=0)
        source = session.source_for_rank(reader.source(data))
        sampler = Sampler(60, StepRows(3, 1, 2), 0)
        session.train(list(islice(numbered_steps(source, sampler, Position(0, 0)), 6)))
    return len(calls), rows


def test_a_segment_has_no_collective_and_each_rank_loads_its_own_rows(pool: Pool) -> None:
    assert pool.run(counted, {"dp": 2, "dp_mode": "cyclic"}, ranks=2) == [(0, [3] * 6)] * 2


def posted(rows: int) -> int:
    """On a rank: how many receives of a sum may be posted ahead, if a sum has more than the window of small messages."""
    model = Chain(nn.Linear(6, 200), nn.Linear(200, 200), nn.Linear(200, 3))
    plan = {"dp": 2, "dp_mode": "cyclic", "transport": "torch"}
    loss = nn.functional.cross_entropy
    with mw.parallelize(model, batch("mlp", 0, rows), plan, loss=loss, device="cpu", check_capture=False) as session:
        session.train([batch("mlp", step, rows) for step in range(4)])
        walker = session.engine.executor
        lines = {id(i): walker._line(i) for i in walker.program.instructions if i.channel is not None}
        depths = walker._depths(lines)
    return max((depth for channel, depth in depths.items() if channel.kind.value in ("sum", "partial")), default=0)


def test_large_sums_are_not_received_far_ahead(pool: Pool) -> None:
    assert pool.run(posted, 4, ranks=2) == [2, 2]


def test_costs_of_captured_stages_shape_the_schedule() -> None:
    """The last stage of this cut has most of the work, so only the starts are delayed; equal stages have all turns."""
    request = RunRequest(mlp(), batch("mlp", 0, 8), Parallel(dp=2, dp_mode="cyclic", stages=("blocks.1",)))
    request = replace(request, loss=nn.functional.cross_entropy, check_capture=False)
    run = prepare(request)
    assert run.costs is not None and run.costs[1].forward_s > 1.5 * run.costs[0].forward_s
    assert len(run.schedule.turn_edges) == 1 and run.schedule.first == 1 and run.schedule.steps == 16
    exact = replace(request, parallel=Parallel(dp=2, dp_mode="cyclic", stages=("blocks.1",), options={"stagger": "turns"}))
    assert len(prepare(exact).schedule.turn_edges) > 16
