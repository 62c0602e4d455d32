"""Products of every mode on blocks of matrices: each rank's block, words counted = declared = closed form, what is saved."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from meshwright.costs import modes
from meshwright.costs.declared import Phase, ProductShape, Role, declared, transformer_layer
from meshwright.costs.scheme import Save, TensorRequest
from meshwright.tensor.gathered_product import block_of, blocks
from meshwright.tensor.wires.lone_wires import DryWires
from meshwright.tensor.wires.thread_wires import ThreadWires, run
from meshwright.tensor.wires.wires import Wires
from tests.support.sharded import Request, box, grid, line, tesseract

MODES = [
    line(2),
    line(4),
    line(4, sequence=True),
    grid(2),
    tesseract(2, 1),
    tesseract(2, 2),
    box(2, 2, 2),
    box(1, 4, 2),
    box(4, 1, 2),
]
LARGE = [line(64), line(64, sequence=True), grid(8), tesseract(4, 4), box(4, 4, 4), box(4, 8, 2), box(64, 1, 1), box(1, 1, 64)]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("save", Save)
@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("asked", MODES, ids=str)
def test_every_block_of_a_product_and_of_its_gradients(asked: Request, role: Role, save: Save) -> None:
    """Siblings share one gather of x; every rank's blocks are those of whole matrices, the words are the declared ones."""
    mode = modes.mode(asked[0])
    cells = mode.grid(asked[1])
    scheme = mode.scheme(cells, save=save)
    x, weights = random(16, 24, seed=1), [random(32, 24, seed=2), random(16, 24, seed=3)]
    outs = [
        torch.randn(16, w.shape[0], dtype=torch.float64, generator=torch.Generator().manual_seed(4 + k))
        for k, w in enumerate(weights)
    ]
    twin = importlib.import_module(f"meshwright.tensor.{asked[0]}")
    lie = blocks(scheme, role)

    def work(wires: ThreadWires) -> None:
        own = block_of(x, lie.x, wires).clone().requires_grad_()
        mine = [block_of(w, lie.weight, wires).clone().requires_grad_() for w in weights]
        ys = twin.products(wires, scheme, role, own, mine)
        for y, w in zip(ys, weights, strict=True):
            torch.testing.assert_close(y, block_of(x @ w.t(), lie.y, wires), rtol=1e-12, atol=1e-12)
        torch.autograd.backward(ys, [block_of(g, lie.y, wires) for g in outs])
        want = sum(g @ w for g, w in zip(outs, weights, strict=True))
        assert isinstance(want, Tensor) and own.grad is not None
        torch.testing.assert_close(own.grad, block_of(want, lie.x, wires), rtol=1e-12, atol=1e-12)
        wires.log.phase = Phase.SYNC
        for w, g, whole in zip(mine, outs, weights, strict=True):
            assert w.grad is not None
            unsummed = tuple(axis for axis in ("d",) if axis in cells.axes)
            torch.testing.assert_close(
                wires.total(w.grad, unsummed), block_of(g.t() @ x, lie.weight, wires), rtol=1e-12, atol=1e-12
            )
            assert w.numel() * cells.ranks == whole.numel() * dict(cells.sizes).get("d", 1)
        expected = declared(scheme, cells, [ProductShape(role, 16, 24, (32, 16))])
        assert {p: wires.log.words(p) for p in Phase} == {p: expected.words(p) for p in Phase}
        assert wires.log.steps(Phase.BACKWARD) == expected.steps(Phase.BACKWARD)

    run(cells, work)


@pytest.mark.parametrize("save", Save)
@pytest.mark.parametrize("asked", [*MODES, *LARGE], ids=str)
def test_counted_is_declared_is_the_closed_form(asked: Request, save: Save) -> None:
    """The four products of a transformer layer, up to 64 ranks, on one rank alone that sends nothing."""
    mode = modes.mode(asked[0])
    cells = mode.grid(asked[1])
    scheme, sizes = mode.scheme(cells, save=save), {"batch": 64, "sequence": 2, "hidden": 64}
    wires = DryWires(cells, cells.ranks - 1)
    for shape in transformer_layer(**sizes):
        lie = blocks(scheme, shape.role)
        wires.log.phase = Phase.FORWARD
        x = block_of(torch.zeros(shape.rows, shape.into), lie.x, wires).requires_grad_()
        weight = block_of(torch.zeros(shape.outs[0], shape.into), lie.weight, wires).requires_grad_()
        twin = importlib.import_module(f"meshwright.tensor.{asked[0]}")
        twin.product(wires, scheme, shape.role, x, weight).sum().backward()
        if "d" in cells.axes:
            wires.log.phase = Phase.SYNC
            wires.total(weight, ("d",))
    closed = mode.layer_words(cells, **sizes, save=save)
    assert tuple(wires.log.words(phase) for phase in Phase) == (closed.forward, closed.backward, closed.sync)
    assert (wires.log.steps(Phase.FORWARD), wires.log.steps(Phase.BACKWARD)) == (closed.forward_steps, closed.backward_steps)
    assert declared(scheme, cells, transformer_layer(**sizes)).total == closed


@pytest.mark.parametrize("save", Save)
@pytest.mark.parametrize("asked", MODES, ids=str)
def test_saved_words_are_the_declared_ones(asked: Request, save: Save) -> None:
    """What autograd keeps of a product, counted as it is packed; a parameter's own storage is not counted."""
    mode = modes.mode(asked[0])
    cells = mode.grid(asked[1])
    scheme, wires = mode.scheme(cells, save=save), DryWires(cells, 0)
    for role in Role:
        lie = blocks(scheme, role)
        x = block_of(random(16, 24, seed=1), lie.x, wires).requires_grad_()
        weight = block_of(random(32, 24, seed=2), lie.weight, wires).requires_grad_()
        kept: dict[int, int] = {}

        def pack(t: Tensor, kept: dict[int, int] = kept, weight: Tensor = weight) -> Tensor:
            if t.data_ptr() != weight.data_ptr():
                kept[t.data_ptr()] = t.numel()
            return t

        twin = importlib.import_module(f"meshwright.tensor.{asked[0]}")
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            twin.product(wires, scheme, role, x, weight)
        assert sum(kept.values()) == declared(scheme, cells, [ProductShape(role, 16, 24, (32,))]).saved_words


def test_ranks_that_disagree_fail_with_both_calls() -> None:
    def work(wires: Wires) -> Tensor:
        t = torch.ones(2, 2)
        return wires.gather(t, "p", 0) if wires.rank else wires.scatter(t, "p", 0)

    cells = modes.mode("line").grid(TensorRequest(tp=2))
    with pytest.raises(AssertionError, match=r"ranks disagree: .*scatter.*gather"):
        run(cells, work)


def test_a_failing_rank_wakes_the_others() -> None:
    def work(wires: Wires) -> Tensor:
        if wires.rank == 2:
            raise ValueError("rank 2 is broken")
        return wires.total(torch.ones(1), ("p",))

    with pytest.raises(ValueError, match="rank 2 is broken"):
        run(modes.mode("line").grid(TensorRequest(tp=4)), work)
