"""Does a matrix product in a short format work on this CPU? Some claim units (AMX) that trap, and the process dies.

So it is tried in a child. Where it dies, oneDNN can be told to leave those units alone, as long as it has not been used
yet: this process and the workers it starts are told so; if that does not help, the format is refused.
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
    """See that products in this format work here; what was set for it, if anything was."""
    if dtype is None or device.type != "cpu" or VARIABLE in os.environ or not _claims(Path("/proc/cpuinfo")):
        return None
    name = str(dtype).removeprefix("torch.")
    if survives(name):
        return None
    if not survives(name, remedy=True):
        raise MeshwrightError(f"a product of {name} matrices ends the process on this CPU", fix="precision fp32")
    os.environ[VARIABLE] = VALUE
    return f"{VARIABLE}={VALUE}"


@cache
def survives(dtype: str, *, remedy: bool = False, program: str = PROGRAM) -> bool:
    """Does a child live through a small product, with the variable set or without?"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({VARIABLE: VALUE} if remedy else {})}
    done = subprocess.run([sys.executable, "-c", program, dtype], env=environment, capture_output=True, check=False)
    return done.returncode == 0


def _claims(cpuinfo: Path) -> bool:
    """Does the CPU claim the units that are known to trap?"""
    try:
        return "amx_tile" in cpuinfo.read_text()
    except OSError:
        return False
