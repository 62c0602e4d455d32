"""Optimizers of many units that act as one: groups, learning rates and their schedule are kept in one place.

A reference optimizer holds the groups and their numbers and never takes a step; schedules move it, and before every update
each unit's own optimizer takes over its numbers. So one schedule, of any kind, serves all units of all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn

from meshwright.errors import MeshwrightError

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How to make an optimizer: its class, its arguments, and groups of parameters with numbers of their own."""

    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    groups: Sequence[Group]

    @classmethod
    def like(cls, optimizer: torch.optim.Optimizer) -> Recipe:
        """The recipe of an optimizer that a user has made."""
        known = signature(type(optimizer).__init__).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in known}
        return cls(type(optimizer), options, [dict(group) for group in optimizer.param_groups])

    def reference(self) -> torch.optim.Optimizer:
        """The same groups and numbers, on parameters that nobody has."""
        return self.kind([{**group, "params": [nn.Parameter(torch.zeros(()))]} for group in self.groups], **self.options)


class Rates:
    """The numbers of all groups over time."""

    def __init__(self, recipe: Recipe, reference: torch.optim.Optimizer | None = None) -> None:
        self.recipe = recipe
        self.reference = reference or recipe.reference()
        self.scheduler: Any = None
        self.group_of = {p: index for index, group in enumerate(recipe.groups) for p in group["params"]}
        self.followers: list[tuple[torch.optim.Optimizer, list[int]]] = []

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """An optimizer for the parameters of a unit, in the groups that they belong to."""
        mine: dict[int, list[nn.Parameter]] = {}
        for p in params:
            mine.setdefault(self.group_of.get(p, -1), []).append(p)
        left_out = mine.pop(-1, [])
        indices = sorted(mine)
        groups = [{**self.recipe.groups[i], "params": mine[i]} for i in indices]
        if left_out:  # what no group names is not trained, as in one process
            groups.append({"params": left_out, "lr": 0.0, "weight_decay": 0.0})
        made = self.recipe.kind(groups, **self.recipe.options)
        self.followers.append((made, indices))
        return made

    def trial(self, params: Sequence[nn.Parameter], like: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """An optimizer for parameters that stand in for others, in their groups; nothing follows it."""
        of = [self.group_of.get(p, 0) for p in like]
        mine = {index: [p for p, at in zip(params, of, strict=True) if at == index] for index in sorted(set(of))}
        groups = [{**self.recipe.groups[index], "params": held} for index, held in mine.items()]
        return self.recipe.kind(groups, **self.recipe.options)

    @property
    def learning_rate(self) -> float:
        """That of the first group."""
        rate = self.reference.param_groups[0].get("lr")
        if rate is None:
            raise MeshwrightError(
                f"{type(self.reference).__name__} has no learning rate of its own: it makes one from its step and its weights",
                fix="a learning rate: Adafactor(lr=1e-3, relative_step=False, scale_parameter=False)",
            )
        return float(rate)

    def follow(self) -> None:
        """Let every unit's optimizer have the numbers of now."""
        for optimizer, indices in self.followers:
            for group, index in zip(optimizer.param_groups, indices, strict=False):
                group.update({k: v for k, v in self.reference.param_groups[index].items() if k != "params"})

    def step(self, metric: float | None = None) -> None:
        """The schedule goes on by one update; those that look at a metric move only when they are given one."""
        plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if self.scheduler is None or plateau != (metric is not None):
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
            self.scheduler.step(*([metric] if plateau else []))

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule stands."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.reference.param_groups]
        return {"groups": groups, "scheduler": None if self.scheduler is None else self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        if len(state["groups"]) != len(self.reference.param_groups):
            raise MeshwrightError(
                f"the checkpoint has {len(state['groups'])} parameter groups, the optimizer {len(self.reference.param_groups)}",
                fix="resume with the optimizer that it was saved with",
            )
        for group, saved in zip(self.reference.param_groups, state["groups"], strict=True):
            group.update(saved)
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
