"""Writes the weights of a checkpoint in the format of `from_pretrained`.

model-00001-of-00002.safetensors, ...         written by each rank, with the model's own names
model.safetensors.index.json                  which tensor is in which file
config.json, generation_config.json, ...      if the model has them, and the files of its tokenizer
optimizer-00001-of-00002.safetensors, ...     everything else; `from_pretrained` does not open it
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.json_exchange import all_gather_state
from meshwright.train.checkpoint.run_state import BUFFER, MODEL, buffers, parameters
from meshwright.train.checkpoint.save_pretrained import left_over, write_config, write_index
from meshwright.train.setup.all_ranks import agree


def apart(engine: Engine, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Separate the weights of a snapshot, with their own names and shapes, from all other tensors."""
    numbers = {name for name, t in {**parameters(engine), **buffers(engine)}.items() if not t.dim()}
    weights, rest = dict[str, Tensor](), dict[str, Tensor]()
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        if kind in (MODEL, BUFFER):
            weights[name] = tensor.view(()) if name in numbers else tensor
        else:
            rest[key] = tensor
    return weights, rest


def write_weights(
    folder: Path, weights: Mapping[str, Tensor], model: Any, processing: Any, group: dist.ProcessGroup | None
) -> list[str]:
    """Write this rank's weights, and on rank 0 the index and configuration. Returns the names of weights that no stage reads."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    trained = set().union(*agree(lambda: list(weights), group=group))
    unread = left_over(model, trained) if rank == 0 else {}
    mine = {**weights, **{name: t.cpu().contiguous() for name, t in unread.items()}}
    file = f"model-{rank + 1:05d}-of-{ranks:05d}.safetensors"
    parts = agree(lambda: list(_write(mine, folder / file)), group=group)
    files = {name: path for path, sizes in parts for name in sizes}
    total = sum(size for _, sizes in parts for size in sizes.values())
    agree(lambda: _beside(folder, files, total, model, processing, mine) if rank == 0 else None, group=group)
    return sorted([*unread, *(_write_adapters(folder, weights, model, group) if hasattr(model, "peft_config") else ())])


def _write_adapters(folder: Path, weights: Mapping[str, Tensor], model: Any, group: dist.ProcessGroup | None) -> list[str]:
    """Write the adapters of a peft model with peft itself. Rank 0 gathers them, because they are small. Returns their keys."""
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    parts = all_gather_state({name: t for name, t in weights.items() if name in trained}, group=group)
    found = {name: t for part in parts for name, t in part.items()}
    agree(lambda: save_adapters(model, folder, found) if dist.get_rank() == 0 else None, group=group)
    return [key for path in folder.glob("adapter*.safetensors") for key in _keys(path)] if dist.get_rank() == 0 else []


def save_adapters(model: Any, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the adapters with peft."""
    model.save_pretrained(str(folder), state_dict=weights)


def _keys(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def name_optimizer_files(folder: Path) -> None:
    """Rename the files of torch.distributed.checkpoint. With the original names, transformers would read weights from them."""
    found = sorted(folder.glob("shard-*.safetensors"))
    for number, path in enumerate(found, 1):
        path.rename(folder / f"optimizer-{number:05d}-of-{len(found):05d}.safetensors")


def _write(tensors: Mapping[str, Tensor], path: Path) -> tuple[str, dict[str, int]]:
    """Write one file, or none if there are no tensors. Returns its name and the bytes of each tensor in it."""
    if tensors:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    return path.name, {name: t.numel() * t.element_size() for name, t in tensors.items()}


def _beside(folder: Path, files: Mapping[str, str], total: int, model: Any, processing: Any, held: Mapping[str, Tensor]) -> None:
    write_index(folder, files, total)
    if not hasattr(model, "peft_config"):  # with peft this would be the configuration of the base model
        write_config(folder, model, held)
    if hasattr(processing, "save_pretrained"):
        processing.save_pretrained(folder)
