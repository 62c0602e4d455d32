"""What sharing the tensors of a layer costs, from the closed forms of `costs/`: time of its collectives, for one microbatch.

A profile does not say what is inside a layer. One with parameters and operations is taken as a transformer layer. Its width is
(bytes of its output) / (bytes of an element) / (tokens of a row), and each mode moves the words that it declares. Products take
1 / tp of their time, parameters and kept activations 1 / tp of their bytes; a whole copy of the layer's input is kept, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.costs.modes import mode
from meshwright.costs.planned import row_unit
from meshwright.costs.scheme import TensorRequest
from meshwright.errors import MeshwrightError
from meshwright.ir.layer_costs import Profile
from meshwright.ir.plan.plan import Parallel
from meshwright.planners._search.problem import Floats

ASSUMED = "tensor ranks: layers with parameters are taken as transformer layers; words by the closed forms of each mode"


@dataclass(frozen=True)
class TensorChoice:
    """A mode with its ranks, and the keywords of `Parallel` that ask for it."""

    tp: int
    tensor: str = "line"
    sequence: bool = False
    box: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The mode in words."""
        return "x".join(map(str, self.box)) if self.box else f"{self.tensor}{' sequence' if self.sequence else ''}"

    @property
    def row_unit(self) -> int:
        """The rows of a microbatch are a multiple of this."""
        return row_unit(Parallel.of(self.keywords()))

    def keywords(self) -> dict[str, object]:
        """Returns what a plan says."""
        if self.tp == 1:
            return {}
        if self.box:
            return {"tp": self.tp, "tensor": "box", "box": list(self.box)}
        return {"tp": self.tp, "tensor": self.tensor, **({"sequence": True} if self.sequence else {})}


ALONE = TensorChoice(1)


class NotRunnableError(MeshwrightError):
    """The best plan has a tensor mode that cannot run the model: the search is repeated without the mode."""

    def __init__(self, mode: TensorChoice, why: str) -> None:
        super().__init__(why)
        self.mode = mode


def tensor_choices(profile: Profile, tp: int) -> list[TensorChoice]:
    """Returns the modes to try with so many ranks; none if the profile does not know rows and operations."""
    if tp == 1:
        return [ALONE]
    if not profile.rows or profile.tokens_per_row < 2 or not any(layer.flops for layer in profile.layers):
        return []
    found = [TensorChoice(tp), TensorChoice(tp, sequence=True)]
    side = round(tp**0.5)
    if side * side == tp:
        found.append(TensorChoice(tp, "grid"))
    if tp >= 4:
        found.append(TensorChoice(tp, "box", box=(2, tp // 2, 1)))
    return found


def tensor_seconds(profile: Profile, choice: TensorChoice, rows: int, latency_s: float, rate: float) -> tuple[Floats, Floats]:
    """Returns for each layer the seconds of collectives in a forward and in a backward."""
    asked = (
        TensorRequest(box=(choice.box[0], choice.box[1], choice.box[2]))
        if choice.box
        else TensorRequest(tp=choice.tp, sequence=choice.sequence)
    )
    found = mode(choice.tensor)
    grid = found.grid(asked)
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
