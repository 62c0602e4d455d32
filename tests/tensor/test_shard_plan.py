"""The one call: plans for other batch shapes, halves, layers of a stage, evaluation, and real processes over gloo."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from meshwright.capture.shard.layouts.layout import Factor
from meshwright.capture.shard.layouts.parts import part_of, whole_of
from meshwright.capture.shard.row_halves import half_rows
from meshwright.capture.shard.sharded import open_plan
from meshwright.capture.shard.wide_casts import wide_casts
from meshwright.costs import modes
from meshwright.costs.declared import Phase
from meshwright.costs.scheme import TensorRequest
from meshwright.tensor.wires.group_wires import GroupWires, make_groups
from meshwright.tensor.wires.thread_wires import run
from meshwright.tensor.wires.wires import Wires
from tests.support import crew
from tests.support.sharded import Request, box, cut_parameters, declared_words, family, grid, line, plan_of, tesseract, text


def shapes(batch: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in batch.items()}


def test_other_rows_and_lengths_with_the_same_parts() -> None:
    """The example had 8 rows of 12: a batch of 4 rows of 10 runs on the same parameters; its scores are joined from all ranks."""
    ref = family("gpt2")
    plan = plan_of(ref, box(2, 2, 1))
    batch = text(rows=4, length=10)
    with wide_casts(), torch.no_grad():
        want = ref.model(**batch)
    again = plan.resized(ref.model, shapes(batch))
    models = [copy.deepcopy(ref.model) for _ in range(plan.settled.grid.ranks)]

    def work(wires: Wires) -> tuple[Tensor, ...]:
        model = models[wires.rank]
        cut_parameters(dict(model.named_parameters()), plan.settled.cuts, plan.settled.grid, wires.rank)
        [layer] = open_plan(model, again, wires)
        with torch.no_grad():
            return layer(**{name: batch[name] for name in layer.batch_columns})

    results = run(plan.settled.grid, work)
    assert all(abs(float(loss - want.loss)) < 1e-12 for loss, _ in results)
    scores = whole_of([found[1] for found in results], again.settled.programs[-1].layouts[1], plan.settled.grid)
    torch.testing.assert_close(scores, want.logits, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("sides", [(2, 2, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 2, 1), (1, 1, 2)], ids=str)
def test_products_of_a_block_expand_and_contract_in_turn(name: str, sides: tuple[int, int, int]) -> None:
    """Also where an axis has one rank, and cuts nothing that could show which spread a value has."""
    settled = plan_of(family(name), box(*sides)).settled
    roles = {p.path.split(".", 3)[-1]: p.role for p in settled.products if p.role != "table"}
    down = {"attn.c_proj", "mlp.c_proj", "self_attn.o_proj", "mlp.down_proj"}
    assert len(roles.keys() & down) == 2
    assert roles == {path: "contract" if path in down else "expand" for path in roles}
    assert not settled.extra


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
    ref = family("llama")
    plan = plan_of(ref, line(2), overlap=True)
    models = [copy.deepcopy(ref.model) for _ in range(2)]
    one = {name: t[:1] for name, t in ref.batch.items()}
    small = plan.resized(ref.model, shapes(one))
    assert len(plan.halves) == 2 and not small.halves

    def work(wires: Wires) -> float:
        model = models[wires.rank]
        cut_parameters(dict(model.named_parameters()), plan.settled.cuts, plan.settled.grid, wires.rank)
        [layer] = open_plan(model, small, wires)
        loss, *_ = layer(**{name: one[name] for name in layer.batch_columns})
        loss.backward()
        return float(loss.detach())

    with wide_casts():
        want = float(ref.model(**one).loss.detach())
    assert run(plan.settled.grid, work) == pytest.approx([want, want], rel=1e-12)


@pytest.mark.parametrize("asked", [line(4), grid(2), tesseract(2, 2), box(2, 2, 2)], ids=str)
def test_parts_and_wholes(asked: Request) -> None:
    """Every tensor is put together again from its parts, padding left out."""
    ref = family("gpt2", vocab_size=49)
    found = plan_of(ref, asked).settled
    for name, parameter in ref.model.named_parameters():
        cut = found.cuts[name]
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
    plan = plan_of(ref, asked)
    cells = plan.settled.grid
    wires = GroupWires(cells, rank, make_groups(cells, [list(range(cells.ranks))], rank))
    model = copy.deepcopy(ref.model)
    cut_parameters(dict(model.named_parameters()), plan.settled.cuts, plan.settled.grid, rank)
    [layer] = open_plan(model, plan, wires)
    layer.train()
    loss, *_ = layer(**{name: ref.batch[name] for name in layer.batch_columns})
    loss.backward()
    wires.log.phase = Phase.SYNC
    worst = 0.0
    for name, parameter in model.named_parameters():
        cut = plan.settled.cuts[name]
        assert parameter.grad is not None
        want = part_of(ref.gradients[name], cut.layout, plan.settled.grid, rank)
        worst = max(worst, float((wires.total(parameter.grad, tuple(cut.unsummed)) - want).abs().max()))
    sent = {phase: wires.log.words(phase) for phase in Phase} == declared_words(plan.settled)
    return abs(float(loss.detach() - ref.loss)), worst, sent


@pytest.mark.slow
@pytest.mark.parametrize("asked", [line(2), line(4), box(2, 2, 1), box(1, 2, 2), grid(2)])
def test_real_processes_agree(asked: Request) -> None:
    ranks = modes.mode(asked[0]).grid(asked[1]).ranks
    for found in crew.run(on_process, ranks, asked, deadline_s=180.0):
        assert isinstance(found, tuple), found
        assert found[0] <= 1e-12 and found[1] <= 1e-12 and found[2]
