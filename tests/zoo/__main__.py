"""`python -m tests.zoo`: see table.py."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

from tests.zoo.configured import library
from tests.zoo.every import FAMILIES
from tests.zoo.study import study
from tests.zoo.table import page, row


def main(arguments: list[str]) -> None:
    """Try families and show what was found."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    library()
    target = None
    if arguments[:1] == ["--write"]:
        target, arguments = Path(arguments[1]), arguments[2:]
    found = []
    for name in arguments or FAMILIES:
        found.append(study(FAMILIES[name]))
        print(row(found[-1]), f"{found[-1].error:.0e}", f"{found[-1].seconds:.1f} s", flush=True)
    if target is not None:
        target.write_text(page(found))


if __name__ == "__main__":
    main(sys.argv[1:])
