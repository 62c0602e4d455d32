"""Runs that save and resume, for tests of checkpoints: what a rank does, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright import MeshwrightError, Parallel
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.stage.layers import Layers
from meshwright.train.checkpoint.write import Checkpoints
from meshwright.train.models.small_models import gpt, mlp, mlp_batch, text_batch
from meshwright.train.setup.build_schedule import lists_for, stages_of
from meshwright.train.verify.verify import momentum
from tests.conftest import Pool


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not: two groups, of which a unit may have one."""
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2, eps=1e-4)


def warmup(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A rate that is another in every step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, _rate)


def _rate(step: int) -> float:
    return min(1.0, (step + 1) / 4) * 0.9**step


def sequence(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Schedules inside a schedule."""
    lr = torch.optim.lr_scheduler
    parts = [lr.LinearLR(optimizer, 0.3, total_iters=2), lr.MultiStepLR(optimizer, [1, 3], gamma=0.5)]
    return lr.SequentialLR(optimizer, parts, milestones=[2])


GPT, TEXT = partial(gpt, blocks=4, width=16), partial(text_batch, rows=8)


@dataclass(frozen=True)
class Run:
    """A piece of training: up to `steps` under a plan, saved behind each of `saves`, perhaps resumed first.

    Without a flush one walk has `walk` steps.
    """

    plan: dict[str, Any]
    folder: str
    steps: int
    build: Callable[[], Any] = GPT
    batch: Callable[[int], Any] = TEXT
    optimizer: Callable[..., Any] = momentum
    scheduler: Callable[..., Any] | None = None
    resume: bool | str = False
    saves: tuple[int, ...] = ()
    limit: int | None = None
    seed: int = 0
    walk: int = 2

    @property
    def parallel(self) -> Parallel:
        """The plan."""
        return Parallel.of(self.plan)


MLP = {"build": partial(mlp, layers=8), "batch": partial(mlp_batch, rows=8)}


@dataclass
class Outcome:
    """Losses of the steps that were run (summed where last stages are), and weights and rates at the end."""

    first: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    data: Any = None
    rates: dict[str, float] = field(default_factory=dict)


def made(run: Run) -> Engine:
    """The engine of a run, its model in double precision from the seed."""
    plan = run.parallel
    torch.manual_seed(run.seed)
    layers = Layers.of(run.build(), stages_of(plan))
    for module in layers.modules:
        module.double()
    settings = Settings(
        optimizer=run.optimizer,
        scheduler=run.scheduler,
        microbatches=plan.microbatches,
        copies=plan.dp,
        ranks=plan.ranks,
        transport=plan.transport,
        seed=run.seed,
    )
    return Engine(lists_for(plan, ties=layers.ties, steps=run.walk), layers, settings)


def train(run: Run) -> Outcome:
    """One rank of a run."""
    engine = made(run)
    try:
        return _trained(run, engine, Checkpoints(Path(run.folder), engine, limit=run.limit))
    finally:
        engine.close()


def _trained(run: Run, engine: Engine, checkpoints: Checkpoints) -> Outcome:
    out = Outcome()
    if run.resume:
        found = checkpoints.resume(None if run.resume is True else run.resume)
        if found is not None:
            out.first, out.data = found.step, found.data
    step = out.first
    while step < run.steps:
        tallies = engine.run(run.batch, step)
        out.losses |= {at: float(tally.loss) for at, tally in tallies.items()}
        step += 1 if engine.schedule.flush else run.walk
        if step in run.saves:
            checkpoints.save(step, data={"seen": step * 8})
    checkpoints.close()
    names = engine.layers.names
    out.weights = {names[p]: p.detach().clone() for u in engine.units for p in engine.layers.unit(u)}
    for unit in engine.units.values():
        for group in unit.optimizer.param_groups if unit.optimizer else ():
            out.rates |= {names[p]: float(group["lr"]) for p in group["params"]}
    return out


def whole(outcomes: list[Outcome]) -> Outcome:
    """What all ranks saw: losses added up, weights that agree bit for bit."""
    found = Outcome(first=outcomes[0].first, data=outcomes[0].data)
    for out in outcomes:
        for step, loss in out.losses.items():
            found.losses[step] = found.losses.get(step, 0.0) + loss
        for name, tensor in out.weights.items():
            assert torch.equal(tensor, found.weights.setdefault(name, tensor)), f"copies of {name}"
        found.rates |= out.rates
    return found


def run_on(pool: Pool, run: Run) -> Outcome:
    """Train on local workers."""
    return whole(pool.run(train, run, ranks=run.parallel.members))


def refusal(pool: Pool, run: Run) -> str:
    """What a run is refused with, the same on every rank; the workers live on."""
    return refusal_of(pool, train, run)


def refusal_of(pool: Pool, function: Callable[[Run], Any], run: Run) -> str:
    """The same for anything that ranks do."""
    (said,) = set(pool.run(_refused, function, run, ranks=run.parallel.members))
    return str(said)


def _refused(function: Callable[[Run], Any], run: Run) -> str:
    try:
        function(run)
    except MeshwrightError as error:
        return str(error)
    return ""


def same(found: Outcome, wanted: Outcome, bar: float = 1e-9) -> None:
    """The same trajectory from where the first began."""
    for step, loss in found.losses.items():
        assert abs(loss - wanted.losses[step]) <= bar * abs(wanted.losses[step]), f"loss of step {step}"
    assert set(found.weights) == set(wanted.weights)
    for name, tensor in found.weights.items():
        scale = max(float(wanted.weights[name].abs().max()), 1e-3)
        assert float((tensor - wanted.weights[name]).abs().max()) <= bar * scale, name
    assert found.rates == wanted.rates
