"""Writes what becomes of the zoo under tensor modes as a page of the documentation: one row per family.

python -m tests.zoo.tensor_table                                     try all families (about twenty minutes, one process)
python -m tests.zoo.tensor_table mamba "llama packed"                some of them
python -m tests.zoo.tensor_table --write docs/tensor-families.md     write the page; with names, only their rows change
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.zoo.every import FAMILIES
from tests.zoo.table import reason, rows_of
from tests.zoo.tensor_study import MODES, NOT_FINITE, OTHER_WORDS, Fit, Fitted, TensorFinding, tensor_study

TENSOR_PAGE = Path(__file__).parents[2] / "docs" / "tensor-families.md"
HEAD = """# Families under tensor modes

Every family of the [zoo](zoo.md) is captured once and runs under five tensor modes, on threads of one process, in training with
dropout off. The loss and the gradient of every parameter are compared with the user's own model. Both run in float64, with the
casts to float32 that the model contains widened in both. Experts run as batched products, because grouped ones have no double
precision; a model that runs only in single precision is compared in float32.

- **exact**: loss and gradients within 1e-12 of the largest value of a tensor (or of a hundredth of the model's largest gradient,
  where a tensor has only rounding errors); 1e-5 in float32. "+n" counts the moves that the mode does not ask for: an operation
  without a rule reads whole values, which are gathered for it. "whole" counts the parameters that every rank holds whole because
  of such operations.
- **sizes**: a size does not divide, for example {example}.
- **refused**: an operation has no exact treatment; the error names it and its module, before anything is sent.

{counts}

`python -m tests.zoo.tensor_table --write docs/tensor-families.md` writes this page. `tests/tensor/test_families.py` runs the
families and checks every row (`make full`).

"""


def cell(found: Fitted) -> str:
    """One family under one mode, in a word."""
    if found.fit is Fit.INDIVISIBLE:
        return "sizes"
    if found.fit is not Fit.EXACT:
        return found.fit.value
    more = f" +{found.extra}" if found.extra else ""
    return f"exact{more}{f', {len(found.whole)} whole' if found.whole else ''}"


def tensor_row(found: TensorFinding) -> str:
    """A family as a row."""
    if found.refused:
        why = found.refused if found.refused == NOT_FINITE else "no graph (see the zoo)"
        return f"| {found.name} | {' | '.join(['-'] * len(MODES))} | {why} |"
    notes = dict.fromkeys(fitted.note for fitted in found.modes.values() if fitted.note and fitted.note != OTHER_WORDS)
    cells = " | ".join(cell(found.modes[mode]) for mode in MODES)
    return f"| {found.name} | {cells} | {reason(next(iter(notes), '').partition('try:')[0])} |"


def cells_of(line: str) -> list[str]:
    """The verdicts of a row, in the order of the modes, each in one word."""
    return [re.split(r"[ ,]", part)[0] for part in line.split(" | ")[1 : 1 + len(MODES)]]


def shares(rows: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """For every mode, how many families are exact, and how many have a graph."""
    known = [cells for line in rows.values() if (cells := cells_of(line))[0] != "-"]
    return {mode: (sum(cells[at] == "exact" for cells in known), len(known)) for at, mode in enumerate(MODES)}


def tensor_page(rows: Mapping[str, str]) -> str:
    """The whole page from the rows that exist."""
    counts = "| mode | exact | of families with a graph |\n|---|---|---|\n"
    for mode, (exact, every) in shares(rows).items():
        counts += f"| `{mode}` | {exact} ({100 * exact / max(every, 1):.0f} %) | {every} |\n"
    text = HEAD.format(counts=counts.rstrip(), example="5 classes on 2 ranks where they do not end in the loss")
    for kind in dict.fromkeys(family.kind for family in FAMILIES.values()):
        text += f"## {kind[0].upper()}{kind[1:]}\n\n| family | {' | '.join(MODES)} | reason |\n|---|{'---|' * len(MODES)}---|\n"
        text += "".join(f"{rows[name]}\n" for name, family in FAMILIES.items() if family.kind == kind and name in rows) + "\n"
    return text.rstrip() + "\n"


def tensor_rows_of(target: Path) -> dict[str, str]:
    """The rows of a page, by family."""
    return {name: line for name, line in rows_of(target).items() if name in FAMILIES}


def main(arguments: list[str]) -> None:
    """Try families one after another and show what was found; with a page, write their rows into it."""
    target = None
    if arguments[:1] == ["--write"]:
        target, arguments = Path(arguments[1]), arguments[2:]
    rows = tensor_rows_of(target) if target is not None else {}
    for name in arguments or FAMILIES:
        found = tensor_study(name)
        rows[name] = tensor_row(found)
        print(rows[name], f"{found.seconds:.1f} s", flush=True)
        if target is not None:
            target.write_text(tensor_page(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
