"""Makes the optimizers of many units act as one: parameter groups, learning rates and their schedule are kept in one place.

A reference optimizer holds the groups and their options and never takes a step. The schedule changes its options, and before
every step the optimizer of each unit copies them. So one schedule of any kind serves all units of all ranks.
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
from meshwright.train.optimizer.used_optimizer import refuse_used

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How to make an optimizer: its class, its arguments, and its parameter groups with their options."""

    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    groups: Sequence[Group]

    @classmethod
    def like(cls, optimizer: torch.optim.Optimizer) -> Recipe:
        """Return the recipe of an optimizer that the user made. Raises if it has hooks or state, which a recipe does not have."""
        refuse_used(optimizer)
        known = signature(type(optimizer).__init__).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in known}
        return cls(type(optimizer), options, [dict(group) for group in optimizer.param_groups])

    def reference(self) -> torch.optim.Optimizer:
        """Make an optimizer with the same groups and options on dummy parameters."""
        return self.kind([{**group, "params": [nn.Parameter(torch.zeros(()))]} for group in self.groups], **self.options)


class Rates:
    """The options of all groups over time."""

    def __init__(self, recipe: Recipe, reference: torch.optim.Optimizer | None = None) -> None:
        self.recipe = recipe
        self.reference = reference or recipe.reference()
        self.scheduler: Any = None
        self.group_of = {p: index for index, group in enumerate(recipe.groups) for p in group["params"]}
        self.followers: list[tuple[torch.optim.Optimizer, list[int]]] = []
        self._planned: dict[int, list[dict[str, Any]]] = {}

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
        """Make an optimizer for the parameters of a unit, in their groups. None if they are in no group.

        Parameters in no group are not trained, as in one process.
        """
        mine: dict[int, list[nn.Parameter]] = {}
        for p in params:
            if p in self.group_of:
                mine.setdefault(self.group_of[p], []).append(p)
        if not mine:
            return None
        indices = sorted(mine)
        made = self.recipe.kind([{**self.recipe.groups[i], "params": mine[i]} for i in indices], **self.recipe.options)
        self.followers.append((made, indices))
        return made

    def adopt(self, piece: nn.Parameter, whole: nn.Parameter) -> None:
        """Put a piece of a parameter into the group of that parameter."""
        if whole in self.group_of:
            self.group_of[piece] = self.group_of[whole]

    def trial(self, params: Sequence[nn.Parameter], like: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Make an optimizer for trial parameters, in the groups of the parameters they represent. It is not updated later."""
        of = [self.group_of.get(p, 0) for p in like]
        mine = {index: [p for p, at in zip(params, of, strict=True) if at == index] for index in sorted(set(of))}
        groups = [{**self.recipe.groups[index], "params": held} for index, held in mine.items()]
        return self.recipe.kind(groups, **self.recipe.options)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first group."""
        rate = self.reference.param_groups[0].get("lr")
        if rate is None:
            raise MeshwrightError(
                f"{type(self.reference).__name__} has no learning rate of its own: it computes one from its step and its weights",
                fix="set a learning rate: Adafactor(lr=1e-3, relative_step=False, scale_parameter=False)",
            )
        return float(rate)

    def follow(self) -> None:
        """Copy the current options to the optimizer of every unit."""
        for optimizer, indices in self.followers:
            for group, index in zip(optimizer.param_groups, indices, strict=True):
                group.update({k: v for k, v in self.reference.param_groups[index].items() if k != "params"})

    def plan(self, steps: range) -> list[float]:
        """Keep the options of the next steps for `apply`, and advance the schedule past them. Return their learning rates."""
        self._planned, rates = {}, []
        for step in steps:
            self._planned[step] = [_options(group) for group in self.reference.param_groups]
            rates.append(self.learning_rate)
            self.step()
        return rates

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Give the optimizer of a unit the options of a planned step, whenever it updates with the gradient of that step."""
        indices = next(indices for made, indices in self.followers if made is optimizer)
        for group, index in zip(optimizer.param_groups, indices, strict=True):
            group.update(self._planned[step][index])

    def step(self, metric: float | None = None) -> None:
        """Advance the schedule by one step. A schedule that needs a metric advances only when it gets one."""
        plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if self.scheduler is None or plateau != (metric is not None):
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
            self.scheduler.step(*([metric] if plateau else []))

    @property
    def momentum(self) -> float:
        """The largest momentum of a group: `momentum`, or the first of `betas`."""
        groups = self.reference.param_groups
        return max(float(group.get("momentum") or (group.get("betas") or (0.0,))[0]) for group in groups)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the options and the schedule."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.reference.param_groups]
        return {"groups": groups, "scheduler": None if self.scheduler is None else self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        if len(state["groups"]) != len(self.reference.param_groups):
            raise MeshwrightError(
                f"the checkpoint has {len(state['groups'])} parameter groups, "
                f"but the optimizer has {len(self.reference.param_groups)}",
                fix="resume with the optimizer that it was saved with",
            )
        for group, saved in zip(self.reference.param_groups, state["groups"], strict=True):
            group.update(saved)
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])


def _options(group: Group) -> dict[str, Any]:
    """Return a copy of the options of a group. A schedule may change a tensor in place."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
