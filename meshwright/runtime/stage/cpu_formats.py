"""Check whether a matrix product in bf16 or fp16 works on this CPU. Some CPUs report units (AMX) that crash the process.

So the product is tried in a child process. If the child crashes, an environment variable can make oneDNN avoid these units, as
long as oneDNN was not used yet. It is set for this process and for the workers that it starts. If that does not help either, the
format is refused.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch

from meshwright.errors import MeshwrightError

VARIABLE, VALUE = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"

PROGRAM = """
import sys, torch
dtype = getattr(torch, sys.argv[1])
layer = torch.nn.Linear(256, 256).to(dtype)
layer(torch.ones(256, 256, dtype=dtype)).sum().backward()
"""


def require(dtype: torch.dtype | None, device: torch.device) -> str | None:
    """Raises if products in this format crash on this device. Returns the environment variable that was set, or None."""
    if dtype is None or device.type != "cpu" or VARIABLE in os.environ or not _claims(Path("/proc/cpuinfo")):
        return None
    name = str(dtype).removeprefix("torch.")
    if survives(name):
        return None
    if not survives(name, remedy=True):
        raise MeshwrightError(f"a product of {name} matrices crashes the process on this CPU", fix="use precision fp32")
    os.environ[VARIABLE] = VALUE
    return f"{VARIABLE}={VALUE}"


@cache
def survives(dtype: str, *, remedy: bool = False, program: str = PROGRAM) -> bool:
    """Returns whether a child process runs a small product without a crash. `remedy` sets the environment variable."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({VARIABLE: VALUE} if remedy else {})}
    done = subprocess.run([sys.executable, "-c", program, dtype], env=environment, capture_output=True, check=False)
    return done.returncode == 0


def _claims(cpuinfo: Path) -> bool:
    """Returns whether the CPU reports the units that are known to crash."""
    try:
        return "amx_tile" in cpuinfo.read_text()
    except OSError:
        return False
