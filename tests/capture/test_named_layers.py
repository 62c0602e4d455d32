"""From a model without weights to training: each rank fills its own stages, and large models are cut in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright
from meshwright import MeshwrightError, Parallel
from meshwright.capture.weights.sketch import sketch
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.settings import Settings
from meshwright.train.setup.build_schedule import lists_for, stages_of
from meshwright.train.verify.verify import momentum
from tests.conftest import Pool
from tests.support import tiny_models as tiny
from tests.support.layers_of_models import layers_for
from tests.support.thin import thinned


def tokens(step: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 101, (8, 12), generator=random)
    return {"input_ids": ids, "labels": ids}


def trained(build: Callable[[], Any], plan: Parallel, weightless: bool) -> Any:
    """Loss and weights of this rank after two steps, and how many parameters it holds of how many."""
    if weightless:
        skeleton = sketch(build, seed=3)
        model = skeleton.model
    else:
        torch.manual_seed(3)
        model = build()
    layers = layers_for(model, tokens(0), stages_of(plan))
    lists = lists_for(plan, ties=layers.ties)
    if weightless:
        held = {stage for _, stage in lists.placement.held[torch.distributed.get_rank() % lists.workers]}
        skeleton.fill(skeleton.names_in(m for stage in held for m in layers.of_stage(stage)))
        skeleton.forget()
    there = sum(p.numel() for p in model.parameters() if not p.is_meta)
    engine = Engine(lists, layers, Settings(momentum, plan.microbatches, copies=plan.dp))
    tallies = {}
    for step in range(2):
        tallies |= engine.run(tokens, step)
    weights = {layers.names[p]: p.detach().clone() for unit in engine.units.values() for p in unit.params}
    engine.close()
    return {s: float(t.loss) for s, t in tallies.items()}, weights, there, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("build", thinned([tiny.gpt2, tiny.llama, tiny.bert], 3), ids=lambda f: f.__name__)
def test_ranks_that_fill_their_own_stages_train_alike(pool: Pool, build: Callable[[], Any]) -> None:
    plan = Parallel(pp=2, microbatches=4)
    expected = pool.run(trained, build, plan, False, ranks=2)
    found = pool.run(trained, build, plan, True, ranks=2)
    for (losses, weights, there, all_), (other_losses, other, _, _) in zip(found, expected, strict=True):
        assert losses == other_losses and weights.keys() == other.keys() and there < 0.9 * all_
        assert all(torch.equal(t, other[name]) for name, t in weights.items())


def own_loop(folder: str, weights: bool) -> tuple[list[float], float]:
    """Losses of an own loop that starts without weights, and the share of parameters that this rank has."""
    skeleton = meshwright.sketch(tiny.llama, seed=3)  # which drops nothing: its loss can be compared
    path = folder if weights else None
    sgd = partial(torch.optim.SGD, lr=0.1)
    with meshwright.parallelize(skeleton, tokens(0), {"pp": 2, "microbatches": 4}, optimizer=sgd, weights=path) as session:
        if not weights:
            session.export(folder)
        losses = [session.step(tokens(step)).loss for step in range(2)]
    all_ = list(skeleton.model.parameters())
    return losses, sum(p.numel() for p in all_ if not p.is_meta) / sum(p.numel() for p in all_)


def test_an_own_loop_starts_from_a_seed_or_from_files(pool: Pool, tmp_path: Path) -> None:
    seeded = pool.run(own_loop, str(tmp_path), False, ranks=2)
    read = pool.run(own_loop, str(tmp_path), True, ranks=2)
    assert [losses for losses, _ in seeded] == [losses for losses, _ in read]
    assert all(share < 0.9 for _, share in seeded + read)
    torch.manual_seed(3)
    whole = tiny.llama()
    assert seeded[0][0][0] == pytest.approx(whole(**tokens(0)).loss.item(), rel=1e-6)


def test_weights_are_for_models_that_have_none() -> None:
    with pytest.raises(MeshwrightError, match="only for a model without weights"):
        meshwright.parallelize(tiny.gpt2(), tokens(0), {"pp": 1}, weights="there")


BIG = """
import json, time
begin = time.process_time()
import torch, transformers
from meshwright.capture.model_graph import capture
from meshwright.capture.weights.sketch import sketch
from meshwright.capture.split import split

config = transformers.GPT2Config(n_layer=44, n_embd=6144, n_head=64, n_positions=2048)
model = sketch(lambda: transformers.GPT2LMHeadModel(config)).model
batch = {name: torch.zeros(2, 64, dtype=torch.long) for name in ("input_ids", "labels")}
graph = capture(model, batch)
found = split(model, batch, 8)
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({
    "parameters": sum(p.numel() for p in model.parameters()), "peak": peak << 10, "seconds": time.process_time() - begin,
    "stages": len(found.starts) - 1, "layers": len(graph.layers), "boundaries": [len(p.boundary) for p in graph.cuts(8).parts],
}))
"""


@pytest.mark.slow
def test_twenty_billion_parameters_are_captured_and_cut_in_two_gigabytes() -> None:
    """Seconds are those of the processor: others may share the machine."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", BIG], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["parameters"] > 20e9 and found["stages"] == 8 and found["layers"] > 80
    assert found["boundaries"] == [1] * 7 + [0]
    assert found["peak"] < 2e9 and found["seconds"] < 60, found
