"""The two runs that are compared: the model itself and its captured layers, each recorded as marks.

Captured layers run as in the engine: every stage starts from detached leaves, and its backward begins with the gradients of the
next stage. Gradients come from `.backward()`, because reentrant checkpoints do not support `torch.autograd.grad`. Each gradient
is marked when it arrives, and then freed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.capture.check.fingerprints import ZERO, Mark, apart, mark
from meshwright.capture.check.restore_weights import weights_kept
from meshwright.capture.trace.batch_columns import Columns
from meshwright.capture.trace.export import results

FLOOR = 1e-3
"""The error of a gradient is relative to its own norm, or to this fraction of the largest norm if that is larger."""


class Ran(NamedTuple):
    """What a forward returned, by name, and a function that runs its backward."""

    outputs: dict[str, Tensor]
    backward: Callable[[float], None]
    """Takes the factor that the loss is multiplied by."""


Run = Callable[[Mapping[str, Tensor]], Ran]


@dataclass
class Seen:
    """The marks of a run: outputs and gradients by name, and the buffers at the end."""

    outputs: dict[str, Mark] = field(default_factory=dict)
    gradients: dict[str, Mark] = field(default_factory=dict)
    buffers: dict[str, Mark] = field(default_factory=dict)
    finite: bool = True


class Distance(NamedTuple):
    """The largest difference between two runs."""

    what: str
    error: float


def model_run(model: nn.Module, columns: Columns, names: Sequence[str], written: set[str] | None = None) -> Run:
    """Return a function that runs the model itself. `names` are the outputs that capture kept.

    Parameters that the model writes into in evaluation are restored after the run; their names are added to `written`.
    """

    def run(given: Mapping[str, Tensor]) -> Ran:
        context: AbstractContextManager[dict[str, Tensor]] = nullcontext({}) if model.training else weights_kept(model)
        with context as kept:
            found = results(columns.call(model, {name: t.clone() for name, t in given.items()}))
        if written is not None:
            written.update(kept)
        outputs = {name: found[name] for name in names if name in found}
        return Ran(outputs, lambda scale: _backward(next(iter(outputs.values())), scale))

    return run


def layers_run(layers: Sequence[nn.Module], starts: Sequence[int], names: Sequence[str]) -> Run:
    """Return a function that runs captured layers. `starts` are the first layers of the stages, then the number of layers."""

    def run(given: Mapping[str, Tensor]) -> Ran:
        values: tuple[Tensor, ...] = ()
        ends: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
        for first, last in pairwise(starts):
            leaves = tuple(t.detach().requires_grad_(t.requires_grad) for t in values)
            values, made_again = tuple(t.clone() for t in leaves), dict[int, Any]()
            for layer in layers[first:last]:
                mine: tuple[str, ...] = layer.batch_columns  # type: ignore[assignment]
                values = layer(*values, made_again=made_again, **{name: given[name].clone() for name in mine})
            ends.append((leaves, values))
        return Ran(dict(zip(names, values, strict=True)), lambda scale: _backward_by_stages(ends, scale))

    return run


def see(
    run: Run,
    given: Mapping[str, Tensor],
    model: nn.Module,
    *,
    backward: bool,
    grad: bool = True,
    under: Any = None,
    scale: float = 1.0,
) -> Seen:
    """Run, and mark the results. `grad` enables autograd; `under` is a context manager for the forward.

    The loss is multiplied by `scale`, and the gradients are divided by it.
    """
    found = Seen()
    parameters = {p: name for name, p in model.named_parameters() if p.requires_grad}
    context: AbstractContextManager[Any] = under or nullcontext()

    def arrived(parameter: Tensor) -> None:
        name = parameters[parameter]  # type: ignore[index]
        if parameter.grad is not None:
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            found.gradients[name] = found.gradients.get(name, ZERO) + mark(gradient / scale if scale != 1.0 else gradient)
            parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(arrived) for p in parameters] if backward else []
    try:
        for p in parameters:
            p.grad = None
        with torch.set_grad_enabled(backward or grad):
            with context:
                outputs, back = run(given)
            found.outputs = {name: mark(t) for name, t in outputs.items()}
            found.finite = all(bool(torch.isfinite(t).all()) for t in list(outputs.values())[:1] if t.is_floating_point())
            if backward:
                back(scale)
    finally:
        for hook in hooks:
            hook.remove()
    found.buffers = {name: mark(b) for name, b in model.named_buffers()}
    return found


def furthest(own: Seen, captured: Seen, tolerance: float) -> Distance:
    """Return the largest distance. Outputs come before buffers and gradients: the first kind above the tolerance is returned."""
    largest = max((of.norm for of in own.gradients.values()), default=0.0)
    kinds = (
        ("the output", own.outputs, captured.outputs, 0.0),
        ("the buffer", own.buffers, captured.buffers, 1e-6),
        ("the gradient of", own.gradients, captured.gradients, FLOOR * largest),
    )
    worst = Distance("nothing", 0.0)
    for what, one, other, floor in kinds:
        for name in {**one, **other}:
            called = {"the output loss": "the loss", "the output output": "the output"}.get(f"{what} {name}", f"{what} {name}")
            error = apart(one.get(name, ZERO), other.get(name, ZERO), floor)
            worst = max(worst, Distance(called, error), key=lambda found: found.error)
        if worst.error > tolerance:
            return worst
    return worst


def one_number(output: Tensor) -> Tensor:
    """Return a loss as it is, and a weighted mean of other outputs, so that every element has a gradient."""
    if not output.dim():
        return output.real if output.is_complex() else output
    real = torch.view_as_real(output) if output.is_complex() else output
    wave = torch.cos(torch.arange(real.numel(), dtype=torch.float32, device=real.device)).view(real.shape)
    return (real * wave.to(real.dtype if real.dtype is torch.float64 else torch.float32)).mean()


def _backward(output: Tensor, scale: float = 1.0) -> None:
    if output.requires_grad:
        loss = one_number(output)
        loss.backward(None if scale == 1.0 else torch.full_like(loss, scale))  # type: ignore[no-untyped-call]


def _backward_by_stages(ends: Sequence[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]], scale: float) -> None:
    _backward(ends[-1][1][0], scale)
    for (_, outputs), (leaves, _) in reversed(list(pairwise(ends))):
        pairs = [(t, leaf.grad) for t, leaf in zip(outputs, leaves, strict=True) if t.requires_grad and leaf.grad is not None]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [gradient for _, gradient in pairs])
