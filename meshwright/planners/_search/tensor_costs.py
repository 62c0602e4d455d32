"""What sharing the tensors of a layer costs: time of its collectives, for one microbatch.

The profile of a model lists the matrix products of each layer, and each mode moves the words that it declares for them
(`costs/declared.py`). In a profile without products, a layer with parameters and operations is taken as a whole transformer
layer of width (bytes of its output) / (bytes of an element) / (tokens of a row). Words of norms, tables and the loss are not
counted. Products take 1 / tp of their time, parameters and kept activations 1 / tp of their bytes. In the plain line mode every
rank also keeps whole what lies between two layers: inputs and outputs of the norm before attention or an MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from meshwright.costs.declared import ProductShape, Role, declared, transformer_layer
from meshwright.costs.modes import mode
from meshwright.costs.planned_grid import row_unit
from meshwright.costs.scheme import TensorRequest
from meshwright.costs.tensor_rows import requests
from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.profile import LayerCost, Profile
from meshwright.planners._search.problem import Floats

NORM_TENSORS = 4
"""Inputs and outputs of the two norms of a transformer layer."""
ASSUMED = "tensor ranks: words of the products of each layer as each mode declares them; unknown layers as transformer layers"


@dataclass(frozen=True)
class TensorChoice:
    """A mode with its ranks, and the keywords of `Parallel` that ask for it."""

    tp: int
    tensor: str = "line"
    asked: TensorRequest = field(default_factory=TensorRequest)

    @property
    def name(self) -> str:
        """The mode in words."""
        if self.asked.box is not None:
            return "x".join(map(str, self.asked.box))
        return f"{self.tensor}{' sequence' if self.asked.sequence else ''}"

    @property
    def copies_residual(self) -> bool:
        """Whether every rank has the whole activations between two layers."""
        return self.tensor == "line" and not self.asked.sequence

    @property
    def row_unit(self) -> int:
        """The rows of a microbatch are a multiple of this."""
        return row_unit(Parallel.of(self.keywords()))

    def keywords(self) -> dict[str, object]:
        """Returns what a plan says."""
        if self.tp == 1:
            return {}
        if self.asked.box is not None:
            return {"tp": self.tp, "tensor": "box", "box": list(self.asked.box)}
        return {"tp": self.tp, "tensor": self.tensor, **({"sequence": True} if self.asked.sequence else {})}


ALONE = TensorChoice(1)


class NotRunnableError(MeshwrightError):
    """The best plan has a tensor mode that cannot run the model: the search is repeated without the mode."""

    def __init__(self, mode: TensorChoice, why: str) -> None:
        super().__init__(why)
        self.mode = mode


def tensor_choices(profile: Profile, tp: int) -> list[TensorChoice]:
    """Returns the modes to try with this number of ranks; none if the profile does not know rows and operations.

    A tesseract copies weights over its depth, for which memory is not priced here.
    """
    if tp == 1:
        return [ALONE]
    if not profile.rows or not (_has_products(profile) or _has_tokens(profile)):
        return []
    return [TensorChoice(tp, name, asked) for name, asked in requests(tp) if name != "tesseract"]


def tensor_saved(profile: Profile, choice: TensorChoice, saved: Floats, output: Floats) -> Floats:
    """Returns for each layer the bytes that one rank keeps of `saved`."""
    if not choice.copies_residual:
        return saved / choice.tp
    known = _has_products(profile)
    norms = np.array([_norm_tensors(layer, known=known) for layer in profile.layers])
    whole = np.minimum(saved, norms * output)
    return whole + (saved - whole) / choice.tp


def _norm_tensors(layer: LayerCost, *, known: bool) -> int:
    """Returns the inputs and outputs of norms in a layer: attention and an MLP have one norm each."""
    if known:
        return NORM_TENSORS // 2 * sum(product.contracts for product in layer.products)
    return NORM_TENSORS if layer.parameter_bytes and layer.flops else 0


def _has_tokens(profile: Profile) -> bool:
    return profile.tokens_per_row > 1 and any(layer.flops for layer in profile.layers)


def _has_products(profile: Profile) -> bool:
    return any(layer.products for layer in profile.layers)


def tensor_seconds(profile: Profile, choice: TensorChoice, rows: int, latency_s: float, rate: float) -> tuple[Floats, Floats]:
    """Returns for each layer the seconds of collectives in a forward and in a backward."""
    found = mode(choice.tensor)
    grid = found.grid(choice.asked)
    scheme = found.scheme(grid)
    forward, backward = np.zeros(len(profile.layers)), np.zeros(len(profile.layers))
    has_products = _has_products(profile)
    known: dict[object, tuple[float, float]] = {}
    for n, layer in enumerate(profile.layers):
        key = layer.products if has_products else (layer.output_bytes, bool(layer.parameter_bytes and layer.flops))
        if key not in known:
            words = declared(scheme, grid, _shapes(profile, layer, rows, known=has_products)).total
            known[key] = (
                float(words.forward) * profile.parameter_itemsize / rate + words.forward_steps * latency_s,
                float(words.backward + words.sync) * profile.parameter_itemsize / rate + words.backward_steps * latency_s,
            )
        forward[n], backward[n] = known[key]
    return forward, backward


def _shapes(profile: Profile, layer: LayerCost, rows: int, *, known: bool) -> tuple[ProductShape, ...]:
    """Returns the products of a layer for a microbatch."""
    if known:
        return tuple(
            ProductShape(Role.CONTRACT if product.contracts else Role.EXPAND, rows * product.tokens, product.into, product.outs)
            for product in layer.products
        )
    if not layer.parameter_bytes or not layer.flops:
        return ()
    tokens = profile.tokens_per_row
    hidden = max(1, round(layer.output_bytes / profile.parameter_itemsize / tokens))
    return transformer_layer(batch=rows, sequence=tokens, hidden=hidden)
