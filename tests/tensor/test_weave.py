"""Runs in pieces equal plain ones: both save policies, split backward, halves of a microbatch, dropout, recomputed passes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from meshwright.capture.shard import woven_chain
from meshwright.capture.shard.row_halves import zero_where_nothing_counts
from meshwright.capture.shard.settle import Settled
from meshwright.capture.shard.sharded import open_plan
from meshwright.capture.shard.woven_layer import WovenLayer
from meshwright.costs import modes
from meshwright.costs.declared import Phase, ProductShape, Role, declared
from meshwright.costs.scheme import Save, TensorRequest
from meshwright.errors import MeshwrightError
from meshwright.tensor.moves import Move, Moved, MoveKind
from meshwright.tensor.weave.pieces import cut
from meshwright.tensor.weave.split_product import SplitProduct
from meshwright.tensor.weave.weave import Weave
from meshwright.tensor.wires.lone_wires import DryWires
from meshwright.tensor.wires.thread_wires import run
from meshwright.tensor.wires.wires import Wires
from tests.support import captured_models as small
from tests.support.sharded import (
    FAMILIES,
    LayerChain,
    Outcome,
    Pass,
    Reference,
    Request,
    box,
    cut_parameters,
    declared_words,
    family,
    grid,
    line,
    on_threads,
    plan_of,
    reference,
    tesseract,
    text,
)
from tests.support.woven import woven_pass

BOUND = 1e-12


def check(outcome: Outcome) -> None:
    assert outcome.loss <= BOUND and outcome.gradient <= BOUND, outcome


@pytest.mark.parametrize("save", Save)
@pytest.mark.parametrize(
    ("name", "asked"), [("gpt2", box(2, 2, 2)), ("llama", line(2, sequence=True)), ("llama", grid(2))], ids=str
)
def test_pieces_equal_the_user_s_model(name: str, asked: Request, save: Save) -> None:
    ref = family(name)
    plan = plan_of(ref, asked, save=save)
    outcome = on_threads(ref, plan.settled, woven_pass(ref, plan))
    check(outcome)
    assert outcome.words == declared_words(plan.settled), "gathered again exactly where shards are kept"


@pytest.mark.slow
@pytest.mark.parametrize("save", Save)
@pytest.mark.parametrize(
    "asked", [line(4), line(2, sequence=True), grid(2), tesseract(2, 2), box(2, 2, 2), box(1, 2, 4)], ids=str
)
@pytest.mark.parametrize("chained", [False, True], ids=["layers", "chain"])
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_in_pieces_everywhere(name: str, asked: Request, save: Save, chained: bool) -> None:
    """Layers of a model, with a split backward: gradients of what crosses come first, those of weights later."""
    ref = family(name, layers=2)
    plan = plan_of(ref, asked, save=save, places=LayerChain(ref.line).starts)
    outcome = on_threads(ref, plan.settled, woven_pass(ref, plan, split=True, chained=chained))
    check(outcome)
    assert outcome.words == declared_words(plan.settled)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize(("name", "asked"), [("t5", box(2, 1, 2)), ("gpt2", line(2, sequence=True))], ids=str)
def test_a_chain_of_layers(name: str, asked: Request, split: bool) -> None:
    ref = family(name, layers=2)
    plan = plan_of(ref, asked, save=Save.SHARDS, places=LayerChain(ref.line).starts)
    assert len(plan.settled.programs) > 4
    outcome = on_threads(ref, plan.settled, woven_pass(ref, plan, split=split))
    check(outcome)
    assert outcome.words == declared_words(plan.settled)


def halved_pass(
    ref: Reference, asked: Request, rows: tuple[int, int], save: Save, *, split: bool = False
) -> tuple[Settled, Pass]:
    plan = plan_of(ref, asked, save=save, overlap=True, places=LayerChain(ref.line).starts)
    starts = (0, rows[0])
    batches = [{n: t[a : a + r] for n, t in ref.batch.items()} for a, r in zip(starts, rows, strict=True)]
    halves = [plan_of(ref, asked, save=save, batch=batch, places=plan.settled.places).settled for batch in batches]
    plan = replace(plan, halves=tuple(map(zero_where_nothing_counts, halves)))
    return plan.settled, woven_pass(ref, plan, split=split)


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
    plan = plan_of(ref, tesseract(2, 2))
    found = plan.settled
    models = [copy.deepcopy(ref.model) for _ in range(8)]
    work = woven_pass(ref, plan)

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


def test_words_that_are_sent_and_not_declared_are_seen() -> None:
    ref = family("llama")
    plan = plan_of(ref, line(2))

    def rank(wires: Wires) -> list[str]:
        model = models[wires.rank]
        cut_parameters(dict(model.named_parameters()), plan.settled.cuts, plan.settled.grid, wires.rank)
        [layer] = open_plan(model, plan, wires)
        layer.words = {**layer.words, Phase.BACKWARD: layer.words[Phase.BACKWARD] + 1}
        layer(**{name: ref.batch[name] for name in layer.batch_columns})[0].backward()
        found = wires.log.differences()
        wires.log.clear()
        assert not wires.log.differences()
        return found

    models = [copy.deepcopy(ref.model) for _ in range(2)]
    for found in run(plan.settled.grid, rank):
        assert len(found) == 1 and found[0].startswith("backward: "), found


class Mixing(nn.Module):
    """A model whose rows are not independent of each other."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.how == "mean of rows":
            hidden = hidden - hidden.mean(0)
        if self.how == "softmax over rows":
            hidden = hidden.softmax(0)
        if self.how == "order of rows":
            hidden = torch.cat([hidden[1:], hidden[:1]])
        loss = functional.cross_entropy(self.last(hidden), labels)
        if self.how == "two means":
            loss = loss + hidden.square().mean()
        return loss.exp() if self.how == "exponential" else loss * 2 if self.how == "scaled" else loss


@pytest.mark.parametrize(
    ("how", "operation"),
    [
        ("mean of rows", "aten.mean"),
        ("softmax over rows", "aten.softmax"),
        ("order of rows", "aten.slice"),
        ("two means", "aten.mean"),
        ("exponential", "aten.exp"),
    ],
)
def test_models_that_mix_rows_do_not_run_as_halves(how: str, operation: str) -> None:
    random = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(8, 8, generator=random).double(), "labels": torch.randint(0, 4, (8,), generator=random)}
    ref = reference(Mixing(how), batch)
    with pytest.raises(MeshwrightError, match=f"runs a microbatch as two halves, and {operation}"):
        plan_of(ref, line(2), overlap=True)


@pytest.mark.parametrize("how", ["", "scaled"])
def test_models_that_do_not_mix_rows(how: str) -> None:
    """With labels of which the halves count different numbers."""
    random = torch.Generator().manual_seed(0)
    labels = torch.tensor([-100, -100, 3, -100, 1, 2, 0, 1])
    ref = reference(Mixing(how), {"x": torch.randn(8, 8, generator=random).double(), "labels": labels})
    whole, work = halved_pass(ref, line(2), (5, 3), Save.SHARDS, split=True)
    check(on_threads(ref, whole, work))


def layer_products(intermediate: int = 64, hidden: int = 32, heads: int = 16, groups: int = 8) -> tuple[ProductShape, ...]:
    """The products of a Llama of one layer, for 8 rows of 12 tokens."""
    width = hidden // heads
    return (
        ProductShape(Role.EXPAND, 96, hidden, (heads * width, groups * width, groups * width)),
        ProductShape(Role.CONTRACT, 96, heads * width, (hidden,)),
        ProductShape(Role.EXPAND, 96, hidden, (intermediate, intermediate)),
        ProductShape(Role.CONTRACT, 96, intermediate, (hidden,)),
        ProductShape(Role.EXPAND, 96, hidden, (small.VOCABULARY,)),
    )


@pytest.mark.parametrize("save", Save)
@pytest.mark.parametrize("asked", [line(2), line(2, sequence=True), grid(2), box(2, 2, 2)], ids=str)
def test_saved_bytes_are_the_declared_ones(asked: Request, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between forward and backward, products keep their part of x, or the gathered x and weights: to the byte."""
    ref = family("llama")
    plan = plan_of(ref, asked, save=save, places=LayerChain(ref.line).starts)
    model, cells = copy.deepcopy(ref.model), plan.settled.grid
    cut_parameters(dict(model.named_parameters()), plan.settled.cuts, cells, 0)
    layers = open_plan(model, plan, DryWires(cells, 0))
    weaves, given = list[Weave](), list[tuple[Tensor, Tensor]]()
    monkeypatch.setattr(woven_chain, "Weave", lambda *args, **more: weaves.append(Weave(*args, **more)) or weaves[-1])
    for module in (module for layer in layers for module in layer.modules() if isinstance(module, SplitProduct)):
        module.register_forward_hook(lambda _, inputs, __: given.append((inputs[0], inputs[1])))
    loss, *_ = WovenLayer.chained(layers)((), ref.batch)
    made_again = [made for half in weaves[0].halves for trail in half.trails.values() for made in trail.dropped]
    inputs = {x.untyped_storage()._cdata for x, _ in given}
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept = [tensor for pair in given for tensor in pair]
    kept += [source for _, value, source in made_again if value.untyped_storage()._cdata in inputs]
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept}
    counted = sum(size for storage, size in sizes.items() if storage not in own)
    assert counted == 8 * declared(plan.settled.scheme, cells, layer_products()).saved_words
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_view_of_a_gathered_value_keeps_its_memory() -> None:
    """A piece hands on a view of what was gathered for it: the gathered value is not dropped before the view is read."""
    wires = DryWires(modes.mode("line").grid(TensorRequest(tp=2)), 0)
    gather = Move(MoveKind.GATHER, ("p",), (2, 3), (4, 3), (2, 3), 0, True)
    total = Move(MoveKind.TOTAL, ("p",), (4, 3), (4, 3))
    graph = fx.Graph()
    x = graph.placeholder("x")
    whole = graph.call_module("gather", (x,))
    view = graph.call_function(torch.transpose, (whole, 0, 1))
    summed = graph.call_module("total", (graph.call_function(torch.mul, (whole, 2.0)),))
    graph.output((graph.call_function(torch.add, (graph.call_function(torch.transpose, (view, 0, 1)), summed)),))
    module = fx.GraphModule({"gather": Moved(gather, wires), "total": Moved(total, wires)}, graph)
    given = torch.arange(6.0).reshape(2, 3).requires_grad_()
    weave = Weave([cut(module, wires)], keep=False)
    with torch.enable_grad():
        [(found,)] = weave.forward([{"x": given}])
    assert torch.equal(found, 3 * torch.cat([given, given]))
    [gradients] = weave.backward([[torch.ones(4, 3)]])
    assert torch.equal(gradients["x"], torch.full((2, 3), 3.0))
