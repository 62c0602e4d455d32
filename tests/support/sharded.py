"""Tiny models of many families under tensor modes, on threads of one process, against the user's own model in float64.

Casts to float32 inside the model are widened in the run and in the reference alike.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture.cut.cut_points import LayerChain
from meshwright.capture.cut.liveness import Line
from meshwright.capture.cut.stage_modules import States
from meshwright.capture.model_graph import line_of
from meshwright.capture.shard.emit import shard_layers
from meshwright.capture.shard.layouts.parts import part_of
from meshwright.capture.shard.layouts.steps import ParameterCut
from meshwright.capture.shard.settle import Settled
from meshwright.capture.shard.sharded import ShardPlan, TensorCut, shard_plan
from meshwright.capture.shard.wide_casts import wide_casts, widened
from meshwright.capture.trace.export import flatten
from meshwright.costs.declared import Phase
from meshwright.costs.scheme import Grid, Save, TensorRequest
from meshwright.tensor.wires.thread_wires import run
from meshwright.tensor.wires.wires import Wires
from tests.support import captured_models as small

Request = tuple[str, TensorRequest]


def line(tp: int, *, sequence: bool = False) -> Request:
    return "line", TensorRequest(tp=tp, sequence=sequence)


def box(w: int, a: int, b: int) -> Request:
    return "box", TensorRequest(box=(w, a, b))


def grid(q: int) -> Request:
    return "grid", TensorRequest(tp=q * q)


def tesseract(q: int, d: int) -> Request:
    return "tesseract", TensorRequest(tp=q * q * d, depth=d)


def text(rows: int = 8, length: int = 12) -> dict[str, Tensor]:
    return small.text(0, rows=rows, length=length)


def pictures(rows: int = 8) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    shown = torch.randn(rows, 3, 16, 16, generator=random, dtype=torch.float64)
    return {"pixel_values": shown, "labels": torch.randint(0, 5, (rows,), generator=random)}


def two_lengths(rows: int = 8) -> dict[str, Tensor]:
    return {**text(rows), "labels": small.text(100, rows=rows, length=10)["labels"]}


FAMILIES: dict[str, tuple[Callable[..., nn.Module], dict[str, Any], Callable[..., dict[str, Tensor]]]] = {
    "gpt2": (small.gpt2, {"n_embd": 32, "n_head": 8, "n_layer": 2}, text),
    "llama": (
        small.llama,
        {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 16, "num_key_value_heads": 8},
        text,
    ),
    "bert": (small.bert, {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8}, text),
    "t5": (small.t5, {"d_model": 32, "d_kv": 4, "d_ff": 64, "num_heads": 8}, two_lengths),
    "vit": (small.vit, {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8}, pictures),
}
LAYERS = {
    "gpt2": "n_layer",
    "llama": "num_hidden_layers",
    "bert": "num_hidden_layers",
    "t5": "num_layers",
    "vit": "num_hidden_layers",
}


@dataclass(frozen=True)
class Reference:
    """The user's model in one process: its loss and gradients, and its graph."""

    model: nn.Module
    batch: dict[str, Tensor]
    line: Line
    ties: dict[str, str]
    loss: Tensor
    gradients: dict[str, Tensor]


def reference(model: nn.Module, batch: dict[str, Tensor], seed: int | None = None) -> Reference:
    model = model.double().train()
    flat = widened(flatten(model, batch))
    if seed is not None:
        torch.manual_seed(seed)
    with wide_casts():
        output = model(**batch)
    loss = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    gradients = {n: p.grad.clone() if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}
    model.zero_grad()
    states = States(model)
    ties = {name: states.first[parameter] for name, parameter in states.parameters.items()}
    return Reference(model, batch, line_of(model, flat), ties, loss.detach(), gradients)


@cache
def family(name: str, rows: int = 8, layers: int = 1, **more: Any) -> Reference:
    make, sizes, batch = FAMILIES[name]
    torch.manual_seed(0)
    return reference(make(**{**sizes, LAYERS[name]: layers, **more}), batch(rows))


@dataclass(frozen=True)
class Outcome:
    """How far a run on all ranks of a grid is from its reference, and what rank 0 has sent."""

    loss: float
    gradient: float
    worst: str
    settled: Settled
    words: dict[Phase, Fraction]
    matrices: dict[str, float]
    """The share of every matrix that a rank holds."""


def tensor_cut(asked: Request, *, save: Save = Save.GATHERED, overlap: bool = False, **more: Any) -> TensorCut:
    return replace(TensorCut.of(*asked, save=save, **more), overlap=overlap)


def plan_of(
    ref: Reference,
    asked: Request,
    *,
    batch: Mapping[str, Tensor] | None = None,
    places: Sequence[int] | None = None,
    **more: Any,
) -> ShardPlan:
    shapes = {name: tuple(t.shape) for name, t in (batch or ref.batch).items()}
    return shard_plan(ref.model, ref.line.flat, tensor_cut(asked, **more), shapes, places=places)


def settled(ref: Reference, asked: Request, **more: Any) -> Settled:
    return plan_of(ref, asked, **more).settled


Pass = Callable[[nn.Module, Wires], Tensor]


def on_threads(ref: Reference, found: Settled, work: Pass, *, seed: int | None = None, floor: float = 1e-3) -> Outcome:
    """Run forward and backward on every rank; `work` returns the loss and leaves gradients in the parameters.

    Small gradients are compared with `floor` times the largest of the model.
    """
    cells = found.grid
    models = [copy.deepcopy(ref.model) for _ in range(cells.ranks)]

    def rank(wires: Wires) -> tuple[float, dict[str, Tensor], Wires]:
        model = models[wires.rank]
        cut_parameters(dict(model.named_parameters()), found.cuts, cells, wires.rank)
        loss = work(model, wires)
        wires.log.phase = Phase.SYNC
        sums = {}
        for name, parameter in model.named_parameters():
            if name in found.cuts:
                gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                sums[name] = wires.total(gradient, tuple(found.cuts[name].unsummed))
        return abs(float(loss) - float(ref.loss)), sums, wires

    results = run(cells, rank)
    return _outcome(ref, found, cells, results, floor)


def _sound(error: float) -> float:
    """An error that is no number is as large as can be; `max` would pass over it."""
    return math.inf if math.isnan(error) else error


def _outcome(
    ref: Reference, found: Settled, cells: Grid, results: Sequence[tuple[float, dict[str, Tensor], Wires]], floor: float
) -> Outcome:
    assert all(name in found.cuts or not gradient.any() for name, gradient in ref.gradients.items()), "a parameter was lost"
    largest, worst = max(float(g.abs().max()) for g in ref.gradients.values() if g.numel()), ("", 0.0)
    for name, cut in found.cuts.items():
        if not ref.gradients[name].numel():
            continue
        for number, (_, sums, _) in enumerate(results):
            want = part_of(ref.gradients[name], cut.layout, cells, number)
            scale = max(float(want.abs().max()), floor * largest)
            error = _sound(float((sums[name] - want).abs().max()) / scale)
            worst = max(worst, (name, error), key=lambda pair: pair[1])
    log = results[0][2].log
    shares = {
        n: results[0][1][n].numel() / g.numel()
        for n, g in ref.gradients.items()
        if g.dim() == 2 and g.numel() and n in found.cuts
    }
    return Outcome(
        max(_sound(error) for error, _, _ in results),
        worst[1],
        worst[0],
        found,
        {phase: log.words(phase) for phase in Phase},
        shares,
    )


def plain_pass(ref: Reference, found: Settled, seed: int | None = None) -> Pass:
    """Layers one after another, with moves that wait, by autograd."""

    def work(model: nn.Module, wires: Wires) -> Tensor:
        layers = shard_layers(found, States(model), wires)
        values: tuple[Any, ...] = ()
        again: dict[int, Any] = {}
        for layer in layers:
            layer.train()
            values = layer(*values, made_again=again, **{name: ref.batch[name] for name in layer.batch_columns})
        values[0].backward()
        return values[0].detach()

    return work


def parity(ref: Reference, asked: Request, *, layers: bool = False, **more: Any) -> Outcome:
    """A model under a mode, in one program or layer by layer."""
    places = LayerChain(ref.line).starts if layers else None
    found = settled(ref, asked, places=places, **more)
    return on_threads(ref, found, plain_pass(ref, found))


def declared_words(found: Settled) -> dict[Phase, Fraction]:
    """What a run is declared to send."""
    transfers = [*found.transfers(), *found.sums()]
    return {phase: sum((t.words for t in transfers if t.phase is phase), Fraction(0)) for phase in Phase}


def cut_parameters(parameters: Mapping[str, nn.Parameter], cuts: Mapping[str, ParameterCut], grid: Grid, rank: int) -> None:
    """Replaces every parameter by this rank's part, in place, so that ties and optimizers stay valid."""
    for name, cut in cuts.items():
        parameters[name].data = part_of(parameters[name].detach(), cut.layout, grid, rank).clone()
