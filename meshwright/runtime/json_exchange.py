"""Exchange values between ranks as JSON, and tensors as raw bytes. Nothing is pickled, so a received value cannot run code.

    all_gather_json({"rows": 3})         returns the values of all ranks, on all ranks
    gather_json([1.5, "2F0"])            returns the values of all ranks, on the first rank; None on the others
    broadcast_json("a token")            returns the value of the first rank, on all ranks
    all_gather_state({"step": tensor})   like the first one, for nested values that contain tensors

All ranks of a group call the same function together. If JSON cannot hold a value exactly, all of them raise. The sender converts
sets, tuples and dtypes to lists and text. A message is JSON, followed by the bytes of the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.runtime.started_ranks import started

_FIX = "send numbers, text, None, lists, and dicts with text keys"


class _Message(NamedTuple):
    """The message of one rank. If `failed`, the text is an error instead of a value."""

    text: bytes
    tensors: Sequence[Tensor] = ()
    failed: bool = False

    @property
    def sizes(self) -> list[int]:
        return [len(self.text), sum(t.nbytes for t in self.tensors), self.failed]


def all_gather_json(value: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the values of all ranks, in the rank order of the group."""
    return [json.loads(text) for text, _ in _all_gather(_plain_message(value), group)]


def gather_json(value: Any, *, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """Returns the values of all ranks on the first rank of the group, and None on the others."""
    message, device = _plain_message(value), _device(group)
    sizes = _all_sizes(message, device, group)
    if any(failed for _, _, failed in sizes):
        _all_gather(message, group)  # sends the error to all ranks, and raises it
    own = _flat(message, max(map(_length, sizes)), device)
    first = dist.get_rank(group) == 0
    found = [torch.empty_like(own) for _ in sizes] if first else None
    dist.gather(own, found, group=group, group_dst=0)
    return None if found is None else [json.loads(_text(blob, size)) for blob, size in zip(found, sizes, strict=True)]


def broadcast_json(value: Any, *, group: dist.ProcessGroup | None = None) -> Any:
    """Returns the value of the first rank of the group. The values of other ranks are ignored."""
    first, device = dist.get_rank(group) == 0, _device(group)
    message = _plain_message(value) if first else _Message(b"")
    sizes = torch.tensor(message.sizes, device=device)
    dist.broadcast(sizes, group=group, group_src=0)
    length, _, failed = sizes.tolist()
    blob = _flat(message, length, device) if first else torch.empty(length, dtype=torch.uint8, device=device)
    dist.broadcast(blob, group=group, group_src=0)
    text = _text(blob, [length])
    if failed:
        raise _refusal(0, text)
    return json.loads(text)


def all_gather_state(value: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the values of all ranks: nested dicts, lists and tuples of plain values and tensors. The tensors are on the CPU."""
    found = []
    for text, blob in _all_gather(_state_message(value), group):
        tree, forms = json.loads(text)
        found.append(_unpacked(tree, _tensors(blob, forms)))
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Returns the dtype with this name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise MeshwrightError(f"torch has no dtype {name!r}", fix="install the same release of torch on all ranks")
    return found


def _plain_message(value: Any) -> _Message:
    try:
        _refuse_inexact(value, "the value")
        return _Message(json.dumps(value).encode())
    except (MeshwrightError, ValueError, RecursionError) as error:
        return _failure(error)


def _state_message(value: Any) -> _Message:
    tensors: list[Tensor] = []
    try:
        tree = _packed(value, "the value", tensors)
        forms = [[dtype_name(t.dtype), list(t.shape), t.nbytes] for t in tensors]
        return _Message(json.dumps([tree, forms]).encode(), tensors)
    except (MeshwrightError, ValueError, RecursionError) as error:
        return _failure(error)


def _failure(error: Exception) -> _Message:
    what, fix = (error.what, error.fix) if isinstance(error, MeshwrightError) else (str(error), _FIX)
    return _Message(json.dumps([what, fix]).encode(), failed=True)


def _refusal(rank: int, text: bytes) -> MeshwrightError:
    what, fix = json.loads(text)
    return MeshwrightError(f"rank {started(rank)} cannot send its value to the other ranks: {what}", fix=fix)


def _refuse_inexact(value: Any, path: str) -> None:
    """Raises if JSON would change the value: it turns tuples into lists, and keys that are not text into text."""
    if isinstance(value, list):
        for place, inner in enumerate(value):
            _refuse_inexact(inner, f"{path}[{place}]")
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise MeshwrightError(f"{path} has the key {key!r}, which JSON cannot hold exactly", fix=_FIX)
            _refuse_inexact(inner, f"{path}[{key!r}]")
    elif value is not None and not isinstance(value, int | float | str):
        raise MeshwrightError(f"{path} is a {type(value).__name__}, which JSON cannot hold exactly", fix=_FIX)


def _packed(value: Any, path: str, tensors: list[Tensor]) -> Any:
    """Returns a nested value in JSON form. Every dict in it is a marker, for example for the index of a tensor."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            raise MeshwrightError(f"{path} is a tensor whose values are not plain bytes ({value.layout}, {value.device})")
        tensors.append(value.detach().cpu().resolve_conj().resolve_neg().contiguous())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, list | tuple):
        parts = [_packed(inner, f"{path}[{place}]", tensors) for place, inner in enumerate(value)]
        return parts if isinstance(value, list) else {"tuple": parts}
    if isinstance(value, dict):
        items = value.items()
        return {"dict": [[_packed(k, path, tensors), _packed(v, f"{path}[{k!r}]", tensors)] for k, v in items]}
    _refuse_inexact(value, path)
    return value


def _unpacked(tree: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(tree, list):
        return [_unpacked(inner, tensors) for inner in tree]
    match tree:
        case {"tensor": place}:
            return tensors[place]
        case {"tuple": parts}:
            return tuple(_unpacked(inner, tensors) for inner in parts)
        case {"dict": items}:
            return {_unpacked(key, tensors): _unpacked(value, tensors) for key, value in items}
    return tree


def _all_gather(message: _Message, group: dist.ProcessGroup | None) -> list[tuple[bytes, Tensor]]:
    """Returns the text of each rank and the bytes of its tensors."""
    device = _device(group)
    sizes = _all_sizes(message, device, group)
    own = _flat(message, max(map(_length, sizes)), device)
    found = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(found, own, group=group)
    texts = [_text(blob, size) for blob, size in zip(found, sizes, strict=True)]
    for rank, (_, _, failed) in enumerate(sizes):
        if failed:
            raise _refusal(rank, texts[rank])
    return [(text, blob[len(text) :].cpu()) for text, blob in zip(texts, found, strict=True)]


def _all_sizes(message: _Message, device: torch.device, group: dist.ProcessGroup | None) -> list[list[int]]:
    own = torch.tensor(message.sizes, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return [one.tolist() for one in found]


def _length(size: Sequence[int]) -> int:
    return size[0] + size[1]


def _flat(message: _Message, length: int, device: torch.device) -> Tensor:
    """Returns a message as bytes, padded to the length of the longest one."""
    parts = [torch.frombuffer(bytearray(message.text), dtype=torch.uint8), *(_bytes(t) for t in message.tensors)]
    filled = torch.zeros(length, dtype=torch.uint8)
    torch.cat(parts, out=filled[: sum(part.numel() for part in parts)])
    return filled.to(device)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _text(blob: Tensor, size: Sequence[int]) -> bytes:
    return blob[: size[0]].cpu().numpy().tobytes()


def _tensors(blob: Tensor, forms: Sequence[tuple[str, list[int], int]]) -> list[Tensor]:
    """Copies the tensors out of the received bytes. Each one has its own memory."""
    found, start = [], 0
    for name, shape, size in forms:
        found.append(blob[start : start + size].clone().view(dtype_named(name)).reshape(shape))
        start += size
    return found


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Returns the device that a group takes tensors from: the CPU if its backend supports it."""
    return torch.device("cpu" if "cpu:" in dist.get_backend_config(group) else "cuda")
