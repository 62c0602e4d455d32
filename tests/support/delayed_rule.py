"""The update rule of cyclic data parallelism in plain torch, on the user's own model in one process.

It is written from the paper alone and uses nothing of Meshwright: microbatch i of round t reads version t of stage j if
i + j >= K + 1 + margin, else version t - 1; gradients are added in the order of microbatches and divided once.

If stages have their own devices, a device first adds the gradients that it computes itself, and its sum is then added to those of
the devices that finished earlier (B of microbatch i on stage j ends at time step 2 i - j). Other names of a tied parameter are
leaves of their own then, because its uses are on several devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Given = Any
Loss = Callable[[nn.Module, Mapping[str, Tensor], Given], tuple[Tensor, float, float]]
"""The mean loss of some rows, the number of items that it is a mean over, and how many of them count in the whole batch."""


@dataclass
class Delayed:
    """Trains a model by the delayed rule. `stage_of` gives the stage of a parameter, from 0 on; `margin=None` is rule v1."""

    model: nn.Module
    workers: int
    stages: int
    stage_of: Callable[[str], int]
    loss: Loss
    margin: int | None = 0
    device_of: Callable[[int, int], int] | None = None
    """The device of a stage for a microbatch, both from 0 on, if each device adds its own gradients first."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of tied parameters, and the names that they are listed under."""

    def train(
        self, batches: Sequence[Given], optimizer: torch.optim.Optimizer, scheduler: Any = None, clip: float | None = None
    ) -> list[float]:
        """Trains on some batches and returns their losses."""
        params = dict(self.model.named_parameters())
        now = {name: p.detach().clone() for name, p in params.items()}
        before, losses = now, []
        for batch in batches:
            found: list[dict[str, Tensor]] = []
            weight = loss = 0.0
            for i, rows in enumerate(split(batch, self.workers)):
                read = {n: (now if self.is_fresh(i, self.stage_of(n)) else before)[n].clone().requires_grad_() for n in params}
                read |= {other: read[name].detach().clone().requires_grad_() for other, name in self.aliases.items()}
                mean, count, counts = self.loss(self.model, read, rows)
                (mean * count).backward()
                weight, loss = weight + counts, loss + float(mean.detach() * count)
                found.append({name: leaf.grad for name, leaf in read.items() if leaf.grad is not None})
            for name, p in params.items():
                p.grad = self.total(name, found) / weight
            if clip is not None:
                self.clip(params, clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            before, now = now, {name: p.detach().clone() for name, p in params.items()}
            losses.append(loss / weight)
        return losses

    def total(self, name: str, found: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Adds the gradients of a parameter: in the order of microbatches, or by device."""
        uses = [name, *(other for other, listed in self.aliases.items() if listed == name)]
        sums: dict[int, Tensor] = {}
        ends: dict[int, tuple[int, int]] = {}
        for i, gradients in enumerate(found):
            for use in uses:
                stage = self.stage_of(use)
                device = 0 if self.device_of is None else self.device_of(stage, i)
                sums[device] = sums[device] + gradients[use] if device in sums else gradients[use]
                ends[device] = (2 * i - stage, -stage)
        first, *others = sorted(sums, key=ends.__getitem__)
        total = sums[first]
        for device in others:
            total = total + sums[device]
        return total

    def is_fresh(self, worker: int, stage: int) -> bool:
        """Whether a worker reads the newest version of a stage; both count from 0."""
        return self.margin is not None and (worker + 1) + (stage + 1) >= self.stages + 1 + self.margin

    def clip(self, params: Mapping[str, nn.Parameter], clip: float) -> None:
        """Clips each stage to its share of the norm."""
        for stage in range(self.stages):
            gradients = [p.grad for name, p in params.items() if self.stage_of(name) == stage and p.grad is not None]
            norm = sum(float(torch.linalg.vector_norm(g.double()) ** 2) for g in gradients) ** 0.5
            for g in gradients:
                g.mul_(min(1.0, clip / self.stages**0.5 / (norm + 1e-6)))


def split(batch: Given, count: int) -> list[Given]:
    """Cuts a batch by rows: piece i of n has rows [b i // n, b (i + 1) // n)."""
    named = isinstance(batch, Mapping)
    columns = batch if isinstance(batch, Mapping) else dict(enumerate(batch))
    rows = len(next(iter(columns.values())))
    cuts = [(rows * i // count, rows * (i + 1) // count) for i in range(count)]
    pieces = [{name: column[a:b] for name, column in columns.items()} for a, b in cuts]
    return pieces if named else [tuple(piece.values()) for piece in pieces]


def labelled(model: nn.Module, read: Mapping[str, Tensor], rows: Given) -> tuple[Tensor, float, float]:
    """The cross entropy of a classifier."""
    inputs, target = rows
    count = float(len(target))
    return nn.functional.cross_entropy(functional_call(model, dict(read), (inputs,)), target), count, count


def language(model: nn.Module, read: Mapping[str, Tensor], rows: Given) -> tuple[Tensor, float, float]:
    """The loss of a causal language model, a mean over the labels that count."""
    count = float((rows["labels"][:, 1:] != -100).sum())
    tied = len(read) == len(list(model.parameters()))
    return functional_call(model, dict(read), (), dict(rows), tie_weights=tied).loss, count, count


def trainer_language(model: nn.Module, read: Mapping[str, Tensor], rows: Given) -> tuple[Tensor, float, float]:
    """The same as the Hugging Face Trainer weighs it: by all labels, also those of first tokens, which nothing predicts."""
    mean, count, _ = language(model, read, rows)
    return mean, count, float((rows["labels"] != -100).sum())
