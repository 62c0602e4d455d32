"""`python -m tests.zoo`: see table.py."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from tests.zoo.every import FAMILIES, named
from tests.zoo.table import page, row, rows_of


def main(arguments: list[str]) -> None:
    """Try families, one on each processor, and show what was found; with a page, write their rows into it."""
    target = None
    if arguments[:1] == ["--write"]:
        target, arguments = Path(arguments[1]), arguments[2:]
    rows = rows_of(target) if target is not None else {}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(named, name) for name in arguments or FAMILIES]):
            finding = done.result()
            rows[finding.name] = row(finding)
            print(rows[finding.name], f"{finding.error:.0e}", f"{finding.seconds:.1f} s", flush=True)
            if target is not None:
                target.write_text(page({name: family.kind for name, family in FAMILIES.items()}, rows))


if __name__ == "__main__":
    main(sys.argv[1:])
