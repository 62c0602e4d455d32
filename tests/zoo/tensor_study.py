"""Families of the zoo under tensor modes: on threads of one process, in float64, against the user's own model.

Dropout is off: all other random numbers are drawn from streams that are keyed by what is drawn, so that ranks and the model
draw the same. Casts to float32 inside the model are widened in the run and in the reference alike.
"""

from __future__ import annotations

import copy
import threading
import time
import traceback
import warnings
import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.capture.cut.stage_modules import States
from meshwright.capture.model_graph import line_of
from meshwright.capture.shard.emit import shard_layers
from meshwright.capture.shard.settle import Settled
from meshwright.capture.shard.wide_casts import wide_casts, widened
from meshwright.capture.trace.export import flatten
from meshwright.capture.trace.graph import Flat
from meshwright.errors import MeshwrightError
from meshwright.tensor.wires.wires import Wires
from tests.support.sharded import Outcome, Reference, Request, box, declared_words, grid, line, on_threads, settled
from tests.zoo.configured import library
from tests.zoo.every import FAMILIES, still
from tests.zoo.family import Batch, cast

MODES: dict[str, Request] = {
    "line 2": line(2),
    "line 2, sequence": line(2, sequence=True),
    "box 2,2,1": box(2, 2, 1),
    "box 1,2,2": box(1, 2, 2),
    "grid 2": grid(2),
}
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
FLOOR = 1e-2
"""A gradient that is zero but for rounding (a bias before a norm over the batch) is compared with a hundredth of the largest."""
ROWS = 4
NOT_FINITE = "its own gradients are not finite, so that there is nothing to compare"
OTHER_WORDS = "sends fewer words than declared"


class Fit(Enum):
    """What a family comes to under a mode."""

    EXACT = "exact"
    REFUSED = "refused"
    INDIVISIBLE = "does not divide"
    WRONG = "WRONG"
    RAISES = "RAISES"


@dataclass(frozen=True)
class Fitted:
    """A family under one mode."""

    fit: Fit
    note: str = ""
    error: float = 0.0
    extra: int = 0
    """Moves that the mode does not ask for."""
    whole: tuple[str, ...] = ()
    """Parameters that stay whole because of an operation without a rule of its own."""


@dataclass(frozen=True)
class TensorFinding:
    """A family under all modes; `refused` says why it has no graph at all."""

    name: str
    kind: str
    modes: dict[str, Fitted] = field(default_factory=dict)
    refused: str = ""
    seconds: float = 0.0


_LOCK = threading.RLock()


class KeyedDraws(TorchDispatchMode):
    """Seeds every draw by what is drawn; ranks on threads share one generator, so that one draws at a time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        first = args[0] if args else None
        key = f"{func} {tuple(first.shape) if isinstance(first, Tensor) else first!r}"
        with _LOCK:
            torch.manual_seed(zlib.crc32(key.encode()))
            return func(*args, **kwargs)


def batch_of(name: str, dtype: torch.dtype = torch.float64) -> Batch:
    """The batch of a family: rows that every mode of the study divides, and the length that the zoo captures."""
    family = FAMILIES[name]
    return cast(family.batch(ROWS, family.sizes[0][1], 1), dtype)


def loss_of(output: Any) -> Tensor:
    """The loss of whatever a model returns."""
    found = output if isinstance(output, Tensor) else output["loss"] if isinstance(output, Mapping) else output[0]
    assert isinstance(found, Tensor)
    return found


def own_run(model: nn.Module, batch: Batch, flat: Flat) -> Reference:
    """The user's model by itself: the loss and every gradient of a copy, which may change what it keeps."""
    states = States(model)
    ties = {name: states.first[parameter] for name, parameter in states.parameters.items()}
    original, model = model, copy.deepcopy(model)
    wide = dtype_of(model) is torch.float64
    with wide_casts() if wide else nullcontext(), KeyedDraws():
        loss = loss_of(model(**{name: t.clone() for name, t in batch.items()}))
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        gradients[name] = (gradient.to_dense() if gradient.is_sparse else gradient).clone()
    return Reference(original, batch, line_of(original, flat), ties, loss.detach(), gradients)


def dtype_of(model: nn.Module) -> torch.dtype:
    """The precision of a run: single where a model has no other."""
    return torch.float32 if any(p.dtype is torch.float32 for p in model.parameters()) else torch.float64


def keyed_pass(ref: Reference, found: Settled) -> Any:
    """Forward and backward of one rank."""

    def work(model: nn.Module, wires: Wires) -> Tensor:
        [layer] = shard_layers(found, States(model), wires)
        layer.train()
        with KeyedDraws():
            values = layer(**{name: ref.batch[name].clone() for name in layer.batch_columns})
            values[0].backward()
        return values[0].detach()

    return work


def fitted(ref: Reference, asked: Request) -> Fitted:
    """A captured family under a mode."""
    try:
        found = settled(ref, asked)
        outcome: Outcome = on_threads(ref, found, keyed_pass(ref, found), floor=FLOOR)
    except MeshwrightError as error:
        return Fitted(Fit.INDIVISIBLE if "does not divide" in str(error) else Fit.REFUSED, str(error))
    except Exception as error:
        return Fitted(Fit.RAISES, f"{type(error).__name__}: {error}{_place(error)}")
    own = max(abs(float(ref.loss)), 1.0)
    error = max(outcome.loss / own, outcome.gradient)
    more = {"extra": len(found.extra), "whole": tuple(found.replicated)}
    if not error <= BOUNDS[dtype_of(ref.model)]:
        return Fitted(Fit.WRONG, f"loss {outcome.loss:.1e}, {outcome.worst} {outcome.gradient:.1e}", error, **more)
    return Fitted(Fit.EXACT, "" if outcome.words == declared_words(found) else OTHER_WORDS, error, **more)


def _place(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/meshwright/" in f.filename]
    return f" (at {frames[-1].filename.rpartition('/meshwright/')[2]}:{frames[-1].lineno})" if frames else ""


def captured(name: str) -> Reference:
    """A family, captured and run by itself.

    Raises:
        MeshwrightError: It cannot be captured.
    """
    for dtype, experts in WAYS:
        model, batch = still(name, dtype).train(), batch_of(name, getattr(torch, dtype))
        if experts is not None:
            set_experts(model, experts)
        flat = flatten(model, copy.copy(batch))
        try:
            return own_run(model, batch, widened(flat) if dtype == "float64" else flat)
        except RuntimeError:  # grouped products of experts have no double precision
            if dtype == WAYS[-1][0]:
                raise
    raise AssertionError


WAYS = (("float64", None), ("float64", "batched_mm"), ("float32", None))
"""Precisions, and how experts run: as they do by default, or one by one, which has double precision."""


def set_experts(model: nn.Module, kind: str) -> None:
    """Let the experts of a model of transformers run in another way."""
    for module in model.modules():
        if hasattr(given := getattr(module, "config", None), "_experts_implementation"):
            given._experts_implementation = kind


def tensor_study(name: str, modes: Mapping[str, Request] = MODES) -> TensorFinding:
    """Capture a family once and run it under every mode."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    library()
    begun, kind = time.perf_counter(), FAMILIES[name].kind
    try:
        ref = captured(name)
    except MeshwrightError as error:
        return TensorFinding(name, kind, refused=str(error), seconds=time.perf_counter() - begun)
    if not all(bool(t.isfinite().all()) for t in (ref.loss, *ref.gradients.values())):
        return TensorFinding(name, kind, refused=NOT_FINITE, seconds=time.perf_counter() - begun)
    found = {label: fitted(ref, asked) for label, asked in modes.items()}
    return TensorFinding(name, kind, found, seconds=time.perf_counter() - begun)
