"""The product of every mode on plain matrices: gather x, gather W, multiply, reduce. Backward does the same with swapped axes.

A captured model runs the same moves inside its graph. This function takes blocks of matrices, so that each mode can be tested,
counted and timed on its own. Siblings, which read the same x, share its gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshwright.costs.declared import Phase, Role
from meshwright.costs.product_plan import ProductPlan, product_plan
from meshwright.costs.scheme import Axes, Save, Scheme
from meshwright.tensor.wires.wires import Wires

_DIM = {"rows": 0, "sequence": 0, "features": 1, "out": 0, "into": 1}


@dataclass(frozen=True, slots=True)
class Blocks:
    """The layout of a product: the axes that cut (rows, features) of x and y, and (out, in) of the weight."""

    x: tuple[Axes, Axes]
    weight: tuple[Axes, Axes]
    y: tuple[Axes, Axes]


def blocks(scheme: Scheme, role: Role) -> Blocks:
    """Returns the layout of a product with this role."""
    have, want = (scheme.residual, scheme.inner) if role is Role.EXPAND else (scheme.inner, scheme.residual)
    matrix = scheme.expand if role is Role.EXPAND else scheme.contract
    rows, after = ((*spread.rows, *spread.sequence) for spread in (have, want))
    return Blocks((rows, have.features), (matrix.out, matrix.into), (after, want.features))


def block_of(whole: Tensor, axes: tuple[Axes, Axes], wires: Wires) -> Tensor:
    """Returns this rank's block of a matrix."""
    for dim, names in enumerate(axes):
        for axis in names:
            whole = wires.part(whole, axis, dim)
    return whole.contiguous()


@dataclass(frozen=True, slots=True)
class _Call:
    wires: Wires
    plan: ProductPlan
    save: Save

    def wide(self, x: Tensor) -> Tensor:
        """Returns the gathered input."""
        for where, axis in self.plan.input_gathers:
            x = self.wires.gather(x, axis, _DIM[where])
        return x

    def whole(self, weight: Tensor) -> Tensor:
        """Returns the gathered weight."""
        for side, axis in self.plan.weight_gathers:
            weight = self.wires.gather(weight, axis, _DIM[side])
        return weight

    def scatter(self, g: Tensor, moves: Sequence[tuple[str, str]]) -> Tensor:
        """Returns the scattered gradient: the adjoint of the gathers."""
        for where, axis in reversed(moves):
            g = self.wires.scatter(g, axis, _DIM[where])
        return g


class _Products(Function):
    """Products of one x with several weights."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """Returns all products."""
        wide, wholes = call.wide(x), [call.whole(weight) for weight in weights]
        ctx.call = call
        kept = (x, *weights) if call.save is Save.SHARDS else (wide, *wholes)
        ctx.save_for_backward(*kept)
        found = []
        for whole in wholes:
            y = torch.mm(wide, whole.t())
            for where, axis in call.plan.scatters:
                y = call.wires.scatter(y, axis, _DIM[where])
            found.append(call.wires.total(y, call.plan.total))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Returns the gradient of x and those of the weights."""
        call: _Call = ctx.call
        call.wires.log.phase = Phase.BACKWARD
        x, *weights = ctx.saved_tensors
        if call.save is Save.SHARDS:
            x, weights = call.wide(x), [call.whole(weight) for weight in weights]
        total, found = None, []
        for g, weight in zip(gradients, weights, strict=True):
            for where, axis in reversed(call.plan.scatters):
                g = call.wires.gather(g, axis, _DIM[where])
            part = torch.mm(g, weight)
            total = part if total is None else total + part
            found.append(call.scatter(torch.mm(g.t(), x), call.plan.weight_gathers))
        assert total is not None
        total = call.wires.total(call.scatter(total, call.plan.input_gathers), call.plan.copy)
        return None, total, *found


_products: Callable[..., tuple[Tensor, ...]] = _Products.apply


def products(wires: Wires, scheme: Scheme, role: Role, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the products of one input with several weights. All tensors are blocks of this rank."""
    have, want = (scheme.residual, scheme.inner) if role is Role.EXPAND else (scheme.inner, scheme.residual)
    plan = product_plan(have, want, scheme.expand if role is Role.EXPAND else scheme.contract)
    return _products(_Call(wires, plan, scheme.save), x, *weights)


def product(wires: Wires, scheme: Scheme, role: Role, x: Tensor, weight: Tensor) -> Tensor:
    """Returns the product of one input with one weight."""
    return products(wires, scheme, role, x, [weight])[0]
