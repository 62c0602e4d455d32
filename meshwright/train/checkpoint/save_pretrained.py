"""Exports a model as `save_pretrained` does. The ranks that hold its parts write the folder together.

    model.safetensors                             the whole model, if it is small
    model-00002-of-00005.safetensors, ...         otherwise shards, each written by a rank from what it holds
    model.safetensors.index.json                  which tensor is in which shard
    config.json, generation_config.json           if the model has them

A tied weight is written once, under its first name. Only a small model is gathered into one file. Otherwise each rank writes its
own part, and no rank holds more. Every file gets its final name when it is complete.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.json_exchange import dtype_name, dtype_named
from meshwright.train.checkpoint.folders import sync
from meshwright.train.checkpoint.run_state import weights
from meshwright.train.setup.all_ranks import agree

SHARD_BYTES = 5 << 30
GATHERED_BYTES = 256 << 20
"""A model of at most this many bytes is one file, written by rank 0."""

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


def export(engine: Engine, folder: str | Path, *, model: Any = None, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the folder, on all ranks together. `model` provides its configuration and the weights that no stage reads."""
    folder, rank = Path(folder), dist.get_rank()
    if shard_bytes < 1:
        raise MeshwrightError(f"shards of {shard_bytes} bytes cannot hold anything", fix=f"max_shard_size={SHARD_BYTES}")
    agree(lambda: folder.mkdir(parents=True, exist_ok=True) if rank == 0 else None)
    held = weights(engine)
    trained = set().union(*agree(lambda: list(held)))
    if rank == 0:
        held |= left_over(model, trained)
    sizes = agree(lambda: {name: t.numel() * t.element_size() for name, t in held.items()})
    total = sum(size for part in sizes for size in part.values())
    if total <= (shard_bytes if len(sizes) == 1 else min(shard_bytes, GATHERED_BYTES)):
        whole = gathered(engine, held)
        agree(lambda: _write(whole, folder / ONE) if rank == 0 else None)
        files = dict.fromkeys((name for part in sizes for name in part), ONE)
    else:
        packed = [(owner, names) for owner, part in enumerate(sizes) for names in _packed(part, shard_bytes)]
        shards = {f"model-{i:05d}-of-{len(packed):05d}.safetensors": shard for i, shard in enumerate(packed, 1)}
        files = {name: file for file, (_, names) in shards.items() for name in names}
        mine = {file: names for file, (owner, names) in shards.items() if owner == rank}
        agree(lambda: _write_all(held, mine, folder))
    agree(lambda: _finish(folder, model, held, files, total) if rank == 0 else None)


def left_over(model: Any, trained: set[str]) -> dict[str, Tensor]:
    """Return state of the model that is in no stage, because its forward never reads it. It has its initial values."""
    if not isinstance(model, nn.Module):
        return {}
    kept = model.state_dict(keep_vars=True)
    every = [*model.named_parameters(), *((name, b) for name, b in model.named_buffers() if name in kept)]
    return {name: t.detach() for name, t in every if name not in trained and not t.is_meta}


def _packed(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Pack names, in order, into shards of at most `most` bytes. A larger tensor gets its own shard."""
    found: list[list[str]] = []
    filled = most + 1
    for name, size in sizes.items():
        if filled + size > most:
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += size
    return found


def gathered(engine: Engine, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather all tensors on rank 0, one after another. Other ranks return nothing."""
    rank, device = dist.get_rank(), engine.settings.device
    forms = agree(lambda: {name: [list(t.shape), dtype_name(t.dtype)] for name, t in held.items()})
    whole: dict[str, Tensor] = {}
    for owner, part in enumerate(forms):
        for name, (shape, dtype) in part.items():
            if rank == 0:
                tensor = held[name] if owner == 0 else torch.empty(shape, dtype=dtype_named(dtype), device=device)
                if owner != 0:
                    dist.recv(tensor, src=owner)
                whole[name] = tensor
            elif rank == owner:
                dist.send(held[name].contiguous(), dst=0)
    return whole


def _write_all(held: Mapping[str, Tensor], files: Mapping[str, list[str]], folder: Path) -> None:
    for file, names in files.items():
        _write({name: held[name] for name in names}, folder / file)


def _write(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write one file. It gets its final name when it is complete."""
    from safetensors.torch import save_file

    part = path.with_name(f"{path.name}.part")
    save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, part, metadata={"format": "pt"})
    sync(part)
    os.replace(part, path)


def _finish(folder: Path, model: Any, held: Mapping[str, Tensor], files: Mapping[str, str], total: int) -> None:
    """Write index and configuration, and remove files of an earlier export that are no longer listed."""
    index = folder / INDEX
    if set(files.values()) == {ONE}:
        index.unlink(missing_ok=True)
    else:
        write_index(folder, files, total)
    for path in (*folder.glob("model-*-of-*.safetensors"), folder / ONE):
        if path.name not in files.values():
            path.unlink(missing_ok=True)
    write_config(folder, model, held)
    sync(folder)


def write_index(folder: Path, files: Mapping[str, str], total: int) -> None:
    """Write which tensor is in which file."""
    part = folder / f"{INDEX}.part"
    part.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}, indent=2))
    os.replace(part, folder / INDEX)


def write_config(folder: Path, model: Any, held: Mapping[str, Tensor]) -> None:
    """Write the configurations of a transformers model, with the dtype of its weights."""
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if hasattr(config, "save_pretrained"):
        config.architectures = [type(model).__name__]
        kinds = {t.dtype for t in held.values() if t.is_floating_point()}
        if len(kinds) == 1:
            config.dtype = kinds.pop()
        config.save_pretrained(folder)
    settings: Any = getattr(model, "generation_config", None)
    if hasattr(settings, "save_pretrained"):
        settings.save_pretrained(folder)
