"""Counts the words that the products of a mode send: runs them on threads of one process and reads the log of one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.costs.declared import Phase, ProductShape, Role
from meshwright.costs.product_plan import product_plan
from meshwright.costs.scheme import Grid, Scheme, Words
from meshwright.tensor.gathered_product import block_of, blocks, products
from meshwright.tensor.wires.thread_wires import run
from meshwright.tensor.wires.wires import TransferLog, Wires


def counted_words(scheme: Scheme, grid: Grid, shapes: Sequence[ProductShape]) -> Words:
    """Runs products forward and backward, sums their weight gradients, and returns the transfers of one rank."""

    def work(wires: Wires) -> TransferLog:
        for shape in shapes:
            _product(scheme, wires, shape)
        return wires.log

    log = run(grid, work)[0]
    steps = log.steps(Phase.FORWARD), log.steps(Phase.BACKWARD)
    return Words(log.words(Phase.FORWARD), log.words(Phase.BACKWARD), log.words(Phase.SYNC), *steps)


def _product(scheme: Scheme, wires: Wires, shape: ProductShape) -> None:
    own, expands = blocks(scheme, shape.role), shape.role is Role.EXPAND
    x = block_of(torch.zeros(shape.rows, shape.into), own.x, wires).requires_grad_()
    weights = [block_of(torch.zeros(out, shape.into), own.weight, wires).requires_grad_() for out in shape.outs]
    wires.log.phase = Phase.FORWARD
    results = products(wires, scheme, shape.role, x, weights)
    torch.autograd.backward(results, [torch.zeros_like(y) for y in results])
    have, want = (scheme.residual, scheme.inner) if expands else (scheme.inner, scheme.residual)
    unsummed = product_plan(have, want, scheme.expand if expands else scheme.contract).unsummed
    wires.log.phase = Phase.SYNC
    for weight in weights:
        assert weight.grad is not None
        wires.total(weight.grad, unsummed)
