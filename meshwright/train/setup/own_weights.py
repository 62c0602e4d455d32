"""The part of a model that a rank holds: only the stages of the rank have values.

    fill_small_buffers(skeleton)                  before the cut: small buffers, which may decide how a loss is weighted
    materialise(skeleton, weights, layers, mine)  after the cut: the layers of this rank
    drop_others(model, layers, mine)              the same for a model that already has its values

Values come from the seed of the sketch or from safetensors files. A trained sketch has its values in such files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers import set_seed

from meshwright.capture.weights.sketch import Skeleton, tensors_of
from meshwright.errors import MeshwrightError
from meshwright.runtime.stage.layers import Layers

SMALL = 1 << 16
"""The largest number of elements of a buffer that is filled before the cut."""

Where = str | Path | None


def fill_small_buffers(skeleton: Skeleton, weights: Where = None) -> None:
    """Fills small buffers. Raises here, before any worker starts, if the weights do not fit the model."""
    small = [name for name, t in tensors_of(skeleton.model) if not isinstance(t, nn.Parameter) and t.numel() <= SMALL]
    skeleton.give(small, weights)


def materialise(skeleton: Skeleton, weights: Where, layers: Layers, mine: Iterable[nn.Module]) -> None:
    """Fills these layers and no others. Under a tensor mode each parameter is cut as soon as its values are there."""
    split = layers.tensor

    def part(tensor: Tensor, value: Tensor) -> Tensor:
        if split is None or not isinstance(tensor, nn.Parameter) or tensor not in split.cuts:
            return value
        return split.part(tensor, value).clone()

    skeleton.give(_kept(skeleton, layers, mine), weights, part=part)


def drop_others(model: nn.Module, layers: Layers, mine: Iterable[nn.Module]) -> None:
    """Drops all values of a whole model except those of these layers. Nothing else may use this copy of the model."""
    _kept(Skeleton(model, seed=0), layers, mine)


def _kept(skeleton: Skeleton, layers: Layers, mine: Iterable[nn.Module]) -> set[str]:
    """Returns the names of the tensors in these layers, and drops all other tensors.

    Rank 0 also keeps the tensors that are in no layer, because it exports them.
    """
    names = set(skeleton.names_in(mine))
    if dist.get_rank() == 0:
        names |= set(skeleton.names) - set(skeleton.names_in(layers.modules))
    skeleton.keep(names)
    return names


def write_times(folder: Path) -> dict[str, int]:
    """Returns the modification time of each weight file, in nanoseconds."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}


def refuse_changed_files(folder: Path, known: dict[str, int]) -> None:
    """Raises if the files of trained weights have changed since they were written."""
    if write_times(folder) != known:
        raise MeshwrightError(
            f"the trained weights in {folder} have changed since this trainer wrote them",
            fix="an output_dir that no other run uses",
        )


def seeded(build: Callable[[], Any], seed: int) -> Any:
    """Builds a model as the Hugging Face Trainer does: after `set_seed`."""
    set_seed(seed)
    return build()
