"""`parallelize`: train a model under a plan with your own training loop.

Every rank runs the same script, in one process or under torchrun. All ranks must call the same methods of their sessions:

    session = meshwright.parallelize(model, example_batch, dict(pp=2), optimizer=torch.optim.AdamW(model.parameters()))
    for batch in batches:
        result = session.step(batch)        # loss and gradient norm of the whole batch, on every rank
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.capture.weights.sketch import Skeleton
from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.plan.plan_file import asked
from meshwright.runtime.launch.workers import attach
from meshwright.runtime.parameters.parameters import Rules
from meshwright.runtime.stage.batch import Given
from meshwright.runtime.stage.objective import Loss, LossKind
from meshwright.runtime.stage.precision import Precision
from meshwright.train.data.collate import tensors
from meshwright.train.inputs.eval_submodules import stay_in_evaluation
from meshwright.train.inputs.gradient_hooks import refuse_lost_hooks
from meshwright.train.inputs.user_arguments import refuse_arguments
from meshwright.train.optimizer.shared_rates import Rates, Recipe
from meshwright.train.prepared import RunRequest, prepare
from meshwright.train.session.session import Session
from meshwright.train.setup.own_weights import materialise
from meshwright.train.setup.settled_plan import settled
from meshwright.train.setup.where import device_for, launched, one_process, refuse_world

Maker = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def parallelize(
    model: Any,
    example_batch: Given,
    plan: Parallel | Mapping[str, Any] | str | Path | None = None,
    *,
    optimizer: torch.optim.Optimizer | Maker = torch.optim.AdamW,
    scheduler: Any = None,
    loss: Loss | None = None,
    clip: float | None = None,
    seed: int = 0,
    precision: Precision | str = "fp32",
    weights: str | Path | None = None,
    device: str | None = None,
    loss_kind: str = "mean",
    check_capture: bool = True,
) -> Session:
    """Cut a model into the stages of a plan and join the other ranks, for your own training loop.

    Submodules that are in evaluation mode stay in it until the session is closed, also while the model is trained.

    Args:
        model: A module, a list of layers, or a sketch (`meshwright.sketch`), of which each rank fills its own stages.
        example_batch: A batch like those that `step` will get.
        plan: A `Parallel`, a mapping, or a plan file; None is one process.
        optimizer: An optimizer for the model's parameters, or a function that makes one.
        scheduler: A learning-rate schedule for that optimizer, or a function that makes one.
        loss: Your own loss, `f(output, target)`; None uses the model's loss.
        clip: The norm that gradients are clipped to; None does not clip.
        seed: The seed of dropout.
        precision: The format that layers compute in: `fp32`, `bf16` or `fp16`.
        weights: A safetensors file or folder with the weights for a sketch.
        device: `cpu` trains on the CPU; None uses a GPU if there is one.
        loss_kind: `mean` if the loss is a mean over rows or labels, `sum` if it is a sum.
        check_capture: False skips the comparison of the captured layers with the model.

    Returns:
        The session of this rank. Close it when done, or use it in a `with` block.

    Raises:
        MeshwrightError: The plan does not fit the number of ranks, or the model cannot be captured.

    Examples:
        >>> import torch
        >>> import meshwright as mw
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
        >>> batch = (torch.ones(4, 4), torch.zeros(4, 4))
        >>> with mw.parallelize(model, batch, dict(pp=1, microbatches=2)) as session:
        ...     losses = [session.step(batch).loss for _ in range(3)]
        >>> losses[2] < losses[0]
        True
    """
    parallel = settled(Parallel.of(asked(plan)))
    refuse_world(parallel)
    _refuse_alone(parallel)
    refuse_arguments(model, optimizer, scheduler, loss, seed)
    skeleton, model = (model, model.model) if isinstance(model, Skeleton) else (None, model)
    if weights is not None and skeleton is None:
        raise MeshwrightError(
            "weights= is only for a model without weights, but this model has some",
            fix="parallelize(meshwright.sketch(build), ...)",
        )
    rates = _rates(model, optimizer, scheduler)
    kind, chosen, example = LossKind.of(loss_kind), Precision.of(precision), tensors(example_batch)
    request = RunRequest(
        skeleton or model,
        example,
        parallel,
        loss=loss,
        loss_kind=kind,
        precision=chosen,
        weights=weights,
        check_capture=check_capture,
    )
    if skeleton is not None:
        refuse_lost_hooks(model, parallel.processes, sketched=True)
    with ExitStack() as closing:
        closing.callback(stay_in_evaluation(model))
        run = prepare(request)  # on every rank, before any communication
        if not dist.is_initialized():
            closing.enter_context(attach(device=device) if launched() else one_process())
        rules, where = Rules(clip=clip or float("inf")), device_for(device == "cpu")
        settings = run.settings(optimizer=rates.optimizer, rules=rules, seed=seed, device=where, pieces=rates.adopt)
        module = model if isinstance(model, nn.Module) else nn.ModuleList(model)
        fill = None if skeleton is None else partial(materialise, skeleton, weights)
        session = Session(run, module, rates, settings, fill=fill)
        if skeleton is not None:
            skeleton.forget()
        session.closing = closing.pop_all()
    return session


def _refuse_alone(parallel: Parallel) -> None:
    """Raises if the plan needs several ranks, but the script runs in one process, or if a rank would have no session."""
    ranks = parallel.started
    if launched() and not dist.is_initialized() and parallel.processes < int(os.environ["WORLD_SIZE"]):
        raise MeshwrightError(
            f"every rank that calls parallelize gets a session, but the plan has {parallel.processes} ranks and the job "
            f"{os.environ['WORLD_SIZE']}",
            fix=f"torchrun --nproc-per-node {parallel.processes} with ranks below that, or meshwright.Trainer, whose idle ranks "
            "wait",
        )
    if ranks > 1 and not launched() and not dist.is_initialized():
        raise MeshwrightError(
            f"the plan needs {ranks} ranks, but this is one process",
            fix=f"torchrun --nproc-per-node {ranks} script.py, or meshwright.Trainer, which starts its own workers",
        )


def _rates(model: Any, optimizer: Any, scheduler: Any) -> Rates:
    """Returns the parameter groups and learning rates of the user's optimizer."""
    module = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    made = (
        optimizer
        if isinstance(optimizer, torch.optim.Optimizer)
        else optimizer([p for p in module.parameters() if p.requires_grad])
    )
    if not isinstance(made, torch.optim.Optimizer):
        raise MeshwrightError(
            f"optimizer returned {type(made).__name__}", fix="a torch.optim.Optimizer, or a function that returns one"
        )
    rates = Rates(Recipe.like(made), made)
    is_schedule = hasattr(scheduler, "state_dict")
    rates.scheduler = scheduler if scheduler is None or is_schedule else scheduler(made)
    return rates
