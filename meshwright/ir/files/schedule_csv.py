"""Read and write the two CSV forms of torch.distributed.pipelining, as far as they can express a schedule.

The compute form has one row per rank and one cell per time step (`0F0`, `1I2`, `1W2`, `0B3`, empty for idle). The lowered form
adds `0SEND_F0`, `1RECV_F0`, `1SEND_B0`, `0RECV_B0`. Overlapped pairs are written `(0F1;3B0)OVERLAP_F_B`. The CSV has no
replicas, versions, parts, teams, recompute, syncs or updates, so a schedule that needs them raises. Two things are left out
without an error: the syncs and updates that lowering added, because torch runs them after the schedule; and the message order
that a schedule chose for its channels, because the compute form has no messages and the lowered form shows the result.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from meshwright.errors import MeshwrightError
from meshwright.ir.action import COMPUTE, Action, Cell, Entry, Kind, Op, Transfer, Value, actions
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import Schedule

_SHARDING = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*", re.ASCII)
"""Cells for sharded parameters. torch adds them to every lowered schedule; they are not needed here."""
_CELL = re.compile(r"\((\d+F\d+);(\d+B\d+)\)OVERLAP_F_B", re.ASCII)
ODD_CELL = "a cell other than a forward with a whole backward after it"
_COMPUTE = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_TRANSFER = re.compile(r"(\d{1,9})(SEND|RECV)_([FB])(\d{1,9})", re.ASCII)


def to_csv(schedule: Schedule) -> str:
    """Write a schedule as CSV for torch.distributed.pipelining.

    Args:
        schedule: The schedule. A lowered one is written in torch's lowered form, with sends and receives.

    Returns:
        CSV text, one line for each rank.

    Raises:
        MeshwrightError: The schedule has something that the format has no word for, such as replicas.

    Examples:
        >>> import meshwright as mw
        >>> print(mw.to_csv(mw.schedules.build("gpipe", workers=2, microbatches=2)), end="")
        0F0,0F1,0B0,0B1
        1F0,1F1,1B0,1B1
    """
    _refuse(schedule)
    return "".join(",".join(filter(None, (_cell(entry) for entry in entries))) + "\n" for entries in schedule.lists)


def from_csv(text: str, name: str = "csv") -> Schedule:
    r"""Read a schedule from the CSV of torch.distributed.pipelining, in either of its forms.

    Args:
        text: The CSV text. Which rank runs which stage gives the placement.
        name: What the schedule is called.

    Returns:
        The schedule; lowered if the text has sends and receives.

    Raises:
        MeshwrightError: A cell cannot be read, or a stage runs on two ranks.

    Examples:
        >>> import meshwright as mw
        >>> schedule = mw.from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
        >>> schedule.stages, schedule.microbatches
        (2, 2)
    """
    cells = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    rows = [[_parsed(cell) for cell in row if cell and not _SHARDING.fullmatch(cell)] for row in cells]
    where: dict[int, int] = {}
    for worker, row in enumerate(rows):
        for action in (
            a for cell in row if not isinstance(cell, tuple) or isinstance(cell, Action | Cell) for a in actions(cell)
        ):
            if where.setdefault(action.stage, worker) != worker:
                raise MeshwrightError(f"stage {action.stage} runs on rank {where[action.stage]} and on rank {worker}")
    if not where or sorted(where) != list(range(len(where))):
        raise MeshwrightError(
            "there is no action in any row" if not where else f"the stages are {sorted(where)}, not 0, 1, 2, ...",
            fix="every stage needs its actions",
        )
    placement = Placement.of(lambda _, stage: where[stage], stages=len(where))
    lowered = any(isinstance(cell, _Half) for row in rows for cell in row)
    lists = tuple(tuple(_resolved(cell, where) for cell in row) for row in rows)
    mbs = {a.mb for entries in lists for entry in entries for a in actions(entry)}
    schedule = Schedule(name, placement, max(mbs) + 1, lists)
    if not lowered:
        return schedule
    return replace(schedule, lowered=True) if schedule.forward_only else _with_updates(schedule)


class _Half(tuple[bool, Kind, int, int]):
    """One end of a message as torch writes it: sends, kind, boundary stage, microbatch. It does not name the peer."""


def _parsed(cell: str) -> Action | Cell | _Half:
    if match := _CELL.fullmatch(cell):
        first, second = _parsed(match[1]), _parsed(match[2])
        assert isinstance(first, Action) and isinstance(second, Action)
        return Cell(first, second)
    if match := _COMPUTE.fullmatch(cell):
        return Action(Op(match[2]), int(match[1]), int(match[3]))
    if match := _TRANSFER.fullmatch(cell):
        stage, sends, forward, mb = int(match[1]), match[2] == "SEND", match[3] == "F", int(match[4])
        # F: stage s sends to s + 1, and s + 1 receives. B: stage s + 1 sends its gradient to s.
        boundary = stage if sends == forward else stage - 1
        return _Half((sends, Kind.ACT if forward else Kind.GRAD, boundary, mb))
    raise MeshwrightError(
        f"'{cell}' is not a cell of torch's CSV", fix="0F0, 1I2, 1W2, 0B3, 0SEND_F0, 1RECV_F0 or (0F1;3B0)OVERLAP_F_B"
    )


def _resolved(cell: Action | Cell | _Half, where: dict[int, int]) -> Entry:
    if isinstance(cell, Action | Cell):
        return cell
    sends, kind, boundary, mb = cell
    if boundary not in where or boundary + 1 not in where:
        raise MeshwrightError(f"there is no boundary after stage {boundary}")
    peer = where[boundary + 1 if sends == (kind is Kind.ACT) else boundary]
    return Transfer(sends, Value(kind, boundary, mb), peer)


def _with_updates(schedule: Schedule) -> Schedule:
    """Appends syncs, the global reduction and updates, which a lowered schedule needs and torch's form leaves out."""
    lists = []
    for worker, entries in enumerate(schedule.lists):
        units = [unit for unit in reversed(range(schedule.units)) if worker in schedule.holders[unit]]
        end = [Action(Op.S, unit) for unit in units] + [Action(Op.N, -1)] + [Action(Op.U, unit) for unit in units]
        lists.append((*entries, *end))
    return replace(schedule, period=tuple(lists), lowered=True, norm=True)


def _cell(entry: Entry) -> str:
    match entry:
        case Cell():
            return f"({_cell(entry.first)};{_cell(entry.second)})OVERLAP_F_B"
        case Transfer():
            value = entry.value
            forward = value.kind is Kind.ACT
            stage = value.stage if entry.sends == forward else value.stage + 1
            return f"{stage}{'SEND' if entry.sends else 'RECV'}_{'F' if forward else 'B'}{value.mb}"
        case Action():
            return f"{entry.stage}{entry.op.value}{entry.mb}" if entry.op in COMPUTE else ""


def _pair(cell: Cell) -> tuple[Op, Op]:
    return cell.first.op, cell.second.op


def _refuse(schedule: Schedule) -> None:
    placement = schedule.placement
    problems: Sequence[tuple[bool, str]] = (
        (placement.replicas > 1, "several replicas"),
        (not placement.single, "teams"),
        (schedule.parts > 1, "half microbatches"),
        (not schedule.flush, "steps without a flush"),
        (schedule.steps > 1, "several steps"),
        (bool(schedule.ties), "ties"),
        (bool(schedule.turns), "turns"),
        (any(isinstance(e, Cell) and _pair(e) != (Op.F, Op.B) for entries in schedule.lists for e in entries), ODD_CELL),
        (any(how.share for how in schedule.recompute or ()), "recompute"),
    )
    for present, what in problems:
        if present:
            raise MeshwrightError(f"torch's CSV cannot express {what}, which {schedule.name} has", fix="--format json")
