"""What sharing the tensors of a layer costs, from the closed forms of `costs/`: time of its collectives, for one microbatch.

A profile does not say what is inside a layer. One with parameters and operations is taken as a transformer layer. Its width is
(bytes of its output) / (bytes of an element) / (tokens of a row), and each mode moves the words that it declares. Products take
1 / tp of their time, parameters and kept activations 1 / tp of their bytes. In the plain line mode every rank also keeps whole
what lies between two layers: inputs and outputs of both norms of a transformer layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from meshwright.costs.modes import mode
from meshwright.costs.planned_grid import row_unit
from meshwright.costs.scheme import TensorRequest
from meshwright.costs.tensor_rows import requests
from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.profile import Profile
from meshwright.planners._search.problem import Floats

NORM_TENSORS = 4
"""Inputs and outputs of the two norms of a transformer layer."""
ASSUMED = "tensor ranks: layers with parameters are taken as transformer layers; words by the closed forms of each mode"


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
    if not profile.rows or profile.tokens_per_row < 2 or not any(layer.flops for layer in profile.layers):
        return []
    return [TensorChoice(tp, name, asked) for name, asked in requests(tp) if name != "tesseract"]


def tensor_saved(profile: Profile, choice: TensorChoice, saved: Floats, output: Floats) -> Floats:
    """Returns for each layer the bytes that one rank keeps of `saved`."""
    if not choice.copies_residual:
        return saved / choice.tp
    cut = np.array([bool(layer.parameter_bytes and layer.flops) for layer in profile.layers])
    whole = np.where(cut, np.minimum(saved, NORM_TENSORS * output), 0.0)
    return whole + (saved - whole) / choice.tp


def tensor_seconds(profile: Profile, choice: TensorChoice, rows: int, latency_s: float, rate: float) -> tuple[Floats, Floats]:
    """Returns for each layer the seconds of collectives in a forward and in a backward."""
    found = mode(choice.tensor)
    grid = found.grid(choice.asked)
    itemsize = profile.parameter_itemsize
    forward, backward = np.zeros(len(profile.layers)), np.zeros(len(profile.layers))
    known: dict[float, tuple[float, float]] = {}
    for n, layer in enumerate(profile.layers):
        if not layer.parameter_bytes or not layer.flops:
            continue
        if layer.output_bytes not in known:
            hidden = max(1, round(layer.output_bytes / itemsize / profile.tokens_per_row))
            words = found.layer_words(grid, batch=rows, sequence=profile.tokens_per_row, hidden=hidden)
            known[layer.output_bytes] = (
                float(words.forward) * itemsize / rate + words.forward_steps * latency_s,
                float(words.backward + words.sync) * itemsize / rate + words.backward_steps * latency_s,
            )
        forward[n], backward[n] = known[layer.output_bytes]
    return forward, backward
