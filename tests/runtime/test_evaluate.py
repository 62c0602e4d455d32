"""Evaluation and generation on an engine: the losses, outputs and tokens of the model in one process, under every plan."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import MeshwrightError
from meshwright.runtime.engine.evaluate import Evaluated, Forward, Outputs, outputs_of
from meshwright.train.models.small_models import gpt, text_batch
from meshwright.train.session.generate import generate
from tests.conftest import Pool
from tests.support.saving import Run, made

PLANS: list[dict[str, Any]] = [
    {"pp": 1, "microbatches": 2},
    {"pp": 2, "microbatches": 4},
    {"pp": 4, "schedule": "chimera", "microbatches": 4},
    {"pp": 2, "dp": 2, "schedule": "pipedream", "microbatches": 2},
    {"pp": 2, "width": (2, 1), "microbatches": 4},
    {"pp": 2, "schedule": "zbv", "microbatches": 4},
    {"pp": 2, "dp": 2, "schedule": "interleaved", "microbatches": 2},
    {"pp": 2, "schedule": "cyclic", "microbatches": 2},
    {"pp": 4, "schedule": "shifted", "microbatches": 4},
]
ROWS = (8, 7, 1)


def recipe(plan: dict[str, Any]) -> Run:
    return Run(plan, "", 1, build=partial(gpt, blocks=6, width=16, length=32, dropout=0.3))


def one_process(run: Run) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*run.build()).double().eval()


def evaluate(run: Run) -> tuple[list[list[Evaluated]], Evaluated, bool]:
    """Some batches with outputs everywhere, on the first rank and nowhere; then a step of training, and one more."""
    engine = made(run)
    forward = Forward(engine)
    found = [[forward(text_batch(7, rows=rows), outputs=who) for who in Outputs] for rows in ROWS]
    engine.run(run.batch, 0)
    after = forward(text_batch(7, rows=4))
    training = all(m.training for layer in engine.layers.modules for m in layer.modules())
    engine.close()
    return found, after, training


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.get("schedule", "onef1b") + "x".join(map(str, p.get("width", ()))))
def test_losses_and_outputs_are_those_of_one_process(pool: Pool, plan: dict[str, Any]) -> None:
    run = recipe(plan)
    model = one_process(run)
    ranks = pool.run(evaluate, run, ranks=run.parallel.processes)
    for index, rows in enumerate(ROWS):
        x, y = text_batch(7, rows=rows)
        with torch.no_grad():
            logits = model(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).item()
        for rank, (found, _, _) in enumerate(ranks):
            nobody, first, everybody = found[index]
            assert nobody.loss == first.loss == everybody.loss and abs(nobody.loss - loss) < 1e-12 * loss
            assert nobody.outputs == () and nobody.weight == rows * 16
            torch.testing.assert_close(everybody.outputs, (logits,), rtol=0, atol=1e-12)
            torch.testing.assert_close(first.outputs, (logits,) if rank == 0 else (), rtol=0, atol=1e-12)
    assert len({after.loss for _, after, _ in ranks}) == 1, "metrics are equal on every rank"
    assert ranks[0][1].loss < ranks[0][0][0][0].loss, "evaluation sees what training did"
    assert all(training for _, _, training in ranks), "and leaves the mode as it was"


def graphs_left(run: Run) -> bool:
    """Does an evaluation keep a graph or gradients?"""
    engine = made(run)
    before = [p.grad.clone() if p.grad is not None else None for p in engine.layers.names]
    found = Forward(engine)(text_batch(0, rows=4), outputs=Outputs.EVERYBODY)
    after = [p.grad for p in engine.layers.names]
    engine.close()
    same = all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(before, after, strict=True))
    return not same or any(t.requires_grad for t in found.outputs)


def test_no_graph_and_no_gradient_is_kept(pool: Pool) -> None:
    assert pool.run(graphs_left, recipe({"pp": 2}), ranks=2) == [False, False]


def test_what_a_last_layer_returns_beside_its_loss() -> None:
    class Found:
        def __init__(self) -> None:
            self.loss, self.logits, self.cache = torch.tensor(1.0), torch.ones(2, 3), "no tensor"

    loss, logits, more = torch.tensor(1.0), torch.ones(2, 3), torch.zeros(2)
    assert outputs_of(loss) == ()
    for given, count in ((logits, 1), ((loss, logits), 1), ((logits, more), 2), ([loss, logits, more], 2), (Found(), 1)):
        assert len(outputs_of(given)) == count
    assert len(outputs_of({"loss": loss, "logits": logits, "state": more, "cache": None})) == 2


# -- generation


def greedy(model: nn.Module, tokens: Tensor, mask: Tensor, count: int, end: int | None, pad: int) -> Tensor:
    """Row by row, without padding: what generation means."""
    rows = []
    for row, kept in zip(tokens, mask, strict=True):
        now = row[kept != 0]
        new: list[int] = []
        for _ in range(count):
            with torch.no_grad():
                new.append(int(model(now[None])[0, -1].float().argmax()))
            now = torch.cat([now, torch.tensor(new[-1:])])
            if new[-1] == end:
                break
        rows.append(new)
    longest = max(map(len, rows))
    return torch.cat([tokens, torch.tensor([new + [pad] * (longest - len(new)) for new in rows])], dim=1)


def prompts(rows: int, *, padded: bool) -> tuple[Tensor, Tensor]:
    tokens = text_batch(3, rows=rows, length=8)[0]
    mask = torch.ones_like(tokens)
    for row in range(rows if padded else 0):
        mask[row, : row % 4] = 0
    return tokens, mask


def generated(run: Run, rows: int, padded: bool, count: int, end: int | None) -> Tensor:
    engine = made(run)
    tokens, mask = prompts(rows, padded=padded)
    given = {"attention_mask": mask} if padded else {}
    found = generate(Forward(engine), tokens, max_new_tokens=count, eos_token_id=end, pad_token_id=0, **given)
    engine.close()
    return found


@pytest.mark.parametrize("plan", PLANS[1:5], ids=lambda p: p.get("schedule", "onef1b"))
def test_greedy_tokens_are_those_of_one_process(pool: Pool, plan: dict[str, Any]) -> None:
    run = recipe(plan)
    model = one_process(run)
    for rows, padded, ends in ((5, True, False), (3, False, True)):
        tokens, mask = prompts(rows, padded=padded)
        wanted = greedy(model, tokens, mask, 6, None, 0)
        end = int(wanted[0, 10]) if ends else None
        wanted = greedy(model, tokens, mask, 6, end, 0)
        for found in pool.run(generated, run, rows, padded, 6, end, ranks=run.parallel.processes):
            assert torch.equal(found, wanted)


def refused(run: Run) -> list[str]:
    engine = made(run)
    forward, said = Forward(engine), []
    tokens = torch.ones(2, 4, dtype=torch.long)
    for wrong in (
        {"input_ids": tokens[0], "max_new_tokens": 3},
        {"input_ids": tokens.float(), "max_new_tokens": 3},
        {"input_ids": tokens, "max_new_tokens": 0},
        {"input_ids": tokens, "max_new_tokens": 3, "attention_mask": tokens[:, :2]},
        {"input_ids": tokens, "max_new_tokens": 3, "attention_mask": torch.zeros_like(tokens)},
    ):
        try:
            generate(forward, **wrong)
        except MeshwrightError as error:
            said.append(str(error))
    engine.close()
    return said


def test_what_cannot_be_generated_is_said(pool: Pool) -> None:
    (said,) = pool.run(refused, recipe({"pp": 1}), ranks=1)
    assert [line.split()[0] for line in said] == ["input_ids", "input_ids", "max_new_tokens", "attention_mask", "a"]
