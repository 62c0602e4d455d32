"""A rank's own part of a model: its stages have values, and nothing else does.

    ground(skeleton)                              before the cut: small buffers, which may say how a loss is weighed
    materialise(skeleton, weights, layers, mine)  behind it: the layers of this rank
    drop_others(model, layers, mine)              the same for a model that came with its values

Values come from the seed of the sketch or from safetensors files; a trained sketch has its values in such files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import set_seed

from meshwright.capture.weights.sketch import Skeleton, tensors_of
from meshwright.errors import MeshwrightError
from meshwright.runtime.stage.layers import Layers

SMALL = 1 << 16
"""Buffers of at most so many elements are filled before the cut."""

Where = str | Path | None


def ground(skeleton: Skeleton, weights: Where = None) -> None:
    """Fill small buffers; weights that do not fit the model are refused here, before anything is started."""
    small = [name for name, t in tensors_of(skeleton.model) if not isinstance(t, nn.Parameter) and t.numel() <= SMALL]
    skeleton.give(small, weights)


def materialise(skeleton: Skeleton, weights: Where, layers: Layers, mine: Iterable[nn.Module]) -> None:
    """Fill these layers, and no others."""
    skeleton.give(_kept(skeleton, layers, mine), weights)


def drop_others(model: nn.Module, layers: Layers, mine: Iterable[nn.Module]) -> None:
    """Of a whole model keep what these layers hold: for a process whose copy of it nobody else reads."""
    _kept(Skeleton(model, seed=0), layers, mine)


def _kept(skeleton: Skeleton, layers: Layers, mine: Iterable[nn.Module]) -> set[str]:
    """The names of what is in these layers, and in no layer at all on rank 0, which writes exports; others are dropped."""
    names = set(skeleton.names_in(mine))
    if dist.get_rank() == 0:
        names |= set(skeleton.names) - set(skeleton.names_in(layers.modules))
    skeleton.keep(names)
    return names


def stamp(folder: Path) -> dict[str, int]:
    """When each file of weights was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}


def refuse_others(folder: Path, known: dict[str, int]) -> None:
    """Trained weights are read again only as they were written."""
    if stamp(folder) != known:
        raise MeshwrightError(
            f"the trained weights in {folder} are no longer those that this trainer has written", fix="an output_dir of its own"
        )


def seeded(build: Callable[[], Any], seed: int) -> Any:
    """Build a model as the Hugging Face Trainer does: behind `set_seed`."""
    set_seed(seed)
    return build()
