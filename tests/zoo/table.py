"""Writes the zoo as a page of the documentation: one row per family.

python -m tests.zoo                          try all families and print the table (about ten minutes)
python -m tests.zoo mamba "llama packed"     some of them
python -m tests.zoo --write docs/zoo.md      write the page
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.zoo.study import Finding, Verdict

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
HEAD = """# A zoo of models

This page lists small models of many families. Most are built from the configurations of transformers with the defaults of each
family (dropout, ties, windows, routers); the others are plain PyTorch models. Each model is captured, passes the check at the
start and is cut into 2 stages (every third family also into 4). It is then compared in one process **with the model itself**:
the loss of uneven microbatches, every gradient, and evaluation. The comparison runs at the captured size and at another one
(other rows, another length, a microbatch of one row). Batches are padded and some labels are ignored.

- **exact**: equal to a relative error of 1e-9 in double precision, or 1e-5 if the model runs only in single precision.
- **exact, each size captured**: the same, but a graph is valid for one length (or one picture size) only. A batch of another
  size is captured when it first appears.
- **refused**: an error before the first step, with the reason.

{counts}

`python -m tests.zoo --write docs/zoo.md` writes this page. `tests/capture/test_zoo.py` checks every row (`make full`). It also
trains some families of each kind on 2 and 4 local workers and compares them with the plain model and with the trainers of both
libraries.
"""


def row(found: Finding) -> str:
    """Format a family as a row, without numbers that depend on the machine."""
    stages = ", ".join(map(str, found.stages)) or "-"
    return f"| {found.name} | {said(found)} | {found.layers or '-'} | {stages} | {reason(found.note)} |"


def said(found: Finding) -> str:
    """Return the verdict in words."""
    return "exact, each size captured" if found.again and found.verdict is Verdict.EXACT else found.verdict.value


def reason(note: str) -> str:
    """Return the note in one line, without paths and addresses of the machine."""
    line = " ".join(note.split())
    line = re.sub(r"(/[\w.\-]+)+/(site-packages|tests)/", lambda m: "" if m[2] == "site-packages" else "tests/", line)
    line = re.sub(r" at 0x[0-9a-f]+", "", line).replace("|", "/").replace("<", "&lt;")
    return line if len(line) <= 420 else f"{line[:417]}..."


def page(kinds: Mapping[str, str], rows: Mapping[str, str]) -> str:
    """Return the whole page from the rows that exist."""
    known = {name: verdict_of(rows[name]) for name in kinds if name in rows}
    text = HEAD.format(counts=counts(known.values()))
    for kind in dict.fromkeys(kinds.values()):
        mine = [name for name in known if kinds[name] == kind]
        exact = sum(known[name] == "exact" for name in mine)
        text += f"\n## {kind[0].upper()}{kind[1:]}: {exact} of {len(mine)} exact\n\n"
        text += "| family | verdict | layers | stages | reason |\n|---|---|---|---|---|\n"
        text += "".join(f"{rows[name]}\n" for name in mine)
    return text


def rows_of(target: Path) -> dict[str, str]:
    """Read the rows of a page, by family."""
    lines = target.read_text().splitlines() if target.exists() else []
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ") and "| family |" not in line}


def verdict_of(line: str) -> str:
    """Return the verdict of a row in one word."""
    return line.split(" | ")[1].partition(",")[0]


def counts(verdicts: Iterable[str]) -> str:
    """How many of each verdict."""
    found = Counter(verdicts)
    return f"{found.total()} families: {', '.join(f'{number} {verdict}' for verdict, number in found.most_common())}."
