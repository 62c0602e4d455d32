"""Everything that depends on the device type: the backend, the choice of a device, peak memory and random seeds."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable

import torch


def choose(local_rank: int = 0, *, device: str | None = None) -> torch.device:
    """Returns a GPU of this host if it has one, else the CPU with one thread per worker."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return torch.device("cpu")
    chosen = torch.device(kind, local_rank % torch.cuda.device_count()) if ":" not in kind else torch.device(kind)
    torch.cuda.set_device(chosen)
    return chosen


def backend(device: torch.device) -> str:
    """Returns the torch.distributed backend for messages and collectives between such devices."""
    return "nccl" if device.type == "cuda" else "gloo"


def peak_bytes(device: torch.device) -> int:
    """Returns the peak memory of this process: what torch has allocated on a GPU, or the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_MIX = 0x9E3779B97F4A7C15
_WORD = (1 << 63) - 1


def stream(start: int, *parts: int) -> int:
    """Derives a seed from another seed: that of a step from the seed of the run, that of a microbatch from that of its step.

    It is the same under every plan and in one process. A layer uses the seed of its microbatch XOR its `salt`.
    """
    for part in parts:
        start = ((start ^ (part + 1)) * _MIX) & _WORD
        start ^= start >> 31
    return start


def salt(layer: int) -> int:
    """Returns the number that separates the random streams of the layers of one microbatch."""
    return stream(0, layer)


def seeder(device: torch.device) -> Callable[[int], object]:
    """Returns the function that seeds the random generator of a device."""
    return torch.cuda.manual_seed if device.type == "cuda" else torch.default_generator.manual_seed
