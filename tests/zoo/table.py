"""The zoo as a page of the documentation: one row for each family.

python -m tests.zoo                          try all families and print the table (about ten minutes)
python -m tests.zoo mamba "llama packed"     some of them
python -m tests.zoo --write docs/zoo.md      write the page
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from tests.zoo.study import Finding, Verdict

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
HEAD = """# A zoo of models

Small models of many families, built from the configurations of transformers with the families' own defaults (dropout, ties,
windows, routers), and plain PyTorch models. Each is captured, cut into 2 and 4 stages, and compared in one process **with the
model itself**: the loss of uneven microbatches, every gradient, and evaluation, at the captured size and at another one (other
rows, another length; the last microbatch has one row). Batches are padded and some labels are ignored.

- **exact**: equal to 1e-9 relative in double precision, 1e-5 where the model runs in single precision only.
- **exact, each size captured**: the same; a graph is for one length (or one size of pictures), and a batch of another size is
  captured again when it comes.
- **refused**: an error before any step, with the reason.

{counts}

The page is written by `python -m tests.zoo --write docs/zoo.md`; `tests/test_zoo.py` holds every row current (`make full`), and
trains some families of each kind on 2 and 4 local workers against the plain model.
"""


def row(found: Finding) -> str:
    """A family as a row; numbers that depend on the machine are left out."""
    stages = ", ".join(map(str, found.stages)) or "-"
    return f"| {found.name} | {said(found)} | {found.layers or '-'} | {stages} | {reason(found.note)} |"


def said(found: Finding) -> str:
    """The verdict in words."""
    return "exact, each size captured" if found.again and found.verdict is Verdict.EXACT else found.verdict.value


def reason(note: str) -> str:
    """What was said, in one line, without the paths and addresses of a machine."""
    line = " ".join(note.split())
    line = re.sub(r"(/[\w.\-]+)+/(site-packages|tests)/", lambda m: "" if m[2] == "site-packages" else "tests/", line)
    line = re.sub(r" at 0x[0-9a-f]+", "", line).replace("|", "/").replace("<", "&lt;")
    return line if len(line) <= 420 else f"{line[:417]}..."


def page(findings: Sequence[Finding]) -> str:
    """The whole page."""
    kinds = [(kind, list(found)) for kind, found in groupby(findings, key=lambda f: f.kind)]
    text = HEAD.format(counts=counts(findings))
    for kind in dict.fromkeys(kind for kind, _ in kinds):
        mine = [f for k, found in kinds for f in found if k == kind]
        exact = sum(f.verdict is Verdict.EXACT for f in mine)
        text += f"\n## {kind[0].upper()}{kind[1:]}: {exact} of {len(mine)} exact\n\n"
        text += "| family | verdict | layers | stages | reason |\n|---|---|---|---|---|\n"
        text += "".join(f"{row(found)}\n" for found in mine)
    return text


def counts(findings: Sequence[Finding]) -> str:
    """How many of each verdict."""
    found = Counter(f.verdict for f in findings)
    said = [f"{found[verdict]} {verdict.value}" for verdict in Verdict if found[verdict]]
    return f"{len(findings)} families: {', '.join(said)}."
