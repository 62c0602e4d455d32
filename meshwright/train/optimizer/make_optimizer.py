"""Makes the optimizer and the learning-rate schedule from the arguments of Hugging Face, or from those that the user passes."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from meshwright.errors import MeshwrightError
from meshwright.train.inputs.usable_arguments import usable
from meshwright.train.optimizer.shared_rates import Rates, Recipe

_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Patterns of parameter names without weight decay, as in the Hugging Face Trainer."""


def recipe_for(model: Any, args: Any, chosen: tuple[Any, dict[str, Any]] | None = None) -> Recipe:
    """Return the optimizer that `args.optim` names, with two weight decay groups: with decay and without."""
    with usable(
        f"optim={args.optim.value!r} with optim_args={args.optim_args!r}", fix="optim_args='name=value, ...', or another optim"
    ):
        kind, options = chosen or transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
    if not isinstance(kind, type) or {"params", "model", "optimizer_dict"} & set(options):
        raise MeshwrightError(
            f"optim={args.optim.value!r} needs the whole model, but a rank has only its stages",
            fix="optim='adamw_torch', or another that only takes parameters",
        )
    decays = set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if name in decays], "weight_decay": args.weight_decay},
        {"params": [p for name, p in named if name not in decays], "weight_decay": 0.0},
    ]
    return Recipe(kind, options, groups)


def rates_for(model: nn.Module, args: Any, optimizers: tuple[Any, Any], chosen: Any, *, steps: int) -> Rates:
    """Return the learning rates over `steps` optimizer steps."""
    optimizer, scheduler = optimizers
    recipe = recipe_for(model, args, chosen) if optimizer is None else Recipe.like(optimizer)
    with usable(f"{recipe.kind.__name__} with {dict(recipe.options)}"):
        rates = Rates(recipe, optimizer)
    if scheduler is not None and optimizer is None:
        raise MeshwrightError("a learning-rate schedule was given without its optimizer", fix="optimizers=(optimizer, scheduler)")
    kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    asked = f"lr_scheduler_type={kind!r} with lr_scheduler_kwargs={args.lr_scheduler_kwargs!r}"
    with usable(asked, fix="pass keyword arguments of that schedule: lr_scheduler_kwargs={...}"):
        rates.scheduler = scheduler or transformers.get_scheduler(
            args.lr_scheduler_type,
            optimizer=rates.reference,
            num_warmup_steps=args.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
    return rates
