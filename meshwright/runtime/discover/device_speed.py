"""Measures one device: FLOP/s of a matmul by precision, bytes per second of a copy, time of a small call, memory.

All ranks measure at the same time, because the ranks of a host share its memory and power in training too.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
LONG_S = 0.05
"""The shortest time of a timed repetition, unless the largest size is reached."""
REPETITIONS = 5
SMALLEST, LARGEST = 256, 8192
"""Sides of the matrices that are multiplied."""
COPIED = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Bytes of a copy: more than a cache holds."""


def measure_device(device: torch.device, sharers: int) -> dict[str, Any]:
    """Returns kind, memory and speeds of the device of this rank. `sharers` ranks share the memory of a CPU."""
    speeds = {name: flops for name, dtype in PRECISIONS.items() if (flops := _flops(device, dtype)) is not None}
    return {
        **device_facts(device, sharers),
        "flops_per_s": speeds,
        "bytes_per_s": _bytes_per_s(device),
        "launch_s": _launch_s(device),
    }


def device_facts(device: torch.device, sharers: int) -> dict[str, Any]:
    """Returns kind and memory of the device of this rank. Nothing is timed."""
    return {"kind": _kind(device), "memory_bytes": _memory(device, sharers)}


def _kind(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"core of {platform.machine()}"
    return name.lower().replace("nvidia", "").strip().replace(" ", "-") or device.type


def _memory(device: torch.device, sharers: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // sharers)


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Returns the shortest time of some repetitions, because other processes can only make it longer."""
    found = []
    for _ in range(REPETITIONS):
        start = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(perf_counter() - start)
    return min(found)


def _flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Returns the FLOP/s of the largest matmul that does not take too long; None if the device cannot multiply this dtype."""
    side = SMALLEST
    while True:
        try:
            one = torch.ones(side, side, dtype=dtype, device=device)
            time_s = timed(device, lambda one=one: one @ one)  # type: ignore[misc]
        except (RuntimeError, TypeError):
            return None
        if time_s >= LONG_S or side >= LARGEST:
            return 2.0 * side**3 / time_s
        side *= 2


def _bytes_per_s(device: torch.device) -> float:
    """Returns the bytes per second of a copy, which reads and writes each byte."""
    source = torch.ones(COPIED[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / timed(device, lambda: target.copy_(source))


def _launch_s(device: torch.device) -> float:
    """Returns the time of a call with almost no compute: a small linear layer and its gradient."""
    layer = torch.nn.Linear(8, 8).to(device)
    rows = torch.ones(1, 8, device=device, requires_grad=True)
    return timed(device, lambda: layer(rows).sum().backward())
