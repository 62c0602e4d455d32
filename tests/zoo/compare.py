"""Captured layers against the user's model itself, in one process: loss, every gradient, evaluation, at several sizes.

The model's side is plain torch: a forward and a backward for each microbatch, weighted by what its loss is a mean over, as
gradient accumulation does. The captured side runs stage after stage from detached leaves, as workers do.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.capture.check.restore_weights import weights_kept
from meshwright.ir.placement import Rows
from meshwright.runtime.stage.layers import Layers, columns_of
from meshwright.runtime.stage.objective import Objective
from tests.zoo.family import Family

BARS = {torch.float64: 1e-9, torch.float32: 1e-5}
MICROBATCHES = 2

Microbatch = dict[str, Tensor]
Run = Callable[[Microbatch], tuple[list[Tensor], Callable[[float], None]]]


class Draws(TorchDispatchMode):
    """Seeds every draw by what is drawn: a draw whose result nobody uses moves no other one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            first = args[0] if args else None
            key = f"{func} {tuple(first.shape) if isinstance(first, Tensor) else first!r}"
            torch.manual_seed(zlib.crc32(key.encode()))
        return func(*args, **kwargs)


@dataclass
class Result:
    """What a run over some microbatches gives."""

    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[list[Tensor]] = field(default_factory=list)


def microbatches(batch: Mapping[str, Tensor], count: int = MICROBATCHES) -> list[Microbatch]:
    """Consecutive rows, as even as possible; a batch whose columns have different numbers of rows stays whole."""
    size = len(next(iter(batch.values())))
    count = min(count, size) if {len(t) for t in batch.values()} == {size} else 1
    if count == 1:
        return [dict(batch)]
    cuts = [(size * k // count, size * (k + 1) // count) for k in range(count)]
    return [{name: t[a:b].clone() for name, t in batch.items()} for a, b in cuts]


def seeded(seed: int) -> None:
    """Every generator that a model may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def run(
    call: Run,
    model: nn.Module,
    batch: Mapping[str, Tensor],
    weigh: Callable[[Microbatch], float],
    *,
    train: bool,
    keyed: bool,
    count: int = MICROBATCHES,
) -> Result:
    """All microbatches: the weighted mean of their losses, its gradient, and what each gives besides."""
    found, total = Result(), 0.0
    model.zero_grad(set_to_none=True)
    parts = microbatches(batch, count)
    weights = [weigh(part) for part in parts]
    for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        seeded(100 + number)
        with torch.set_grad_enabled(train), Draws() if keyed else contextlib.nullcontext():
            outputs, backward = call({name: t.clone() for name, t in part.items()})
        found.loss += float(outputs[0].detach()) * weight
        found.outputs.append([t.detach() for t in outputs])
        total += weight
        if train:
            backward(weight)
    found.loss /= total
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            found.gradients[name] = (gradient.to_dense() if gradient.is_sparse else gradient) / total
    model.zero_grad(set_to_none=True)
    return found


def plain(model: nn.Module) -> Run:
    """The model itself: called by name, its loss first, then its scores."""

    def call(part: Microbatch) -> tuple[list[Tensor], Callable[[float], None]]:
        output = model(**part)
        loss = output if isinstance(output, Tensor) else output["loss"] if isinstance(output, Mapping) else output[0]
        scores = [output["logits"]] if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor) else []
        return [loss, *scores], lambda weight: (loss * weight).backward()

    return call


class Graphs:
    """The captured layers for the sizes of a microbatch: the first that hold for them, or the model captured again."""

    def __init__(self, layers: Layers) -> None:
        self.every = [layers]

    def of(self, part: Microbatch) -> Layers:
        shapes = {name: tuple(t.shape) for name, t in part.items()}
        for layers in self.every:
            if layers.refusal is None or layers.refusal(shapes) is None:
                return layers
        assert layers.again is not None
        self.every.append(layers.again(part))
        return self.every[-1]

    def train(self, mode: bool) -> None:
        for layer in (layer for layers in self.every for layer in layers.modules):
            layer.train(mode)


def staged(graphs: Graphs, train: bool) -> Run:
    """Captured layers: each stage starts from leaves, and its backward from the gradients of the next one's."""

    def call(part: Microbatch) -> tuple[list[Tensor], Callable[[float], None]]:
        kept: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
        values: tuple[Tensor, ...] = ()
        layers = graphs.of(part)
        graphs.train(train)
        for stage in range(layers.stages):
            leaves = tuple(v.detach().requires_grad_(v.requires_grad) for v in values)
            values = tuple(v.clone() for v in leaves)
            again: dict[int, Any] = {}
            for layer in layers.of_stage(stage):
                values = layer(*values, made_again=again, **{name: part[name].clone() for name in columns_of(layer)})
            kept.append((leaves, values))

        def backward(weight: float) -> None:
            (kept[-1][1][0] * weight).backward()
            for (_, outputs), (leaves, _) in zip(kept[-2::-1], kept[:0:-1], strict=True):
                pairs = [(o, l.grad) for o, l in zip(outputs, leaves, strict=True) if o.requires_grad and l.grad is not None]
                if pairs:
                    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])

        return list(values), backward

    return call


def weight_of(layers: Layers) -> Callable[[Microbatch], float]:
    """What the engine weighs a microbatch with."""
    objective = Objective(weigh=layers.weigh)

    def weigh(part: Microbatch) -> float:
        columns = {name: part[name] for name in objective.columns}
        left = [t for name, t in part.items() if name not in (layers.columns or ())]
        target = left[0] if left and not left[0].is_floating_point() else None
        return objective.weight(target, Rows(0, len(next(iter(part.values())))), columns).counts

    return weigh


def distance(mine: Tensor, own: Tensor, largest: float) -> float:
    """The largest difference, relative to the largest value; small tensors count as a thousandth of the model's largest."""
    if mine.shape != own.shape:
        return float("inf")
    if not own.numel():
        return 0.0
    mine, own = (torch.view_as_real(t) if t.is_complex() else t.double() for t in (mine, own))
    same = (mine == own) | ((mine != mine) & (own != own))
    apart = torch.where(same, 0.0, (mine - own).abs()).max()
    found = float(apart) / max(float(torch.nan_to_num(own, 0.0, 0.0, 0.0).abs().max()), 1e-3 * largest, 1e-30)
    return found if found == found else float("inf")


def difference(mine: Result, own: Result) -> tuple[float, str]:
    """The largest error of two runs, and where."""
    errors = [(abs(mine.loss - own.loss) / max(abs(own.loss), 1e-12), f"loss {mine.loss:.6g} instead of {own.loss:.6g}")]
    if mine.loss != mine.loss:
        errors = [(float("inf") if own.loss == own.loss else 0.0, f"loss {mine.loss} instead of {own.loss:.6g}")]
    for a, b in zip(mine.outputs, own.outputs, strict=True):
        errors += [(distance(x, y, 0.0), "loss" if not at else "logits") for at, (x, y) in enumerate(zip(a, b, strict=False))]
    largest = max((float(t.abs().max()) for t in own.gradients.values() if t.numel()), default=0.0)
    for name in {**own.gradients, **mine.gradients}:
        a, b = mine.gradients.get(name), own.gradients.get(name)
        reference = b if b is not None else a
        assert reference is not None
        zero = torch.zeros_like(reference)
        errors.append((distance(zero if a is None else a, zero if b is None else b, largest), f"gradient of {name}"))
    return max(errors, key=lambda e: e[0])


@contextlib.contextmanager
def mode(model: nn.Module, *, train: bool) -> Iterator[None]:
    """Training or evaluation; buffers, and weights that evaluation writes into, are afterwards what they were."""
    kept = {name: b.detach().clone() for name, b in model.named_buffers()}
    model.train(train)
    try:
        with contextlib.nullcontext() if train else weights_kept(model):
            yield
    finally:
        with torch.no_grad():
            for name, b in model.named_buffers():
                b.copy_(kept[name])


def weights_differ(family: Family, layers: Layers, batch: Mapping[str, Tensor]) -> str:
    """Do microbatches weigh what the family says? Empty where they do."""
    shares = [[rule(part) for part in microbatches(batch)] for rule in (weight_of(layers), family.items)]
    same = all(abs(a / sum(shares[0]) - b / sum(shares[1])) < 1e-12 for a, b in zip(*shares, strict=True))
    return "" if same else f"microbatches weigh {shares[0]} instead of {shares[1]}"


def compared(
    family: Family, model: nn.Module, layers: Layers, graphs: Graphs, batch: Mapping[str, Tensor], *, train: bool
) -> tuple[float, str]:
    """The largest error in one mode at the size of a batch, and where it is."""
    bar = BARS[next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)]
    if problem := weights_differ(family, layers, batch):
        return float("inf"), problem

    def both(keyed: bool = False) -> tuple[float, str]:
        with mode(model, train=train):
            own = run(plain(model), model, batch, family.items, train=train, keyed=keyed)
        with mode(model, train=train):
            mine = run(staged(graphs, train), model, batch, weight_of(layers), train=train, keyed=keyed)
        return difference(mine, own)

    found = both()
    if found[0] > bar:  # draws that nobody uses are not captured: then equal streams per draw
        again = both(keyed=True)
        found = again if again[0] <= bar else found
    return found[0], f"{found[1]} in {'training' if train else 'evaluation'}"
