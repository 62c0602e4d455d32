"""Dropout inside torch's attention: every rank draws for all heads and rows, as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.capture.cut.stage_modules import States
from meshwright.capture.shard.emit import shard_layers
from meshwright.errors import MeshwrightError
from meshwright.tensor.global_dropout import GlobalDropout
from meshwright.tensor.wires.wires import Wires
from tests.support.sharded import Request, box, grid, line, on_threads, plan_of, reference, settled

WIDTH, HEADS, SEED = 16, 4, 5


def tokens() -> dict[str, Tensor]:
    found = torch.randint(0, 24, (8, 6), generator=torch.Generator().manual_seed(0))
    return {"tokens": found, "labels": found.roll(-1, 1)}


class Attentive(nn.Module):
    """One layer of attention, plain, with a mask, or with fewer keys than queries."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.kv = kind, 2 if kind == "grouped" else 1 if kind == "single" else HEADS
        self.table, self.q, self.out = nn.Embedding(24, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // HEADS * self.kv) for _ in range(2))
        self.head = nn.Linear(WIDTH, 24)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table(tokens)
        counts = ((self.q, HEADS), (self.k, self.kv), (self.v, self.kv))
        q, k, v = (part(x).unflatten(-1, (count, -1)).transpose(1, 2) for part, count in counts)
        more: dict[str, Any] = {"is_causal": True, "enable_gqa": self.kv != HEADS}
        if self.kind == "masked":  # the first token of some rows sees nothing
            seen = torch.ones(6, 6, dtype=torch.bool).tril() & (tokens != tokens[:1])[:, None, None]
            more = {"attn_mask": seen}
        found = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0, **more)
        return functional.cross_entropy(self.head(x + self.out(found.transpose(1, 2).flatten(2))).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    "asked", [line(2), *(pytest.param(m, marks=pytest.mark.slow) for m in (line(4), box(2, 2, 1), grid(2)))], ids=str
)
@pytest.mark.parametrize("kind", ["causal", "masked", "grouped", "single"])
def test_draws_are_those_of_one_process(kind: str, asked: Request) -> None:
    torch.manual_seed(0)
    kept = torch.get_rng_state()
    ref = reference(Attentive(kind), tokens(), seed=SEED)
    torch.set_rng_state(kept)
    found = settled(ref, asked)

    def work(model: nn.Module, wires: Wires) -> Tensor:
        stream = torch.Generator().manual_seed(SEED)  # threads share torch's own
        [layer] = shard_layers(found, States(model), wires)
        layer.train()
        drops = [part for part in layer.modules() if isinstance(part, GlobalDropout)]
        assert len(drops) == 1
        drops[0].generator = stream
        (loss, *_) = layer(**{name: ref.batch[name] for name in layer.batch_columns})
        loss.backward()
        return loss.detach()

    outcome = on_threads(ref, found, work)
    assert outcome.loss <= 1e-12 and outcome.gradient <= 1e-12, outcome


def test_halves_refuse_draws_on_whole_values() -> None:
    """A module that runs whole on every rank would draw for its half of the rows alone."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.drop, self.head = nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 8)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return functional.cross_entropy(self.head(self.drop(self.up(x))), labels)

    batch = {"x": torch.randn(8, 16, dtype=torch.float64), "labels": torch.arange(8)}
    ref = reference(Dropped(), batch)
    plan_of(ref, line(2), overlap=True)
    plan_of(ref, line(2), replicate=["drop"])
    with pytest.raises(MeshwrightError, match=r"aten.dropout.default in drop .*: it draws random numbers") as caught:
        plan_of(ref, line(2), overlap=True, replicate=["drop"])
    assert caught.value.fix == "overlap=False"
