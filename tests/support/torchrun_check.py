"""A script for torchrun: every rank checks a model before it joins the others, and says what it found."""

from __future__ import annotations

import os
import sys

import torch

import meshwright as mw
from tests.support import hard_models as hard

if __name__ == "__main__":
    torch.manual_seed(0)
    kind = getattr(hard, sys.argv[1])
    try:
        with mw.parallelize(kind(), hard.features(8), {"pp": 2, "microbatches": 2}) as session:
            found = f"{session.step(hard.features(8)).loss:.6f}"
    except mw.MeshwrightError as error:
        found = str(error).splitlines()[0]
    os.write(1, f"rank {os.environ['RANK']}: {found}\n".encode())  # in one piece, beside other ranks
