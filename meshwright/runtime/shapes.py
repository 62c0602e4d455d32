"""What the default loss is given: an output and a target that belong together, row by row."""

from __future__ import annotations

from torch import Tensor

from meshwright.errors import MeshwrightError


def refuse_shapes(output: Tensor, target: Tensor) -> None:
    """The default loss compares like with like: torch would broadcast (N, 1) against (N,) to N x N pairs of rows."""
    got, wanted = tuple(output.shape), tuple(target.shape)
    if target.is_floating_point():
        if got != wanted:
            raise MeshwrightError(
                f"the model's output is {got} and its target {wanted}: their mean square would pair all rows with all others",
                fix="targets of the output's shape (target.view_as(output)), or an own loss function",
            )
    elif output[..., 0].numel() != target.numel():
        raise MeshwrightError(
            f"the model's output is {got} and its labels {wanted}: the default loss, a cross entropy, has the classes last",
            fix=f"labels of {got[:-1]}, or an own loss function",
        )
