"""Parameters with several kinds of readers, adapters of any rank, attention of torch, heads of one output, counters of norms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.capture.cut.cut_points import LayerChain
from meshwright.capture.shard.shard_report import shard_report
from meshwright.costs.scheme import Save
from meshwright.errors import MeshwrightError
from meshwright.tensor.wires.thread_wires import run
from tests.support import captured_models as small
from tests.support.sharded import (
    Outcome,
    Reference,
    Request,
    box,
    cut_parameters,
    declared_words,
    grid,
    line,
    on_threads,
    plan_of,
    reference,
    settled,
    text,
)
from tests.support.woven import woven_pass

BOUND = 1e-12
SLOW = pytest.mark.slow
MODES = [line(2), line(2, sequence=True), box(2, 2, 1), box(1, 2, 2), grid(2)]


def tokens(rows: int = 8) -> dict[str, Tensor]:
    found = torch.randint(0, 48, (rows, 6), generator=torch.Generator().manual_seed(0))
    return {"tokens": found, "labels": found.roll(-1, 1)}


class Words(nn.Module):
    """A table, a body and a head."""

    def __init__(self, body: nn.Module, *, tied: bool = False) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(48, 16), body, nn.Linear(16, 48, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.body(self.table(tokens))).flatten(0, 1), labels.flatten())


class Penalised(Words):
    """The loss reads every weight once more."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        weights = sum((parameter**2).sum() for parameter in self.parameters())
        return super().forward(tokens, labels) + 0.01 * weights + 0.1 * self.body[0].weight.abs().max()


def body() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def built(make: Callable[[], nn.Module], batch: dict[str, Tensor]) -> Reference:
    torch.manual_seed(0)
    return reference(make(), batch)


def woven(ref: Reference, asked: Request, *, save: Save = Save.SHARDS, **more: Any) -> Outcome:
    """A run in pieces, layer by layer; every rank checks its words against the declared ones."""
    plan = plan_of(ref, asked, save=save, places=LayerChain(ref.line).starts, **more)
    outcome = on_threads(ref, plan.settled, woven_pass(ref, plan))
    assert outcome.loss <= BOUND and outcome.gradient <= BOUND, outcome
    assert more.get("overlap") or outcome.words == declared_words(plan.settled)
    return outcome


@pytest.mark.parametrize("asked", MODES, ids=str)
def test_a_penalty_reads_every_weight_once_more(asked: Request) -> None:
    """Weights of products are moved to the second reader, or from the first, and gradients of both are added."""
    ref = built(lambda: Penalised(body()), tokens())
    woven(ref, asked)
    woven(ref, asked, save=Save.GATHERED)


@pytest.mark.parametrize("replicate", [["head"], ["table"], pytest.param(["table", "head"], marks=SLOW)], ids=str)
@pytest.mark.parametrize("asked", MODES, ids=str)
def test_a_tied_weight_of_which_one_module_is_replicated(asked: Request, replicate: list[str]) -> None:
    ref = built(lambda: Words(body(), tied=True), tokens())
    woven(ref, asked, replicate=replicate)


def test_halves_of_a_microbatch_share_a_tied_weight() -> None:
    ref = built(lambda: Words(body(), tied=True), tokens())
    for asked in (line(2), box(2, 2, 1)):
        woven(ref, asked, replicate=["table"], overlap=True)


def adapted(rank: int, **more: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=rank, init_lora_weights=False, **more)
    found: nn.Module = peft.get_peft_model(small.llama(**sizes, num_hidden_layers=1), config)
    return found


@pytest.mark.parametrize("asked", [*MODES, line(4)], ids=str)
def test_adapters_of_a_rank_that_does_not_divide_stay_whole(asked: Request) -> None:
    found = woven(built(lambda: adapted(3), text()), asked)
    small_one = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default"
    assert [p.role for p in found.settled.products if p.path == small_one] == ["whole"]
    assert any(each.startswith(f"whole on every rank: {small_one}.weight [3, 32]") for each in shard_report(found.settled))


@SLOW
@pytest.mark.parametrize("rank", [1, 4, 5, 6])
@pytest.mark.parametrize("asked", [*MODES, box(2, 2, 2)], ids=str)
def test_adapters_of_many_ranks(asked: Request, rank: int) -> None:
    woven(built(lambda: adapted(rank), text()), asked)


@pytest.mark.parametrize("asked", [line(2, sequence=True), box(1, 2, 2), *(pytest.param(m, marks=SLOW) for m in MODES)], ids=str)
def test_adapters_with_a_norm_of_the_weight(asked: Request) -> None:
    """DoRA reads the frozen weight as a product and for its norm, which gets no gradient."""
    woven(built(lambda: adapted(4, use_dora=True), text()), asked)


def test_a_wide_weight_that_does_not_divide_is_still_refused() -> None:
    ref = built(lambda: Words(nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 16))), tokens())
    with pytest.raises(MeshwrightError, match=r"body.0.weight: size 33 does not divide by 2 \(p=2\)"):
        settled(ref, line(2))


class Attends(nn.Module):
    """torch's own attention, on itself or on something else."""

    def __init__(self, *, across: bool = False, **more: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, **more)
        self.memory = nn.Linear(16, more.get("kdim") or 16) if across else None

    def forward(self, x: Tensor) -> Tensor:
        other = x if self.memory is None else self.memory(x)
        y: Tensor = self.attention(x, other, other)[0]
        return x + y


@pytest.mark.parametrize("asked", MODES, ids=str)
@pytest.mark.parametrize(
    "more",
    [
        {"batch_first": True},
        pytest.param({}, marks=SLOW),
        pytest.param({"batch_first": True, "across": True}, marks=SLOW),
        pytest.param({"batch_first": True, "across": True, "kdim": 8, "vdim": 8}, marks=SLOW),
    ],
    ids=str,
)
def test_the_attention_of_torch(asked: Request, more: dict[str, Any]) -> None:
    found = woven(built(lambda: Words(Attends(**more)), tokens()), asked)
    if "across" not in more and asked == line(2):
        assert not found.settled.extra, "heads are cut inside each of q, k and v"
        assert found.matrices["body.attention.in_proj_weight"] == 0.5


class LengthFirst(Attends):
    """The length before the rows, as torch's attention has it unless it is told otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize(
    "asked", [mode if mode == line(2, sequence=True) else pytest.param(mode, marks=SLOW) for mode in MODES], ids=str
)
def test_an_odd_length_before_the_rows(asked: Request) -> None:
    """The axis that cuts features inside a block cuts rows outside of it: what does not divide there is gathered."""
    odd = {name: column[:, :5] for name, column in tokens().items()}
    woven(built(lambda: Words(LengthFirst()), odd), asked)


class OneNumber(nn.Module):
    """A head of one output, and a gate of one feature before another product."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.gate, self.down, self.head = nn.Linear(8, 16), nn.Linear(8, 1), nn.Linear(16, 8), nn.Linear(8, 1)
        self.how = how

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.head(self.down(self.up(x).relu() * self.gate(x).sigmoid()))
        if self.how == "column":
            return functional.mse_loss(y, labels[:, None])
        return functional.mse_loss(y.squeeze(-1) if self.how == "squeeze" else y.view(-1), labels)


@pytest.mark.parametrize("how", ["squeeze", pytest.param("view", marks=SLOW), pytest.param("column", marks=SLOW)])
@pytest.mark.parametrize("asked", [*MODES, line(4)], ids=str)
def test_heads_of_one_output(asked: Request, how: str) -> None:
    random = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(8, 8, generator=random).double(), "labels": torch.randn(8, generator=random).double()}
    woven(built(lambda: OneNumber(how), batch), asked)


class Bags(nn.Module):
    def __init__(self, ids: int, mode: str) -> None:
        super().__init__()
        self.bag, self.up, self.head = nn.EmbeddingBag(ids, 8, mode=mode), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.up(self.bag(ids)).relu()), labels)


@pytest.mark.parametrize(
    ("ids", "mode"), [(1, "sum"), *(pytest.param(*each, marks=SLOW) for each in ((1, "mean"), (9, "max"), (9, "mean")))]
)
@pytest.mark.parametrize("asked", MODES, ids=str)
def test_bags_of_embeddings(asked: Request, ids: int, mode: str) -> None:
    """A table of one row cannot be cut, and is whole on every rank, as those of all bags."""
    random = torch.Generator().manual_seed(0)
    batch = {"ids": torch.randint(0, ids, (8, 3), generator=random), "labels": torch.randint(0, 4, (8,), generator=random)}
    found = woven(built(lambda: Bags(ids, mode), batch), asked)
    assert set(found.settled.replicated) == {"bag.weight"}


@pytest.mark.parametrize("ids", [1, 9])
@pytest.mark.parametrize("asked", [line(2), line(2, sequence=True), box(1, 2, 1)], ids=str)
def test_a_bag_of_a_batch_of_one_row(asked: Request, ids: int) -> None:
    batch = {"ids": torch.zeros(1, 3, dtype=torch.long), "labels": torch.ones(1, dtype=torch.long)}
    woven(built(lambda: Bags(ids, "sum"), batch), asked)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.norm(self.first(x)).relu().mean((2, 3))), labels)


@pytest.mark.parametrize("asked", MODES, ids=str)
def test_statistics_and_counters_of_norms_are_those_of_one_process(asked: Request) -> None:
    random = torch.Generator().manual_seed(0)
    shown = {"x": torch.randn(8, 3, 4, 4, generator=random).double(), "labels": torch.randint(0, 4, (8,), generator=random)}
    ref = built(Pictures, shown)  # its forward has counted once
    plan = plan_of(ref, asked, save=Save.SHARDS, places=LayerChain(ref.line).starts)
    models = [copy.deepcopy(ref.model) for _ in range(plan.settled.grid.ranks)]
    work = woven_pass(ref, plan)

    def rank(wires: Any) -> None:
        cut_parameters(dict(models[wires.rank].named_parameters()), plan.settled.cuts, plan.settled.grid, wires.rank)
        for _ in range(2):
            work(models[wires.rank], wires)
            wires.log.clear()

    run(plan.settled.grid, rank)
    for _ in range(2):
        ref.model(**shown)
    wanted = dict(ref.model.named_buffers())
    assert int(wanted["norm.num_batches_tracked"]) == 3
    for model in models:
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffer, wanted[name], rtol=1e-12, atol=0)
