"""The zoo as a page of the documentation: one row for each family.

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

Small models of many families, built from the configurations of transformers with the families' own defaults (dropout, ties,
windows, routers), and plain PyTorch models. Each is captured, passes the check at the start, is cut into 2 stages (every third
family into 4 as well), and is compared in one process **with the model itself**: the loss of uneven microbatches, every
gradient, and evaluation, at the captured size and at another one (other rows, another length, a microbatch of one row). Batches
are padded and some labels are ignored.

- **exact**: equal to 1e-9 relative in double precision, 1e-5 where the model runs in single precision only.
- **exact, each size captured**: the same; a graph is for one length (or one size of pictures), and a batch of another size is
  captured again when it comes.
- **refused**: an error before any step, with the reason.

{counts}

The page is written by `python -m tests.zoo --write docs/zoo.md`; `tests/capture/test_zoo.py` holds every row current
(`make full`), and trains some families of each kind on 2 and 4 local workers against the plain model, and by both
libraries' trainers.
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


def page(kinds: Mapping[str, str], rows: Mapping[str, str]) -> str:
    """The whole page, from the rows of the families that there are."""
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
    """The rows of a page by family."""
    lines = target.read_text().splitlines() if target.exists() else []
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ") and "| family |" not in line}


def verdict_of(line: str) -> str:
    """The verdict of a row, in one word."""
    return line.split(" | ")[1].partition(",")[0]


def counts(verdicts: Iterable[str]) -> str:
    """How many of each verdict."""
    found = Counter(verdicts)
    return f"{found.total()} families: {', '.join(f'{number} {verdict}' for verdict, number in found.most_common())}."
