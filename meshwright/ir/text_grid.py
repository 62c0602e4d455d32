"""Draws a schedule as a text grid for errors, the terminal and tests.

0: F0 F1 .  B0 =  .  B1 =
1: .  F0 B0 =  F1 B1 =  .
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.ir.action import Action, Cell, Entry, Op
from meshwright.ir.schedule import Lists

IDLE, GOES_ON = ".", "="
DIRECTIONS = "du"


def label(entry: Entry, *, replicas: int = 1, stages: bool = False) -> str:
    """Returns a short name for a grid cell: F0, plus the direction if there are two replicas, plus the stage if asked."""
    if isinstance(entry, Cell):
        both = (label(entry.first, replicas=replicas, stages=stages), label(entry.second, replicas=replicas, stages=stages))
        return "+".join(both)
    if not isinstance(entry, Action) or entry.op in (Op.S, Op.U, Op.N, Op.G):
        return str(entry)
    text = f"{entry.stage if stages else ''}{entry.op.value}{entry.mb}"
    if replicas == 2:
        text += DIRECTIONS[entry.replica]
    elif replicas > 2:
        text += f"@{entry.replica}"
    return text if entry.part < 0 else f"{text}{'abcdefgh'[entry.part]}"


def excerpt(lists: Lists, worker: int, index: int, *, around: int = 4, rows: int = 2) -> str:
    """Shows the entries around one entry, on its worker and the neighbours, with an arrow below it."""
    if not lists or worker >= len(lists):
        return ""
    lines = []
    for row in range(max(0, worker - rows), min(len(lists), worker + rows + 1)):
        first = max(0, index - around)
        shown = [str(entry) for entry in lists[row][first : index + around + 1]]
        before = "... " if first else ""
        lines.append(f"{row:>3}: {before}{' '.join(shown)}")
        if row == worker:
            offset = len(f"{row:>3}: {before}") + sum(len(text) + 1 for text in shown[: index - first])
            lines.append(" " * offset + "^")
    return "\n".join(lines)


def columns(cells: Sequence[Sequence[tuple[int, int, str]]], width: int) -> list[list[str]]:
    """Returns rows of slots. Cells are (first slot, number of slots, text); later slots of a cell hold =, idle slots a dot."""
    table = []
    for row in cells:
        slots = [IDLE] * width
        for first, length, text in row:
            for slot in range(first, min(first + max(length, 1), width)):
                slots[slot] = text if slot == first else GOES_ON
        table.append(slots)
    return table
