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
Group = Callable[[nn.Parameter], object]
"""Returns the parameter group of a parameter."""


def refuse_coupled(
    make: Made, units: Sequence[Sequence[nn.Parameter]], group: Group = lambda p: None, *, why: str | None = None
) -> None:
    """Raise if the optimizer's step on one unit depends on the gradients of another unit.

    `units` are lists of parameters with one optimizer each, unless `why` says what else has one. `group` returns the parameter
    group of a parameter. Every group that several units have is tried: its options may choose another kind of step.
    """
    trained = [found for unit in units if (found := [p for p in unit if p.requires_grad])]
    if len(trained) < 2:
        return
    for pair in _alike(trained, group) or [(trained[0][0], trained[1][0])]:
        with torch.random.fork_rng(devices=[]):
            try:
                calm, wild = (_tried(make, pair, scale) for scale in (1.0, 1000.0))
            except MeshwrightError:
                raise
            except Exception as error:  # the optimizer cannot run on small tensors, for any reason
                _log.warning("could not test whether the optimizer couples parameters: %s: %s", type(error).__name__, error)
                continue
        apart = [not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(calm[1], wild[1], strict=True)]
        if any(apart):
            raise MeshwrightError(
                f"{calm[0]} couples parameters: its step on one depends on the gradients of others, and "
                f"{why or f'the {len(trained)} units of this plan'} have an optimizer each (two trials differ from step "
                f"{apart.index(True) + 1} of {STEPS})",
                fix="use AdamW, SGD or another that updates each parameter separately, or a plan of one stage (pp=1) with whole "
                "parameters on every rank",
            )


def _alike(units: Sequence[Sequence[nn.Parameter]], group: Group) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Return two parameters of different units for every group that several units have."""
    found: dict[object, list[nn.Parameter]] = {}
    for unit in units:
        for of, p in {group(p): p for p in reversed(unit)}.items():
            found.setdefault(of, []).append(p)
    return [(params[0], params[1]) for params in found.values() if len(params) > 1]


def refuse_not_elementwise(
    make: Made, cut: Sequence[nn.Parameter], why: str, *, group: Group = lambda p: None, flat: bool = False
) -> None:
    """Raise if the optimizer's step on a part of a tensor is not the part of its step on the whole tensor.

    Optimizers with factored moments, with norms of tensors, or with other steps for matrices than for vectors (Adafactor, LAMB,
    Muon) would be other optimizers on the parameters in `cut`, of which each rank holds a part. One of every `group` is tried.
    `why` says what cuts them. With `flat`, the parts have one dimension.
    """
    trained = sorted((p for p in cut if p.requires_grad), key=lambda p: p.dim() < 2)
    for like in {group(p): p for p in reversed(trained)}.values():
        with torch.random.fork_rng(devices=[]):
            try:
                name, whole, parts = _tried_in_parts(make, like, flat=flat)
            except MeshwrightError:
                raise
            except Exception as error:  # the optimizer cannot run on small tensors, for any reason
                _log.warning("could not test whether the optimizer is elementwise: %s: %s", type(error).__name__, error)
                continue
        if parts is None or not torch.allclose(whole, parts, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise MeshwrightError(
                f"{name} is not elementwise: its step on a part of a tensor depends on the whole tensor, and {why}",
                fix="use AdamW, SGD or another optimizer that updates each element separately",
            )


def _tried_in_parts(make: Made, like: nn.Parameter, *, flat: bool) -> tuple[str, Tensor, Tensor | None]:
    """Return a trial parameter after some steps: trained whole, and trained in parts with one optimizer each, as ranks do.

    The second is None if the optimizer refuses such parts.
    """
    torch.manual_seed(0)
    start = torch.randn([SIDE * 2] * min(like.dim(), 2)).to(like.dtype)
    sizes = torch.linspace(0.1, 3.0, start.numel()).to(start.dtype).view_as(start)
    gradients = [torch.randn_like(start) * sizes for _ in range(STEPS)]
    cut = _flat_halves if flat else _quarters
    name, (whole,) = _trained(make, like, [start], [[gradient] for gradient in gradients])
    try:
        _, parts = _trained(make, like, cut(start), [cut(gradient) for gradient in gradients])
    except Exception:  # it does not take them: Muon needs matrices
        return name, whole, None
    return name, _joined(cut(whole)), _joined(parts)


def _trained(
    make: Made, like: nn.Parameter, start: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> tuple[str, list[Tensor]]:
    """Return the name of the optimizer, and tensors after steps with these gradients. Each has an optimizer of its own."""
    params = [nn.Parameter(part.clone()) for part in start]
    made = [make([p], [like]) for p in params]
    for optimizer in made:
        refuse_closure(optimizer)
        _raise_rate(optimizer)
    for of_step in gradients:
        for p, gradient, optimizer in zip(params, of_step, made, strict=True):
            p.grad = gradient.clone()
            optimizer.step()
    return type(made[0]).__name__, [p.detach() for p in params]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _flat_halves(tensor: Tensor) -> list[Tensor]:
    """Return the elements of a tensor in two parts with one dimension."""
    return list(tensor.reshape(-1).chunk(2))


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
