"""Runs in pieces equal plain ones: both save policies, split backward, halves of a microbatch, dropout, recomputed passes."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.capture.cut.loss_weight import weigher
from meshwright.capture.cut.stage_modules import States
from meshwright.capture.shard.parts import cut_parameters
from meshwright.capture.shard.settle import Settled
from meshwright.capture.shard.woven_layer import halved_layer, woven_layers
from meshwright.costs.scheme import Save
from meshwright.tensor.lone_wires import DryWires
from meshwright.tensor.thread_wires import run
from meshwright.tensor.wires import Wires
from tests.support import captured_models as small
from tests.support.sharded import (
    FAMILIES,
    LayerChain,
    Outcome,
    Pass,
    Reference,
    Request,
    box,
    declared_words,
    family,
    grid,
    line,
    on_threads,
    reference,
    settled,
    tesseract,
    text,
)

BOUND = 1e-12


def woven_pass(ref: Reference, found: Settled, *, split: bool = False) -> Pass:
    def work(model: nn.Module, wires: Wires) -> Tensor:
        values: tuple[Any, ...] = ()
        again: dict[int, Any] = {}
        layers = woven_layers(found, States(model), wires)
        for layer in layers:
            layer.train()
            if split:
                layer.slot.rests = []
            values = layer(*values, made_again=again, **{name: ref.batch[name] for name in layer.batch_columns})
        values[0].backward()
        for layer in layers:
            layer.slot.finish()
        return values[0].detach()

    return work


def check(outcome: Outcome) -> None:
    assert outcome.loss <= BOUND and outcome.gradient <= BOUND, outcome


@pytest.mark.parametrize("save", Save)
@pytest.mark.parametrize(
    ("name", "asked"), [("gpt2", box(2, 2, 2)), ("llama", line(2, sequence=True)), ("llama", grid(2))], ids=str
)
def test_pieces_equal_the_user_s_model(name: str, asked: Request, save: Save) -> None:
    ref = family(name)
    found = settled(ref, asked, save=save)
    outcome = on_threads(ref, found, woven_pass(ref, found))
    check(outcome)
    assert outcome.words == declared_words(found), "gathered again exactly where shards are kept"


@pytest.mark.slow
@pytest.mark.parametrize("save", Save)
@pytest.mark.parametrize(
    "asked", [line(4), line(2, sequence=True), grid(2), tesseract(2, 2), box(2, 2, 2), box(1, 2, 4)], ids=str
)
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_in_pieces_everywhere(name: str, asked: Request, save: Save) -> None:
    """Layer by layer, with a split backward: gradients of what crosses come first, those of weights later."""
    ref = family(name, layers=2)
    found = settled(ref, asked, save=save, places=LayerChain(ref.line).starts)
    outcome = on_threads(ref, found, woven_pass(ref, found, split=True))
    check(outcome)
    assert outcome.words == declared_words(found)


def halved_pass(ref: Reference, asked: Request, rows: tuple[int, int], save: Save) -> tuple[Settled, Pass]:
    whole = settled(ref, asked, save=save)
    starts = (0, rows[0])
    batches = [{n: t[a : a + r] for n, t in ref.batch.items()} for a, r in zip(starts, rows, strict=True)]
    halves = [settled(ref, asked, save=save, batch=batch) for batch in batches]

    def work(model: nn.Module, wires: Wires) -> Tensor:
        states = States(model)
        weigh = weigher(ref.line, states, None)
        count = None if weigh is None else lambda columns: float(weigh(columns))
        layer = halved_layer(whole, halves, states, wires, weigh=count)
        layer.train()
        loss, *_ = layer(**{name: ref.batch[name] for name in layer.batch_columns})
        loss.backward()
        return loss.detach()

    return whole, work


@pytest.mark.parametrize(
    ("name", "asked", "rows"),
    [("llama", line(2), (4, 4)), ("gpt2", box(2, 2, 1), (4, 4)), ("llama", line(2), (5, 3)), ("gpt2", box(1, 2, 2), (6, 2))],
    ids=str,
)
def test_two_halves_equal_one_microbatch(name: str, asked: Request, rows: tuple[int, int]) -> None:
    ref = family(name)
    whole, work = halved_pass(ref, asked, rows, Save.SHARDS)
    check(on_threads(ref, whole, work))


def test_a_half_whose_labels_are_all_ignored() -> None:
    torch.manual_seed(0)
    batch = text()
    batch["labels"][4:] = -100
    ref = reference(small.llama(hidden_size=32, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4), batch)
    whole, work = halved_pass(ref, line(2), (4, 4), Save.GATHERED)
    check(on_threads(ref, whole, work))


def test_halves_share_whole_weights_and_send_no_more() -> None:
    """Words of weights once, words of activations as without halves; only the two sums of a loss come twice."""
    ref = family("llama")
    whole, work = halved_pass(ref, box(2, 2, 1), (4, 4), Save.GATHERED)
    outcome = on_threads(ref, whole, work)
    declared = declared_words(whole)
    extra = {phase: outcome.words[phase] - declared[phase] for phase in declared}
    assert list(extra.values()) == [2, 0, 0]


@pytest.mark.parametrize("asked", [line(2), box(2, 2, 1)], ids=str)
def test_halves_drop_what_a_whole_microbatch_drops(asked: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are drawn for all rows by both halves, and are those of the user's model."""
    torch.manual_seed(0)
    rates = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    ref = reference(small.gpt2(n_embd=32, n_head=8, n_layer=1, **rates), text(), seed=5)
    whole, work = halved_pass(ref, asked, (4, 4), Save.SHARDS)
    monkeypatch.setattr(torch, "get_rng_state", lambda: torch.Generator().manual_seed(5).get_state())  # threads share torch's
    check(on_threads(ref, whole, work))


def test_depths_hold_the_same_bits_after_a_step() -> None:
    """Different samples on different depths; the summed gradients, and so the weights, are equal to the bit."""
    ref = family("llama")
    found = settled(ref, tesseract(2, 2))
    models = [copy.deepcopy(ref.model) for _ in range(8)]
    work = woven_pass(ref, found)

    def rank(wires: Wires) -> dict[str, Tensor]:
        model = models[wires.rank]
        cut_parameters(dict(model.named_parameters()), found.cuts, found.grid, wires.rank)
        work(model, wires)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * wires.total(parameter.grad, tuple(found.cuts[name].unsummed))
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    results = run(found.grid, rank)
    for number in range(4):
        assert all(torch.equal(t, results[number + 4][name]) for name, t in results[number].items())


@pytest.mark.parametrize("save", Save)
def test_what_is_gathered_is_kept_or_dropped(save: Save) -> None:
    """Saved for backward of gathered inputs and weights: their declared bytes, or none where shards are kept."""
    ref = family("llama", intermediate_size=96)
    found = settled(ref, box(2, 2, 1), save=save)
    model = copy.deepcopy(ref.model)
    wires = DryWires(found.grid, 0)
    cut_parameters(dict(model.named_parameters()), found.cuts, found.grid, 0)
    [layer] = woven_layers(found, States(model), wires)
    tensors: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        tensors[t.untyped_storage()._cdata] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss, *_ = layer(**{name: ref.batch[name] for name in layer.batch_columns})
    steps = [step for step in found.programs[0].steps if step.move is not None and step.move.kind == "gather"]
    made = [step.move.made for step in steps if step.move is not None and "embed_tokens" not in step.path]
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    held = [t for key, t in tensors.items() if tuple(t.shape) in made and key not in own]
    assert len(held) == len(made), "every gathered value is saved by the product that reads it"
    declared = sum(math.prod(shape) for shape in made) * 8
    assert sum(t.untyped_storage().nbytes() for t in held) == (declared if save is Save.GATHERED else 0)
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
