"""A script for torchrun: trains a small model with `dp_mode="cyclic"` and writes what a rank has found."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tests.train.test_cyclic_training import cuts_of, trained

if __name__ == "__main__":
    weights, *numbers = trained("mlp", {"dp": 2, "dp_mode": "cyclic", "stages": cuts_of("mlp", 2)}, [3, 5], 8, None)
    torch.save([weights, *numbers], Path(sys.argv[1], f"{os.environ['RANK']}.pt"))
