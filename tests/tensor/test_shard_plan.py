"""The one call: plans for other batch shapes, halves, layers of a stage, evaluation, and real processes over gloo."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.capture.cut.stage_modules import States
from meshwright.capture.shard.layout import Factor
from meshwright.capture.shard.parts import cut_parameters, part_of, whole_of
from meshwright.capture.shard.sharded import ShardPlan, half_rows, shard_plan
from meshwright.capture.shard.wide_casts import wide_casts
from meshwright.costs import modes
from meshwright.costs.declared import Phase
from meshwright.costs.scheme import Save, TensorRequest
from meshwright.tensor.group_wires import GroupWires, make_groups
from meshwright.tensor.thread_wires import run
from meshwright.tensor.wires import Wires
from tests.support import crew
from tests.support.sharded import Request, box, declared_words, family, grid, line, tesseract, text


def plan_of(name: str, asked: Request, **more: Any) -> ShardPlan:
    ref = family(name)
    return shard_plan(ref.model, ref.line.flat, asked[0], asked[1], **more)


def shapes(batch: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in batch.items()}


def test_other_rows_and_lengths_with_the_same_parts() -> None:
    """The example had 8 rows of 12: a batch of 4 rows of 10 runs on the same parameters; its scores are joined from all ranks."""
    ref, plan = family("gpt2"), plan_of("gpt2", box(2, 2, 1), save=Save.GATHERED)
    batch = text(rows=4, length=10)
    with wide_casts(), torch.no_grad():
        want = ref.model(**batch)
    again = plan.resized(shapes(batch))
    models = [copy.deepcopy(ref.model) for _ in range(plan.grid.ranks)]

    def work(wires: Wires) -> tuple[Tensor, ...]:
        model = models[wires.rank]
        cut_parameters(dict(model.named_parameters()), plan.settled.cuts, plan.grid, wires.rank)
        [layer] = again.layers(States(model), wires)
        with torch.no_grad():
            return layer(**{name: batch[name] for name in layer.batch_columns})

    results = run(plan.grid, work)
    assert all(abs(float(loss - want.loss)) < 1e-12 for loss, _ in results)
    scores = whole_of([found[1] for found in results], again.settled.programs[-1].layouts[1], plan.grid)
    torch.testing.assert_close(scores, want.logits, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "asked", "found"),
    [
        (8, line(2), (4, 4)),
        (3, line(2), (2, 1)),
        (1, line(2), None),
        (6, box(2, 2, 1), (4, 2)),
        (8, box(2, 1, 4), None),
        (9, grid(2), None),
    ],
)
def test_rows_of_halves(rows: int, asked: Request, found: tuple[int, int] | None) -> None:
    cells = modes.mode(asked[0]).grid(asked[1])
    assert half_rows(rows, modes.mode(asked[0]).scheme(cells), cells) == found


def test_one_row_runs_unsplit() -> None:
    ref = family("llama", rows=1)
    plan = shard_plan(ref.model, ref.line.flat, "line", TensorRequest(tp=2))
    models = [copy.deepcopy(ref.model) for _ in range(2)]
    one = {name: t[:1] for name, t in ref.batch.items()}
    small = plan.resized(shapes(one))

    def work(wires: Wires) -> float:
        model = models[wires.rank]
        cut_parameters(dict(model.named_parameters()), plan.settled.cuts, plan.grid, wires.rank)
        layer = small.overlapped(shapes(one), States(model), wires)
        assert len(layer.parts) == 1
        loss, *_ = layer(**{name: one[name] for name in layer.batch_columns})
        loss.backward()
        return float(loss.detach())

    with wide_casts():
        want = float(ref.model(**one).loss.detach())
    assert run(plan.grid, work) == pytest.approx([want, want], rel=1e-12)


@pytest.mark.parametrize("asked", [line(4), grid(2), tesseract(2, 2), box(2, 2, 2)], ids=str)
def test_parts_and_wholes(asked: Request) -> None:
    """Every tensor is put together again from its parts, padding left out."""
    ref = family("gpt2", vocab_size=49)
    found = shard_plan(ref.model, ref.line.flat, *asked)
    for name, parameter in ref.model.named_parameters():
        cut = found.settled.cuts[name]
        parts = [part_of(parameter.detach(), cut.layout, found.grid, rank) for rank in range(found.grid.ranks)]
        assert torch.equal(whole_of(parts, cut.layout, found.grid), parameter.detach())


def test_a_padded_part() -> None:
    layout, cells, tensor = ((Factor(6, ("a",), 5),),), modes.mode("box").grid(TensorRequest(box=(1, 3, 1))), torch.arange(5.0)
    parts = [part_of(tensor, layout, cells, rank) for rank in range(3)]
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4, 0]]
    assert torch.equal(whole_of(parts, layout, cells), tensor)


def on_process(rank: int, asked: Request) -> tuple[float, float, bool]:
    """One rank of a grid over gloo: errors of the loss and of gradients, and whether the words are the declared ones."""
    ref = family("llama")
    plan = shard_plan(ref.model, ref.line.flat, *asked)
    wires = GroupWires(plan.grid, rank, make_groups(plan.grid, [list(range(plan.grid.ranks))], rank))
    model = copy.deepcopy(ref.model)
    cut_parameters(dict(model.named_parameters()), plan.settled.cuts, plan.grid, rank)
    [layer] = plan.layers(States(model), wires)
    layer.train()
    loss, *_ = layer(**{name: ref.batch[name] for name in layer.batch_columns})
    loss.backward()
    wires.log.phase = Phase.SYNC
    worst = 0.0
    for name, parameter in model.named_parameters():
        cut = plan.settled.cuts[name]
        assert parameter.grad is not None
        want = part_of(ref.gradients[name], cut.layout, plan.grid, rank)
        worst = max(worst, float((wires.total(parameter.grad, tuple(cut.unsummed)) - want).abs().max()))
    sent = {phase: wires.log.words(phase) for phase in Phase} == declared_words(plan.settled)
    return abs(float(loss.detach() - ref.loss)), worst, sent


SLOW = [pytest.param(asked, marks=pytest.mark.slow) for asked in (line(4), box(2, 2, 1), box(1, 2, 2), grid(2))]


@pytest.mark.parametrize("asked", [line(2), *SLOW])
def test_real_processes_agree(asked: Request) -> None:
    ranks = modes.mode(asked[0]).grid(asked[1]).ranks
    for found in crew.run(on_process, ranks, asked, deadline_s=180.0):
        assert isinstance(found, tuple), found
        assert found[0] <= 1e-12 and found[1] <= 1e-12 and found[2]
