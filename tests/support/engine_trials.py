"""Accepted mutants and random schedules on real engines, against PyTorch in one process.

The layers know nothing of schedules: two per stage, and a weight for each tie that all its stages use. A schedule with a flush
is compared with a plain training loop; one without reads older versions, and is compared with `Serial`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from random import Random

import torch
from torch import Tensor, nn

from meshwright import MeshwrightError, Schedule, check, lower
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.parameters.parameters import Rules
from meshwright.runtime.stage.layers import Layers
from meshwright.train.verify.serial_reference import Serial
from meshwright.train.verify.verify import momentum
from tests.conftest import Pool
from tests.support.mutants import mutant

WIDTH, RANKS = 4, 8
Ties = tuple[tuple[int, ...], ...]
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Trial:
    """A lowered schedule and how it is run; `rows` of a batch need not divide into microbatches."""

    schedule: Schedule
    rows: int
    walks: int
    clip: float | None
    copies: int
    transport: str

    @property
    def microbatches(self) -> int:
        """Of a step of data: a walk takes one."""
        return self.schedule.microbatches * self.schedule.steps


class Layer(nn.Module):
    """A weight of its own, and those that it shares with layers of other stages."""

    def __init__(self, shared: list[nn.Parameter]) -> None:
        super().__init__()
        self.own, self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2), nn.ParameterList(shared)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of all products, squashed."""
        return x + torch.tanh(sum((x @ weight for weight in self.shared), x @ self.own))


def layers_of(stages: int, ties: Ties) -> Layers:
    """The same values in every process."""
    torch.manual_seed(1)
    shared = {tie: nn.Parameter(torch.randn(WIDTH, WIDTH) / 2) for tie in ties}
    modules = [Layer([shared[tie] for tie in ties if stage in tie]).double() for stage in range(stages) for _ in range(2)]
    return Layers(tuple(modules), tuple(range(0, 2 * stages + 1, 2)))


def batch(rows: int, step: int) -> tuple[Tensor, Tensor]:
    """Input and target of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    return (
        torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64),
        torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64),
    )


def trial(seed: int | str) -> Trial | None:
    """What to run for a seed; None where its mutant is refused, or is nothing to train with on so many ranks."""
    schedule, rng = mutant(seed), Random(f"trial {seed}")
    if not check(schedule).ok:
        return None
    if not schedule.lowered:
        try:
            schedule = lower(schedule, sync=rng.choice(("eager", "lazy", "eager-opt", "ring", "ring")))
        except MeshwrightError:
            return None
    schedule = schedule.with_lists(schedule.lists)
    copies = rng.choice((1, 1, 2))
    tidy = schedule.ties == tuple(sorted({tuple(sorted(tie)) for tie in schedule.ties}))
    if schedule.forward_only or schedule.workers * copies > RANKS or not tidy:
        return None
    once = not schedule.flush or schedule.steps > 1
    exact = schedule.placement.rows * schedule.microbatches * schedule.steps * copies
    clip = None if schedule.flush and not schedule.norm else rng.choice((None, 0.05))
    rows, walks = exact or rng.choice((12, 24, 7, 5)), 1 if once else rng.choice((1, 2))
    return Trial(schedule, rows, walks, clip, copies, rng.choice(("auto", "torch", "shared")))


def on_rank(given: Trial) -> tuple[Weights, dict[int, tuple[float, float]]]:
    """The weights that a rank holds at the end, and what it has counted of losses."""
    layers, sums = layers_of(given.schedule.stages, given.schedule.ties), dict[int, tuple[float, float]]()
    rules = Rules(clip=given.clip)
    settings = Settings(momentum, given.microbatches, copies=given.copies, rules=rules, transport=given.transport)
    engine = Engine(given.schedule, layers, settings)
    for step in range(given.walks):
        sums |= {n: (float(t.loss), t.weight) for n, t in engine.run(partial(batch, given.rows), step).items()}
    weights = {layers.names[p]: p.detach().clone() for unit in engine.units for p in layers.unit(unit)}
    engine.close()
    return weights, sums


def in_one_process(given: Trial) -> tuple[Weights, list[float]]:
    """The weights at the end and the loss of each step, without an engine."""
    layers = layers_of(given.schedule.stages, given.schedule.ties)
    if not given.schedule.flush or given.schedule.steps > 1:
        one = Serial(given.schedule, layers, momentum, given.microbatches, given.copies, rules=Rules(clip=given.clip))
        trace = one.run(partial(batch, given.rows), given.walks)
        return trace.weights, trace.losses
    params, losses = list(layers.names), []
    optimizer = momentum(params)
    for step in range(given.walks):
        hidden, target = batch(given.rows, step)
        for module in layers.modules:
            hidden = module(hidden)
        loss = ((hidden - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        if given.clip is not None:
            nn.utils.clip_grad_norm_(params, given.clip)
        optimizer.step()
        losses.append(loss.item())
    return {name: p.detach().clone() for p, name in layers.names.items()}, losses


def wrong(pool: Pool, given: Trial) -> list[str]:
    """Where engines and one process differ; copies of a weight must be equal to the bit."""
    weights, losses = in_one_process(given)
    found, copies, sums = list[str](), dict[str, Tensor](), defaultdict[int, list[tuple[float, float]]](list)
    for rank, (mine, counted) in enumerate(pool.run(on_rank, given, ranks=given.schedule.workers * given.copies)):
        for name, weight in mine.items():
            if not torch.allclose(weight, weights[name], rtol=0, atol=1e-9):
                found.append(f"rank {rank}: {name} is off by {(weight - weights[name]).abs().max():.2g}")
            if not torch.equal(weight, copies.setdefault(name, weight)):
                found.append(f"rank {rank}: {name} differs from its other copies")
        for step, each in counted.items():
            sums[step].append(each)
    for step, loss in enumerate(losses):
        total, weight = (sum(column) for column in zip(*sums[step], strict=True))
        if abs(total / weight - loss) > 1e-9:
            found.append(f"the loss of step {step} is {total / weight}, not {loss}")
    return found + [f"nobody holds {name}" for name in weights if name not in copies]
