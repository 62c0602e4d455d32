"""A script for torchrun: train on both transports, or get into the trouble that the command line names."""

from __future__ import annotations

import os
import sys

from meshwright.runtime.launch.workers import attach
from tests.support import trouble

if __name__ == "__main__":
    what, place, transport = sys.argv[1:4]
    ranks = tuple(map(int, sys.argv[5].split(","))) if len(sys.argv) > 5 else ()
    with attach(timeout_s=float(sys.argv[4]) if len(sys.argv) > 4 else 300.0, members=sorted(ranks)) as here:
        if what == "refuses":
            trouble.refuses()
        losses = [trouble.train(getattr(trouble, what), place, transport=one, ranks=ranks) for one in transport.split(",")]
    os.write(1, f"rank {here.rank} of {here.world}: {losses}\n".encode())  # in one piece, beside other ranks
