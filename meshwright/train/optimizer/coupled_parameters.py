"""Tests whether an optimizer couples parameters: whether its update of one parameter depends on the gradients of others.

Each unit of a pipeline has its own optimizer. An optimizer that couples parameters (Prodigy, or a step divided by the norm of all
gradients) would then couple only the parameters of its unit, which is a different optimizer. The test runs the optimizer; it does
not look at its name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import MeshwrightError

STEPS = 6
"""Steps of the trial: enough for optimizers that measure first and act later."""
SIDE = 4
"""The largest size of a trial parameter in any dimension."""

_log = logging.getLogger(__name__)
Made = Callable[[list[nn.Parameter], list[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer for trial parameters that represent some parameters."""


def refuse_coupled(
    make: Made, units: Sequence[Sequence[nn.Parameter]], group: Callable[[nn.Parameter], object] = lambda p: None
) -> None:
    """Raise if the optimizer's step on one unit depends on the gradients of another unit.

    `units` are lists of parameters with one optimizer each. `group` returns the parameter group of a parameter.
    """
    trained = [found for unit in units if (found := [p for p in unit if p.requires_grad])]
    if len(trained) < 2:
        return
    first = {group(p): p for p in reversed(trained[0])}
    alike = ((first[group(p)], p) for unit in trained[1:] for p in unit if group(p) in first)
    pair = next(alike, (trained[0][0], trained[1][0]))
    with torch.random.fork_rng(devices=[]):
        try:
            calm, wild = (_tried(make, pair, scale) for scale in (1.0, 1000.0))
        except MeshwrightError:
            raise
        except Exception as error:  # the optimizer cannot run on small tensors, for any reason
            _log.warning("could not test whether the optimizer couples parameters: %s: %s", type(error).__name__, error)
            return
    apart = [not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(calm[1], wild[1], strict=True)]
    if any(apart):
        raise MeshwrightError(
            f"{calm[0]} couples parameters: its step on one depends on the gradients of others, and the {len(trained)} units of "
            f"this plan have an optimizer each (two trials differ from step {apart.index(True) + 1} of {STEPS})",
            fix="use AdamW, SGD or another that updates each parameter separately, or a plan of one stage (pp=1)",
        )


def refuse_not_elementwise(make: Made, cut: Sequence[nn.Parameter], why: str) -> None:
    """Raise if the optimizer's step on a part of a tensor is not the part of its step on the whole tensor.

    Optimizers with factored moments, or with norms of whole tensors (Adafactor, LAMB, Muon), would be other optimizers on the
    parameters in `cut`, of which each rank holds a part. `why` says what cuts them.
    """
    like = next((p for p in cut if p.requires_grad and p.dim() > 1), next((p for p in cut if p.requires_grad), None))
    if like is None:
        return
    with torch.random.fork_rng(devices=[]):
        try:
            name, whole, parts = _tried_in_parts(make, like)
        except MeshwrightError:
            raise
        except Exception as error:  # the optimizer cannot run on small tensors, for any reason
            _log.warning("could not test whether the optimizer is elementwise: %s: %s", type(error).__name__, error)
            return
    if not torch.allclose(whole, parts, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise MeshwrightError(
            f"{name} is not elementwise: its step on a part of a tensor depends on the whole tensor, and {why}",
            fix="use AdamW, SGD or another optimizer that updates each element separately",
        )


def _tried_in_parts(make: Made, like: nn.Parameter) -> tuple[str, Tensor, Tensor]:
    """Return a trial parameter after some steps, trained whole, and trained as quarters (halves if it has one dimension)."""
    torch.manual_seed(0)
    start = torch.randn([SIDE * 2] * min(like.dim(), 2)).to(like.dtype)
    whole, parts = nn.Parameter(start.clone()), [nn.Parameter(part.clone()) for part in _quarters(start)]
    one, many = make([whole], [like]), make(list(parts), [like] * len(parts))
    for optimizer in (one, many):
        refuse_closure(optimizer)
        _raise_rate(optimizer)
    for _ in range(STEPS):
        gradient = torch.randn_like(start) * torch.linspace(0.1, 3.0, start.numel()).to(start.dtype).view_as(start)
        whole.grad = gradient
        for part, piece in zip(parts, _quarters(gradient), strict=True):
            part.grad = piece.clone()
        one.step()
        many.step()
    return (
        type(one).__name__,
        torch.cat([q.reshape(-1) for q in _quarters(whole.detach())]),
        torch.cat([p.detach().reshape(-1) for p in parts]),
    )


def _quarters(tensor: Tensor) -> list[Tensor]:
    """Return the parts of a tensor that is cut in two along each dimension."""
    found = [tensor]
    for dim in range(tensor.dim()):
        found = [half for part in found for half in part.chunk(2, dim)]
    return found


def _raise_rate(optimizer: torch.optim.Optimizer) -> None:
    """Give groups without a learning rate one: a warmup begins with a rate of 0."""
    for group in optimizer.param_groups:
        if "lr" in group and not group["lr"]:
            group["lr"] = group.get("initial_lr") or 1e-2


def refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise if the optimizer needs a closure. The pipeline only gives it gradients and cannot compute them again."""
    if wants_more(optimizer.step):
        raise MeshwrightError(
            f"{type(optimizer).__name__} needs a closure that runs the model again, but a pipeline only gives it gradients",
            fix="use an optimizer whose step() needs no argument: SGD, Adam, AdamW",
        )


def wants_more(step: Callable[..., Any]) -> bool:
    """True if a step function needs an argument."""
    return any(a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD for a in signature(step).parameters.values())


def _tried(make: Made, like: tuple[nn.Parameter, nn.Parameter], scale: float) -> tuple[str, list[Tensor]]:
    """Return a parameter after each step, while the gradients of another parameter are multiplied by `scale`."""
    torch.manual_seed(0)
    pair = [nn.Parameter(torch.randn([min(n, SIDE) for n in p.shape]).to(p.dtype)) for p in like]
    optimizer = make(pair, list(like))
    refuse_closure(optimizer)
    _raise_rate(optimizer)
    seen = []
    for _ in range(STEPS):
        for p, times in zip(pair, (1.0, scale), strict=True):
            p.grad = torch.randn_like(p) * times
        optimizer.step()
        seen.append(pair[0].detach().clone())
    return type(optimizer).__name__, seen
