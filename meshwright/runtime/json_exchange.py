"""Values that ranks tell each other, as JSON; tensors as their bytes. Nothing is pickled, so what comes in cannot run code.

    all_gather_json({"rows": 3})         what each rank gave, on all ranks
    gather_json([1.5, "2F0"])            what each rank gave, on the first rank; None elsewhere
    broadcast_json("a token")            what the first rank gave, on all ranks
    all_gather_state({"step": tensor})   as the first, for nested values with tensors in them

All ranks of a group call the same function together. A value that JSON cannot hold exactly is refused on all of them: sets,
tuples and dtypes are turned into lists and text by who sends them. A message is JSON and the bytes of tensors behind it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import MeshwrightError

_FIX = "numbers, text, None, lists, and dicts with text as keys"


class _Message(NamedTuple):
    """What one rank sends; one that `failed` says why in place of a value."""

    text: bytes
    tensors: Sequence[Tensor] = ()
    failed: bool = False

    @property
    def sizes(self) -> list[int]:
        return [len(self.text), sum(t.nbytes for t in self.tensors), self.failed]


def all_gather_json(value: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank gave, in the order of the ranks of the group."""
    return [json.loads(text) for text, _ in _all_gather(_plain_message(value), group)]


def gather_json(value: Any, *, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """The same on the first rank of the group; None on the others."""
    message, device = _plain_message(value), _device(group)
    sizes = _all_sizes(message, device, group)
    if any(failed for _, _, failed in sizes):
        _all_gather(message, group)  # all ranks learn why, and raise
    own = _flat(message, max(map(_length, sizes)), device)
    first = dist.get_rank(group) == 0
    found = [torch.empty_like(own) for _ in sizes] if first else None
    dist.gather(own, found, group=group, group_dst=0)
    return None if found is None else [json.loads(_text(blob, size)) for blob, size in zip(found, sizes, strict=True)]


def broadcast_json(value: Any, *, group: dist.ProcessGroup | None = None) -> Any:
    """What the first rank of the group gave; what others give is not looked at."""
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
    """What each rank gave: nested dicts, lists and tuples of plain values and tensors. The tensors come back on the CPU."""
    found = []
    for text, blob in _all_gather(_state_message(value), group):
        tree, forms = json.loads(text)
        found.append(_unpacked(tree, _tensors(blob, forms)))
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as text, `float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise MeshwrightError(f"torch has no dtype {name!r}", fix="the same release of torch on all ranks")
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
    return MeshwrightError(f"rank {rank} cannot send what it has to all ranks: {what}", fix=fix)


def _refuse_inexact(value: Any, path: str) -> None:
    """JSON turns tuples into lists and other keys into text; here that is an error."""
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
    """A nested value as JSON has it: all dicts in it are signs for something else, such as the place of a tensor."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            raise MeshwrightError(f"{path} is a tensor whose values are no plain bytes ({value.layout}, {value.device})")
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
    """The text of each rank, and the bytes of its tensors."""
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
    """A message as bytes, filled up to the length of the longest one."""
    parts = [torch.frombuffer(bytearray(message.text), dtype=torch.uint8), *(_bytes(t) for t in message.tensors)]
    filled = torch.zeros(length, dtype=torch.uint8)
    torch.cat(parts, out=filled[: sum(part.numel() for part in parts)])
    return filled.to(device)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _text(blob: Tensor, size: Sequence[int]) -> bytes:
    return blob[: size[0]].cpu().numpy().tobytes()


def _tensors(blob: Tensor, forms: Sequence[tuple[str, list[int], int]]) -> list[Tensor]:
    """Tensors with memory of their own, cut out of what has come."""
    found, start = [], 0
    for name, shape, size in forms:
        found.append(blob[start : start + size].clone().view(dtype_named(name)).reshape(shape))
        start += size
    return found


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where a group takes tensors from: the CPU, where its backend knows it."""
    return torch.device("cpu" if "cpu:" in dist.get_backend_config(group) else "cuda")
