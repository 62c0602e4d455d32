"""The tensors of a step, cut by rows: into microbatches, and further for halves and teams.

A batch is a tuple whose last tensor is the target, or a mapping in which the target has one of its usual names; what is
left goes to the first stage. Microbatch i of copy j is cut number j N + i of N dp cuts; a short batch gives short cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.ir.placement import Rows

TARGETS = ("labels", "label", "targets", "target", "y")
"""What a target is called in a mapping."""

Given = Mapping[str, Tensor] | Sequence[Tensor]


class Batch:
    """One step's tensors on one copy."""

    def __init__(self, given: Given, *, microbatches: int, copy: int = 0, copies: int = 1, device: torch.device | None = None):
        args, kwargs, target = _sorted(given)
        sizes = {t.shape[0] if t.dim() else 0 for t in (*args, *kwargs.values(), *([] if target is None else [target]))}
        if len(sizes) != 1:
            raise MeshwrightError(f"the tensors of a batch have different numbers of rows: {sorted(sizes)}")
        self.size = sizes.pop()
        self.microbatches, self.copy, self.copies = microbatches, copy, copies
        whole, cuts, first = Rows(0, self.size), copies * microbatches, copy * microbatches
        self._rows = [whole.cut(first + mb, cuts) for mb in range(microbatches)]
        self._weights: dict[Rows, float] = {}
        self.args = tuple(t.to(device) for t in args)
        self.kwargs = {name: t.to(device) for name, t in kwargs.items()}
        self.target = None if target is None else target.to(device)
        self.form = (self.size, *(tuple(t.shape[1:]) for t in (*self.args, *self.kwargs.values())))
        """What the shapes of everything that follows depend on; equal on all ranks."""

    def rows(self, mb: int) -> Rows:
        """The rows of microbatch `mb` of this copy, in the whole batch."""
        return self._rows[mb]

    def inputs(self, rows: Rows) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """What the first stage is called with."""
        start, stop = rows
        return tuple(t[start:stop] for t in self.args), {name: t[start:stop] for name, t in self.kwargs.items()}

    def targets(self, rows: Rows) -> Tensor | None:
        """What the loss compares with."""
        return None if self.target is None else self.target[rows.start : rows.stop]

    def weight(self, rows: Rows, objective: Objective) -> float:
        """What these rows count, asked for by every stage and worked out once."""
        found = self._weights.get(rows)
        if found is None:
            labelled = self.target is not None and not self.target.is_floating_point()
            found = self._weights[rows] = objective.weight(self.targets(rows) if labelled else None, rows)
        return found


def _sorted(given: Given) -> tuple[tuple[Tensor, ...], dict[str, Tensor], Tensor | None]:
    """Positional inputs, named inputs, target."""
    if isinstance(given, Tensor):
        return (given,), {}, None
    if isinstance(given, Mapping):
        names = [name for name in TARGETS if name in given]
        inputs = {name: t for name, t in given.items() if name not in names[:1]}
        return (), inputs, given[names[0]] if names else None
    tensors = tuple(given)
    if not tensors or not all(isinstance(t, Tensor) for t in tensors):
        raise MeshwrightError(f"a batch is a tuple or a mapping of tensors, got {type(given).__name__}")
    return (tensors[:-1], {}, tensors[-1]) if len(tensors) > 1 else (tensors, {}, None)


Loss = Callable[[Tensor, Tensor], Tensor]
"""A user's own: output and target of some rows to their mean loss."""


class Objective:
    """The sum of the losses of some rows and the weight it is to be divided by: rows, or tokens that count.

    Sums and weights are added up over the whole batch and divided once, so that any plan gives the same mean.
    """

    def __init__(self, loss: Loss | None = None, *, ignored: int = -100) -> None:
        self.loss, self.ignored = loss, ignored

    def weight(self, target: Tensor | None, rows: Rows) -> float:
        """What the loss of these rows counts: labels that are not ignored, or rows where targets are no labels."""
        if target is not None and not target.is_floating_point():
            # What has no sign holds no -100, and torch compares it with what -100 wraps to: 156 in a byte.
            return float((target != self.ignored).sum() if target.dtype.is_signed else target.numel())
        return float(rows.stop - rows.start)

    def __call__(self, output: Tensor, target: Tensor | None, rows: Rows) -> Tensor:
        """The sum over these rows; where nothing counts there is nothing to learn, and a mean would be no number."""
        count = self.weight(target, rows)
        if not count:
            return torch.zeros((), dtype=torch.float32, device=output.device)
        if output.dtype in (torch.bfloat16, torch.float16):
            output = output.float()  # a sum over rows leaves their range
        if self.loss is not None:
            if target is None:
                raise MeshwrightError("a loss function needs a target, the batch has none", fix="batch(step) -> (inputs, target)")
            return self.loss(output, target) * count
        if output.dim() == 0:
            return output * count
        if target is None:
            raise MeshwrightError(
                f"the last stage gives {tuple(output.shape)} and the batch has no target to compare it with",
                fix="return a scalar loss from the model, or batch(step) -> (inputs, target)",
            )
        if not target.is_floating_point():
            classes = output.reshape(-1, output.shape[-1])
            return torch.nn.functional.cross_entropy(classes, target.reshape(-1), ignore_index=self.ignored, reduction="sum")
        return torch.nn.functional.mse_loss(output, target.to(output.dtype)) * count
