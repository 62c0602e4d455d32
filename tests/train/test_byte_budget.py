"""Recompute by a budget in bytes: as many layers kept as fit, by measured bytes, and a run that stays below the budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright import MeshwrightError, Parallel, Recompute, Schedule, StageCost, schedules, simulate, stage_aware
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.stage.batch import Batch
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.stage.stage import Stage
from meshwright.simulate.recompute_budget import with_recompute
from meshwright.train.models import small_models as models
from meshwright.train.setup.build_schedule import lists_for
from meshwright.train.setup.saved_bytes import KeptBytes, saved_bytes
from meshwright.train.verify.verify import momentum
from tests.conftest import Pool

BUILD = partial(models.gpt, blocks=10, width=16, heads=2, tied=False)
DATA = partial(models.text_batch, rows=8)


def kept_of(stages: int, microbatches: int) -> tuple[KeptBytes, ...]:
    torch.manual_seed(0)
    return saved_bytes(Layers.of(BUILD(), stages), Batch(DATA(0), microbatches=microbatches))


def costs_of(kept: tuple[KeptBytes, ...]) -> list[StageCost]:
    sizes = [{"activation_bytes": k.bytes[0], "output_bytes": k.output, "gradient_bytes": k.output} for k in kept]
    return [StageCost(1.0, 1.0, 1.0, **size) for size in sizes]


def peaks(schedule: Schedule, kept: tuple[KeptBytes, ...], counts: list[int]) -> list[float]:
    """Simulated peaks with so many layers of each stage dropped."""
    costs = [replace(cost, recompute_s=1.0) for cost in costs_of(kept)]
    shares = [1 - k.bytes[n] / k.bytes[0] for k, n in zip(kept, counts, strict=True)]
    early = [how.early for how in schedule.recompute] if schedule.recompute else [False] * schedule.stages
    timeline = simulate(with_recompute(schedule, [Recompute(s, e) for s, e in zip(shares, early, strict=True)]), costs)
    return [timeline.peak_bytes(worker) for worker in range(schedule.workers)]


@pytest.mark.parametrize("name", ["onef1b", "gpipe", "shifted"])
def test_as_many_layers_are_kept_as_fit(name: str) -> None:
    """One stage per worker: what is kept fits, and one layer more does not."""
    schedule = schedules.build(name, workers=4, microbatches=8)
    kept = kept_of(4, 8)
    layers = [len(k.bytes) - 1 for k in kept]
    last = layers[-1] if name != "shifted" else 0
    low = max(peaks(schedule, kept, [*layers[:-1], last]))
    high = max(peaks(schedule, kept, [0] * 4))
    costs = costs_of(kept)
    before = [0] * 4
    for step in range(9):
        budget = low + (high - low) * step / 8
        shares = stage_aware(schedule, costs, budget_bytes=budget, layers=[k.bytes for k in kept])
        dropped = [round(how.share * n) for how, n in zip(shares, layers, strict=True)]
        assert max(peaks(schedule, kept, dropped)) <= budget * (1 + 1e-9)
        for stage, count in enumerate(dropped):
            if count:
                fewer = [c - (s == stage) for s, c in enumerate(dropped)]
                assert peaks(schedule, kept, fewer)[stage] > budget, f"stage {stage} could keep one layer more"
        now = [n - d for n, d in zip(layers, dropped, strict=True)]
        assert all(a >= b for a, b in zip(now, before, strict=True)), "more room never keeps less"
        before = now
        assert name != "onef1b" or now[-2] >= now[0], "later stages hold less, and keep more"
    assert before == layers, "with room for everything nothing is recomputed"


def test_a_shifted_schedule_that_keeps_everything_has_no_recompute_actions() -> None:
    schedule = schedules.build("shifted", workers=3, microbatches=6)
    found = with_recompute(schedule, [Recompute(0.5, early=True), Recompute(0.0), Recompute(0.0)])
    text = [str(a) for lists in found.lists for a in lists]
    assert any("0R" in a for a in text) and not any("1R" in a for a in text)
    lists_for(Parallel(pp=3, schedule="shifted", microbatches=6, recompute="1GB"), kept=kept_of(3, 6))


class Meter:
    """Bytes that autograd and the run hold for backwards, each piece of memory once; `peak` is their most."""

    def __init__(self, weights: set[int]) -> None:
        self.weights, self.live, self.sizes = weights, Counter[int](), dict[int, int]()
        self.now = self.peak = 0

    def hold(self, tensor: Tensor) -> Held:
        return Held(self, tensor)


class Held:
    """A tensor that counts while it is held."""

    def __init__(self, meter: Meter, tensor: Tensor) -> None:
        self.meter, self.tensor, self.place = meter, tensor, tensor.untyped_storage().data_ptr()
        if self.place in meter.weights:
            return
        meter.live[self.place] += 1
        if meter.live[self.place] == 1:
            meter.sizes[self.place] = tensor.untyped_storage().nbytes()
            meter.now += meter.sizes[self.place]
            meter.peak = max(meter.peak, meter.now)

    def __del__(self) -> None:
        if self.place in self.meter.weights:
            return
        self.meter.live[self.place] -= 1
        if not self.meter.live[self.place]:
            self.meter.now -= self.meter.sizes[self.place]


def watch(stage: Stage, meter: Meter) -> None:
    """Count what a stage's forwards and recomputes save, and the inputs that it holds."""
    forward, recompute, backward = stage.forward, stage.recompute, stage.backward
    held: dict[int, list[Held]] = {}
    first = stage.first_layer == 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with saved_tensors_hooks(meter.hold, lambda at: at.tensor):
                return function(*args)

        return call

    def forward_and_hold(record: Any) -> Any:
        bundle = counted(forward)(record)
        held[id(record)] = [meter.hold(t) for t in (*(() if first else record.inputs), *record.middle)]
        return bundle

    def backward_and_drop(record: Any, *args: Any, **more: Any) -> Any:
        found = backward(record, *args, **more)
        del held[id(record)]
        return found

    stage.forward, stage.recompute, stage.backward = forward_and_hold, counted(recompute), backward_and_drop  # type: ignore


def measured(schedule: Schedule) -> tuple[int, list[int]]:
    """The peak of a rank over two steps, and how many layers of each of its stages it drops."""
    torch.manual_seed(0)
    layers = Layers.of(BUILD(), schedule.stages)
    engine = Engine(schedule, layers, Settings(momentum, 8))
    meter = Meter({t.untyped_storage().data_ptr() for m in layers.modules for t in (*m.parameters(), *m.buffers())})
    for stage in engine.stages.values():
        watch(stage, meter)
    for step in range(2):
        engine.run(DATA, step)
    engine.close()
    return meter.peak, [stage.recomputed for stage in engine.stages.values()]


@pytest.mark.parametrize("name", ["onef1b", "shifted", pytest.param("chimera", marks=pytest.mark.slow)])
def test_a_run_keeps_to_its_budget(pool: Pool, name: str) -> None:
    kept, workers = kept_of(2, 8), 2
    most = 2 * sum(k.bytes[0] for k in kept)
    ran = 0
    for share in (0.2, 0.35, 0.5, 0.75):
        plan = Parallel(pp=workers, schedule=name, microbatches=8, recompute=share * most)
        try:
            lists = lists_for(plan, kept=kept)
        except MeshwrightError:
            continue
        found = pool.run(measured, lists, ranks=workers)
        assert all(peak <= share * most for peak, _ in found), (share * most, found)
        ran += 1
    assert ran >= 2
    assert found[0][0] > 0.2 * share * most, "there was something to count"


@pytest.mark.parametrize(("name", "pp"), [("onef1b", 2), ("shifted", 4)])
def test_a_plan_with_a_budget_equals_one_process(pool: Pool, name: str, pp: int) -> None:
    kept = kept_of(pp, 8)
    plan = {"pp": pp, "schedule": name, "microbatches": 8}
    budget = 1.5 * max(k.bytes[0] for k in kept) * pp * 0.5
    found = pool.verify(BUILD, DATA, **plan, recompute=2 * budget, steps=2)
    assert found.passed and found.parallel["recompute"] == 2 * budget


def test_what_is_saved_is_measured_without_weights_and_by_their_shapes_alone() -> None:
    torch.manual_seed(0)
    real = Layers.of(BUILD(), 2)
    batch = Batch(DATA(0), microbatches=2)
    expected = saved_bytes(real, batch)
    blank = Layers.of([m.to("meta") for m in BUILD()], 2)
    assert saved_bytes(blank, batch) == expected
    assert all(p.is_meta for p in blank.names)
    one = Layers.of([nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)], 1)
    (found,) = saved_bytes(one, Batch((torch.zeros(6, 4), torch.zeros(6, 2)), microbatches=2))
    # Three rows: the batch, what tanh saves and the last layer reads (once), and for the mean two differences.
    assert found.bytes[0] >= 3 * (4 + 8) * 4 and found.bytes[-1] == 0.0
    assert found.bytes[1] >= found.bytes[2] >= 3 * 8 * 4


def test_budgets_are_read_and_refused() -> None:
    assert Parallel(recompute="1.5GB").budget_bytes == 1.5e9 and Parallel(recompute="2 MiB").budget_bytes == 2 << 20
    assert Parallel(recompute=4096).budget_bytes == 4096.0 and Parallel(recompute="inline").budget_bytes is None
    assert replace(Parallel(recompute="3KB"), pp=2).budget_bytes == 3000
    for wrong in (True, 0.5, -3, {}):
        with pytest.raises(MeshwrightError, match="a budget in bytes"):
            Parallel(recompute=wrong)  # type: ignore[arg-type]
    with pytest.raises(MeshwrightError, match="even with full recompute, but the budget is 10"):
        lists_for(Parallel(pp=2, microbatches=4, recompute="10B"), kept=kept_of(2, 4))
    with pytest.raises(MeshwrightError, match="needs the bytes that stages keep"):
        lists_for(Parallel(pp=2, recompute="10B"))
    cost = StageCost(1.0, 1.0, 1.0, activation_bytes=4.0)
    schedule = schedules.build("gpipe", workers=1, microbatches=2)
    with pytest.raises(MeshwrightError, match="must decrease from layer to layer"):
        stage_aware(schedule, [cost], budget_bytes=9.0, layers=[[1.0, 2.0]])
    with pytest.raises(MeshwrightError, match="layers are given for 2"):
        stage_aware(schedule, [cost], budget_bytes=9.0, layers=[1, 1])
