"""`python -m tests.zoo`: see table.py."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.zoo.every import FAMILIES, named
from tests.zoo.table import page, row


def main(arguments: list[str]) -> None:
    """Try families, one on each processor, and show what was found."""
    target = None
    if arguments[:1] == ["--write"]:
        target, arguments = Path(arguments[1]), arguments[2:]
    found = []
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for finding in pool.map(named, arguments or FAMILIES):
            found.append(finding)
            print(row(finding), f"{finding.error:.0e}", f"{finding.seconds:.1f} s", flush=True)
    if target is not None:
        target.write_text(page(found))


if __name__ == "__main__":
    main(sys.argv[1:])
