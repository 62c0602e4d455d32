"""Which values travel between workers. The proof and the runtime both read this one table.

    act, grad   rows of a bundle, from the worker that makes them to the one that reads them
    turn        one byte that carries no data
    partial     a unit's gradient buffer, passed along a ring of contributors
    sum         the complete buffer, passed on from holder to holder
    param       a unit's parameters, passed on from reader to reader, where units have owners

All other kinds stay on the worker that makes them. The table depends on the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from meshwright.ir.action import Kind
from meshwright.ir.schedule import Schedule


class Load(StrEnum):
    """What a message contains."""

    ROWS = "rows"
    TOKEN = "token"
    BUFFER = "buffer"
    WEIGHTS = "weights"


class Way(NamedTuple):
    """How a kind travels: its content, and whether a receiver may forward it."""

    load: Load
    relayed: bool = False


_ALWAYS = {Kind.ACT: Way(Load.ROWS), Kind.GRAD: Way(Load.ROWS), Kind.TURN: Way(Load.TOKEN)}
_RING = {**_ALWAYS, Kind.PARTIAL: Way(Load.BUFFER), Kind.SUM: Way(Load.BUFFER, relayed=True)}
_OWNED = {**_RING, Kind.PARAM: Way(Load.WEIGHTS, relayed=True)}

ROWS = frozenset(kind for kind, way in _ALWAYS.items() if way.load is Load.ROWS)
"""Kinds whose shape only the sender knows."""


def carried(schedule: Schedule) -> Mapping[Kind, Way]:
    """Returns the kinds that messages of this schedule may have, and how each travels."""
    return _OWNED if schedule.owners else _RING if schedule.ring else _ALWAYS
