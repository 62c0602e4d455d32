"""Training runs for tests of optimizers: an engine on workers, and plain torch in one process with the whole batch at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from meshwright import Parallel
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.parameters.parameters import Rules
from meshwright.runtime.stage.layers import Layers
from meshwright.train.setup.build_schedule import lists_for, stages_of
from meshwright.train.verify.verify import momentum
from tests.conftest import Pool


@dataclass(frozen=True)
class Recipe:
    """How to train; the same for both runs."""

    build: Callable[[], Any]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    steps: int = 3
    optimizer: Callable[..., Any] = momentum
    scheduler: Callable[..., Any] | None = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    clip: float | None = None
    skip: bool = False

    def layers(self, stages: int) -> Layers:
        """The model from seed 0 in double precision."""
        torch.manual_seed(0)
        layers = Layers.of(self.build(), stages)
        for module in layers.modules:
            module.double()
        return layers


@dataclass
class Result:
    """What a rank, or one process, ends with."""

    weights: dict[str, Tensor]
    losses: dict[int, tuple[float, float]] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def plain(recipe: Recipe) -> Result:
    """Ordinary torch: whole batch, mean loss, backward, clip_grad_norm_, step; knows nothing of Meshwright's objective."""
    layers = recipe.layers(1)
    model = nn.Sequential(*layers.modules)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = recipe.optimizer(params)
    scheduler = recipe.scheduler(optimizer) if recipe.scheduler else None
    result = Result({})
    for step in range(recipe.steps):
        x, y = recipe.batch(step)
        optimizer.zero_grad()
        output = model(x)
        if recipe.loss is not None:
            loss = recipe.loss(output, y)
        elif y.is_floating_point():
            loss = nn.functional.mse_loss(output, y)
        else:
            loss = nn.functional.cross_entropy(output.flatten(0, -2), y.flatten(), ignore_index=-100)
        loss.backward()
        result.losses[step] = (float(loss.detach()), 1.0)
        norm = nn.utils.clip_grad_norm_(params, recipe.clip if recipe.clip is not None else float("inf"))
        result.norms[step] = float(norm)
        if recipe.skip and not torch.isfinite(norm):
            result.skipped.append(step)
            continue
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    result.weights = {name: p.detach().clone() for p, name in layers.names.items()}
    result.rates = [group["lr"] for group in optimizer.param_groups]
    return result


def parallel(recipe: Recipe, plan: Parallel) -> Result:
    """One rank of the same training under a plan."""
    layers = recipe.layers(stages_of(plan))
    schedule = lists_for(plan, ties=layers.ties, steps=recipe.steps)
    settings = Settings(
        optimizer=recipe.optimizer,
        scheduler=recipe.scheduler,
        microbatches=plan.microbatches,
        copies=plan.dp,
        loss=recipe.loss,
        rules=Rules(clip=recipe.clip, skip_nonfinite=recipe.skip),
    )
    engine = Engine(schedule, layers, settings)
    result = Result({})
    for step in range(recipe.steps):
        tallies = engine.run(recipe.batch, step)
        result.losses |= {at: (float(tally.loss), tally.weight) for at, tally in tallies.items()}
    result.weights = {layers.names[p]: p.detach().clone() for unit in engine.units for p in layers.unit(unit)}
    result.norms, result.skipped = dict(engine.parameters.norms), list(engine.parameters.skipped)
    result.rates = [u.optimizer.param_groups[0]["lr"] for u in engine.units.values() if u.optimizer is not None]
    engine.close()
    return result


def agree(pool: Pool, recipe: Recipe, *, bar: float = 1e-9, **plan: Any) -> tuple[Result, list[Result]]:
    """Train both ways; weights, losses and norms are equal, copies bit for bit."""
    chosen = Parallel.of(plan)
    (wanted,) = pool.run(plain, recipe, ranks=1)
    ranks = pool.run(parallel, recipe, chosen, ranks=chosen.processes)
    largest = max(float(t.abs().max()) for t in wanted.weights.values())
    seen: dict[str, Tensor] = {}
    for result in ranks:
        for name, found in result.weights.items():
            assert torch.equal(found, seen.setdefault(name, found)), f"copies of {name}"
            scale = max(float(wanted.weights[name].abs().max()), 1e-3 * largest)
            assert float((found - wanted.weights[name]).abs().max()) / scale <= bar, name
        for step, norm in result.norms.items():
            other = wanted.norms[step]
            both_lost = not isfinite(norm) and not isfinite(other)
            assert both_lost or abs(norm - other) <= bar * other, f"norm of step {step}"
    assert set(seen) == set(wanted.weights)
    for step, (loss, _) in wanted.losses.items():
        parts = [result.losses[step] for result in ranks if step in result.losses]
        found = sum(s for s, _ in parts) / sum(w for _, w in parts)
        assert (found != found and loss != loss) or abs(found - loss) <= bar * abs(loss), f"loss of step {step}"
    return wanted, ranks
