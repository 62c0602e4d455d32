"""One process that follows the rule of a schedule: the reference that every plan is compared with.

A step takes the same microbatches, adds up the sums of their losses and divides once. A schedule without a flush reads old
versions; which, is read from its lists, so the reference is that schedule's own delayed rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.ir.action import Kind, Op, walk
from meshwright.ir.effects import rule
from meshwright.ir.schedule import Schedule
from meshwright.runtime import device as devices
from meshwright.runtime.batch import Batch, Given, Loss, Objective, Rows
from meshwright.runtime.layers import Layers
from meshwright.runtime.stage import Stage
from meshwright.runtime.unit import Optimizer

Versions = dict[tuple[int, int], dict[int, int]]
"""For (stage, microbatch) the version of each unit that its forward reads."""


@dataclass
class Trace:
    """What a run leaves to compare: the loss of each step, the mean gradients of each round, the weights at the end."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def versions_read(schedule: Schedule) -> Versions:
    """Which versions the forwards of a schedule read."""
    found: Versions = {}
    effects = rule(schedule)
    for worker, entries in enumerate(schedule.lists):
        for action in walk(entries):
            if action.op is Op.F:
                params = [value for value in effects(worker, action).reads if value.kind is Kind.PARAM]
                found[action.stage, action.mb] = {value.stage: value.version for value in params}
    return found


@dataclass
class Serial:
    """One process with all layers."""

    schedule: Schedule
    layers: Layers
    optimizer: Optimizer
    microbatches: int
    copies: int = 1
    loss: Loss | None = None
    seed: int = 0

    def run(self, batch: Callable[[int], Given], steps: int) -> Trace:
        """Train for some steps."""
        self.objective, trace = Objective(self.loss), Trace()
        units = {unit: [p for p in self.layers.unit(unit) if p.requires_grad] for unit in range(self.schedule.units)}
        optimizers = {unit: self.optimizer(params) for unit, params in units.items() if params}
        history = [{p: p.detach().clone() for params in units.values() for p in params}]
        reads = versions_read(self.schedule) if not self.schedule.flush else {}
        per_round = self.schedule.microbatches
        sums, weights = [0.0] * steps, [0.0] * steps
        for round_ in range(steps * self.microbatches // per_round):
            total: dict[nn.Parameter, Tensor] = {}
            weight = 0.0
            for copy in range(self.copies):
                added: dict[nn.Parameter, Tensor] = {}
                for mb in range(round_ * per_round, (round_ + 1) * per_round):
                    step, local = divmod(mb, self.microbatches)
                    data = Batch(batch(step), microbatches=self.microbatches, copy=copy, copies=self.copies)
                    if data.rows(local).start == data.rows(local).stop:
                        continue
                    current = self._weights(history, reads, units, mb, round_)
                    loss = self._microbatch(data, step, local, current, added)
                    counted = self.objective.weight(data.targets(data.rows(local)), data.rows(local))
                    sums[step] += loss
                    weights[step] += counted
                    weight += counted
                for p, g in added.items():
                    total[p] = total[p] + g if p in total else g
            for p in history[0]:
                p.grad = total[p] / weight if p in total else torch.zeros_like(p)
            trace.gradients.append({self.layers.names[p]: p.grad.clone() for p in history[0] if p.grad is not None})
            for optimizer in optimizers.values():
                optimizer.step()
            history.append({p: p.detach().clone() for p in history[0]})
            if self.schedule.flush:
                history = [history[-1]]
        trace.losses = [s / w if w else float("nan") for s, w in zip(sums, weights, strict=True)]
        trace.weights = {self.layers.names[p]: p.detach().clone() for p in history[0]}
        return trace

    def _weights(
        self,
        history: list[dict[nn.Parameter, Tensor]],
        reads: Versions,
        units: dict[int, list[nn.Parameter]],
        mb: int,
        round_: int,
    ) -> list[dict[nn.Parameter, Tensor]]:
        """For each stage its parameters as leaves, of the versions that it reads."""
        leaves: dict[tuple[nn.Parameter, int], Tensor] = {}

        def at(p: nn.Parameter, version: int) -> Tensor:
            if (p, version) not in leaves:
                leaves[p, version] = history[version][p].clone().requires_grad_()
            return leaves[p, version]

        found = []
        for stage in range(self.schedule.stages):
            versions = reads.get((stage, mb), {})
            found.append({p: at(p, versions.get(u, 0)) for u in self.schedule.units_of[stage] for p in units[u]})
        return found

    def _microbatch(
        self,
        data: Batch,
        step: int,
        local: int,
        weights: list[dict[nn.Parameter, Tensor]],
        added: dict[nn.Parameter, Tensor],
    ) -> float:
        """One forward and backward through all layers; gradients are added up."""
        rows, number = data.rows(local), data.copy * self.microbatches + local
        args, named = data.inputs(rows)
        target = data.targets(rows)
        values: tuple[Tensor, ...] = args
        device = torch.device("cpu")
        probe = Stage(self.layers.of_stage(self.layers.stages - 1), 0, device, is_last=True, objective=self.objective)
        for stage in range(self.layers.stages):
            for offset, layer in enumerate(self.layers.of_stage(stage)):
                index = self.layers.starts[stage] + offset
                devices.seed(device, devices.stream(self.seed, step, number, index))
                if probe.takes_target and index == len(self.layers.modules) - 1 and target is not None:
                    values = (*values, target)
                own = {n: weights[stage].get(p, p) for n, p in layer.named_parameters(remove_duplicate=False)}
                output = functional_call(layer, own, values, named)
                values, named = (output,) if isinstance(output, Tensor) else tuple(output), {}
        loss = self.objective(values[0], target, Rows(rows.start, rows.stop))
        loss.backward()
        seen: set[int] = set()
        for held in weights:
            for p, at in held.items():
                if id(at) not in seen and at.grad is not None:
                    seen.add(id(at))
                    added[p] = added[p] + at.grad if p in added else at.grad.clone()
        return float(loss.detach())
