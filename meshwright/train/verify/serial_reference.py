"""Training in one process by the update rule of a schedule: the reference that every plan is compared with.

A step uses the same microbatches, sums their losses and divides once. A schedule without a flush reads old versions of the
weights. The lists of the schedule tell which ones, so the reference uses the same delayed versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.ir.action import Kind, Op, walk
from meshwright.ir.analysis.effects import rule
from meshwright.ir.placement import Rows
from meshwright.ir.schedule import Schedule
from meshwright.runtime import device as devices
from meshwright.runtime.parameters.gradient_buffer import square_norm
from meshwright.runtime.parameters.parameters import Rules
from meshwright.runtime.parameters.unit import Optimizer, Scheduler
from meshwright.runtime.stage.batch import Batch, Given
from meshwright.runtime.stage.layer_inputs import takes_target, tensors_of
from meshwright.runtime.stage.layers import Layers, columns_of, refuse_hooks, refuse_stray
from meshwright.runtime.stage.objective import Loss, LossKind, Objective
from meshwright.runtime.stage.precision import Precision


class WholeModel(Protocol):
    """The user's model before it is cut. A call returns its loss, or its output, for some columns."""

    def __call__(self, weights: Weights, columns: Mapping[str, Tensor]) -> Tensor:
        """Runs the model."""
        ...


Versions = dict[tuple[int, int], dict[int, int]]
"""For each (stage, microbatch), the version of each unit that its forward reads."""

Weights = dict[nn.Parameter, Tensor]
"""A tensor for each parameter: the values of one version, leaves of the autograd graph, or gradients."""


@dataclass
class SerialTrace:
    """The record of the reference run: the loss of each step, the mean gradients of each update, and the weights at the end."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)


def versions_read(schedule: Schedule) -> Versions:
    """Returns the versions that the forwards of a schedule read."""
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
    """Trains all layers in one process."""

    schedule: Schedule
    layers: Layers
    optimizer: Optimizer
    microbatches: int
    copies: int = 1
    loss: Loss | None = None
    seed: int = 0
    precision: Precision = field(default_factory=Precision)
    loss_kind: LossKind = LossKind.MEAN
    scheduler: Scheduler | None = None
    rules: Rules = field(default_factory=Rules)
    whole: WholeModel | None = None
    """The user's model before it is cut. If it is set, it runs instead of the captured layers."""

    def __post_init__(self) -> None:
        why = "the reference run computes on copies of the parameters"
        refuse_hooks(self.layers, why, fix="verify the model without its hooks")
        self.objective = Objective(self.loss, weigh=self.layers.weigh, kind=self.loss_kind)
        self.scaler = self.precision.scaler()
        self.units = {unit: [p for p in self.layers.unit(unit) if p.requires_grad] for unit in range(self.schedule.units)}
        self.params = [p for params in self.units.values() for p in params]
        self.reads = {} if self.schedule.flush else versions_read(self.schedule)
        self.takes_target = takes_target(self.layers.modules[-1])
        self.reached: set[nn.Parameter] = set()
        """Parameters that have had a gradient. Their gradient is zero in a step in which no item counts."""
        self.history: list[Weights] = [{p: p.detach().clone() for p in self.params}]

    def run(self, batch: Callable[[int], Given], steps: int) -> SerialTrace:
        """Trains for some steps."""
        trace = SerialTrace()
        optimizers = [self.optimizer(params) for params in self.units.values() if params]
        rates = [self.scheduler(optimizer) for optimizer in optimizers] if self.scheduler is not None else []
        sums = {(step, copy): [0.0, 0.0] for step in range(steps) for copy in range(self.copies)}
        for round_ in range(steps * self.microbatches // self.schedule.microbatches):
            self._gradients(batch, round_, sums)
            trace.gradients.append(
                {self.layers.names[p]: torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.params}
            )
            if self._takes_update(trace, round_):
                self._clip()
                for optimizer in optimizers:
                    optimizer.step()
                for rate in rates:
                    rate.step()
            newest = {p: p.detach().clone() for p in self.params}
            self.history = [newest] if self.schedule.flush else [*self.history, newest]
        for step in range(steps):
            mine = [sums[step, copy] for copy in range(self.copies)]
            weight = sum(w for _, w in mine)
            trace.losses.append(sum(s for s, _ in mine) / weight if weight else 0.0)  # the loss is 0 if no item counts
        trace.weights = {name: p.detach().clone() for p, name in self.layers.names.items()}
        return trace

    def _clip(self) -> None:
        """Clips the norm of the whole gradient, or of each unit if the schedule has no flush."""
        if self.rules.clip is None:
            return
        whole = self.schedule.flush or self.schedule.norm
        rules = self.rules if whole else self.rules.of_each(self.schedule.units)
        for params in [self.params] if whole else list(self.units.values()):
            gradients = [p.grad for p in params if p.grad is not None]
            norm = sum(square_norm(gradient) for gradient in gradients) ** 0.5
            for gradient in gradients:
                gradient.mul_(rules.scale(norm))

    def _takes_update(self, trace: SerialTrace, round_: int) -> bool:
        """Returns False, and records it, if the gradient of a scaled loss overflows: the update is then skipped."""
        if self.scaler is None:
            return True
        square = sum(square_norm(p.grad) for p in self.params if p.grad is not None)
        if taken := self.scaler.update(square**0.5):
            return taken
        trace.skipped.append(round_)
        return False

    def _gradients(self, batch: Callable[[int], Given], round_: int, sums: dict[tuple[int, int], list[float]]) -> None:
        """Computes the mean gradient of a round: sums over microbatches, then over data-parallel copies, divided once."""
        total: Weights = {}
        for p in self.params:
            p.grad = None
        weight, ran, count = 0.0, False, self.schedule.microbatches
        for copy in range(self.copies):
            added: Weights = {}
            for mb in range(round_ * count, (round_ + 1) * count):
                step, local = divmod(mb, self.microbatches)
                data = self._batch(batch(step), copy)
                if self.scaler is not None:
                    self.scaler.measure(data.count)
                rows = data.cuts[local]
                if rows.start == rows.stop:
                    continue
                ran = True
                sums[step, copy][0] += self._microbatch(data, step, local, self._weights(mb), added)
                counted = self._weight(data, rows)
                sums[step, copy][1] += counted
                weight += counted
            for p, found in added.items():
                gradient = found.to_dense() if found.is_sparse else found
                total[p] = total[p] + gradient if p in total else gradient
        refuse_stray(self.layers, self.params)
        factor = self.scaler.factor if self.scaler else 1.0
        self.reached |= total.keys()
        for p in self.params:
            nothing = torch.zeros_like(p) if ran and not weight and (p in self.reached or not self.reached) else None
            p.grad = total[p] / ((weight or 1.0) * factor) if p in total else nothing

    def _batch(self, given: Given, copy: int) -> Batch:
        names = self.layers.columns
        return Batch(given, microbatches=self.microbatches, copy=copy, copies=self.copies, names=names)

    def _weight(self, data: Batch, rows: Rows) -> float:
        return data.weight(rows, self.objective).counts

    def _weights(self, mb: int) -> list[Weights]:
        """Returns the parameters of each stage as leaf tensors, in the versions that the stage reads."""
        leaves: dict[tuple[nn.Parameter, int], Tensor] = {}

        def at(p: nn.Parameter, version: int) -> Tensor:
            if (p, version) not in leaves:
                leaves[p, version] = self.history[version][p].clone().requires_grad_()
            return leaves[p, version]

        found = []
        for stage in range(self.schedule.stages):
            versions = self.reads.get((stage, mb), {})
            found.append({p: at(p, versions.get(u, 0)) for u in self.schedule.units_of[stage] for p in self.units[u]})
        return found

    def _microbatch(self, data: Batch, step: int, local: int, weights: list[Weights], added: Weights) -> float:
        """Runs forward and backward through all layers, and adds the gradients to `added`. Returns the loss."""
        rows = data.cuts[local]
        if self.whole is None:
            output = self._through_layers(data, step, local, weights)
        else:
            weights = [{p: p for p in self.params}]  # activation checkpoints run again in backward with the original parameters
            with self.precision.autocast(torch.device("cpu")):
                output = self.whole({}, data.named(data.columns, rows))
        loss = self.objective(output, data.targets(rows), data.weight(rows, self.objective).items)
        if loss.requires_grad:
            loss.backward(None if self.scaler is None else torch.full_like(loss, self.scaler.factor))
        leaves = {id(at): (p, at) for held in weights for p, at in held.items()}
        for p, at in leaves.values():
            if at.grad is not None:
                added[p] = added[p] + at.grad if p in added else at.grad.clone()
                at.grad = None
        return float(loss.detach())

    def _through_layers(self, data: Batch, step: int, local: int, weights: list[Weights]) -> Tensor:
        """Runs one layer after another, each with its own random stream."""
        rows, number = data.cuts[local], data.copy * self.microbatches + local
        values, named = data.inputs(rows)
        values, named = tuple(t.clone() for t in values), {name: t.clone() for name, t in named.items()}
        target, count = data.targets(rows), len(self.layers.modules)
        for stage in range(self.layers.stages):
            for offset, layer in enumerate(self.layers.of_stage(stage)):
                index = self.layers.starts[stage] + offset
                devices.seeder(torch.device("cpu"))(devices.stream(self.seed, step, number) ^ devices.salt(index))
                if index == count - 1 and target is not None and self.takes_target(len(values)):
                    values = (*values, target)
                named |= {name: t.clone() for name, t in data.named(columns_of(layer), rows).items()}
                own = {n: weights[stage].get(p, p) for n, p in layer.named_parameters(remove_duplicate=False)}
                with self.precision.autocast(torch.device("cpu")):
                    output = functional_call(layer, own, values, named)
                values, named = tensors_of(output, index), {}
        return values[0]
