"""The entries of a worker's list, and their text form.

    2F0@1#3     an action: stage 2, forward, microbatch 0, replica 1, parameter version 3
    2B0.1       ... of the second half of microbatch 0
    2U#3        an update has no microbatch: stage 2, round 3 (turns version 3 into version 4)
    2S5#1       a sync of one gradient instead of a round: the second gradient of round 1, if rounds have 4 microbatches;
                gathers for single uses are counted in the same way
    [2F0|5B1]   a cell: two actions that overlap on purpose; one entry with its own cost
    2act0>3     a transfer: send the output of stage 2 for microbatch 0 to worker 3
    2act0<2     ... and the receiving end, on worker 3

Every form parses back. The dependencies of an action are in `analysis/effects.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from meshwright.errors import MeshwrightError

DIGITS = 9
"""The longest number that a text may contain, in digits."""

NONE = -1
"""Stands for "no microbatch", "no part" or "no piece": the whole."""


class Op(StrEnum):
    """The operations of a worker. The letter is that of the text form.

    `F` forward, `B` backward, `I` the half of a backward that gives the gradient of the input, `W` the half that gives
    the gradient of the weights, `R` recompute, `G` gather parameters, `S` sync gradients, `N` the global norm, `U` update.

    Examples:
        >>> from meshwright import Action, Op
        >>> str(Action(Op.F, stage=2, mb=0))
        '2F0'
    """

    F = "F"  # forward of a stage
    B = "B"  # whole backward
    I = "I"  # first half of a backward: the gradient of the input, which the previous stage waits for
    W = "W"  # second half of a backward: the gradient of the weights
    R = "R"  # recompute what a forward did not save
    G = "G"  # gather the parameters of a unit, of which each holder has updated a slice
    S = "S"  # sync: sum the gradient of a unit over all workers that hold it
    N = "N"  # the one global scalar reduction of a step: the gradient norm, and whether it is finite
    U = "U"  # update: turn parameter version k into k + 1

    __hash__ = str.__hash__  # the hash of Enum is slow Python code, and every look-up of an action or a value calls it


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W, Op.R})
"""Ops that occupy a worker for one microbatch. All other ops belong to a round."""


class Kind(StrEnum):
    """The kind of a value; each comment says who writes it and who consumes it."""

    ACT = "act"  # F -> F of the next stage
    GRAD = "grad"  # B or I -> B or I of the previous stage
    SAVED = "saved"  # F or R -> B or I: the activations of a stage
    KEPT = "kept"  # F -> R, or -> B and I that recompute inline: the input of a stage
    REST = "rest"  # I -> W: what the second half of a backward still needs
    WGRAD = "wgrad"  # B or W -> S: the weight gradient of one microbatch
    PARTIAL = "partial"  # S -> S of the next worker: the running sum of a ring
    SUM = "sum"  # the last S -> U: the complete gradient of a round
    NORM = "norm"  # N -> U
    SHARD = "shard"  # U -> G: the slice of new parameters that this worker has updated, where copies share the state
    PARAM = "param"  # U or G -> every action that reads this version
    OPT = "opt"  # U -> the next U: the state of the optimizer
    TURN = "turn"  # zero bytes: a control edge, the reader waits for the writer

    __hash__ = str.__hash__  # see Op


BY_VERSION = frozenset({Kind.PARTIAL, Kind.SUM, Kind.NORM, Kind.SHARD, Kind.PARAM, Kind.OPT})
"""Kinds that belong to a round or a version, not to a microbatch."""


class Action(NamedTuple):
    """One thing that a worker does, such as the forward of one stage for one microbatch.

    Args:
        op: What is done.
        stage: The stage that it is done for.
        mb: The microbatch; -1 for operations of a round (sync, norm, update). A sync of one gradient counts them instead.
        replica: The copy of the pipeline inside the schedule. Chimera has two.
        version: The parameter version that is read; for S, N, U and G the round.
        part: Half 0 or 1 of the microbatch; -1 is the whole.

    Examples:
        >>> from meshwright import Action, Op
        >>> print(Action(Op.F, stage=2, mb=0, replica=1, version=3))
        2F0@1#3
    """

    op: Op
    stage: int
    mb: int = NONE
    replica: int = 0
    version: int = 0
    part: int = NONE

    def shifted(self, mb: int, version: int) -> Action:
        """Returns the same action, `version` rounds (that is, `mb` microbatches) later."""
        later = self.mb if self.mb == NONE else self.mb + mb
        return Action(self.op, self.stage, later, self.replica, self.version + version, self.part)

    def __str__(self) -> str:
        head = f"{self.stage}{self.op.value}" if self.op is not Op.N else "N"
        return head + _tail(self.mb, self.replica, self.version, self.part)


class Cell(NamedTuple):
    """Two actions that overlap on purpose, as in DualPipe.

    Both inputs are there at the start, both outputs at the end.

    Args:
        first: One action.
        second: The other one.

    Examples:
        >>> from meshwright import Action, Cell, Op
        >>> print(Cell(Action(Op.F, 2, 0), Action(Op.B, 5, 1)))
        [2F0|5B1]
    """

    first: Action
    second: Action

    def shifted(self, mb: int, version: int) -> Cell:
        """Returns the same cell some rounds later."""
        return Cell(self.first.shifted(mb, version), self.second.shifted(mb, version))

    def __str__(self) -> str:
        return f"[{self.first}|{self.second}]"


class Value(NamedTuple):
    """A value that actions read and write: an activation, a gradient, a parameter version and so on.

    Args:
        kind: What it is, such as `act`, `grad` or `param`.
        stage: The stage that it belongs to.
        mb: The microbatch; -1 for values of a round or version.
        replica: The copy of the pipeline inside the schedule.
        version: The round or parameter version.
        part: Half 0 or 1 of the microbatch; -1 is the whole.
        piece: For `act` and `grad` a piece of the rows; for other kinds the worker that holds this copy. -1 is the whole.

    Examples:
        >>> import meshwright as mw
        >>> schedule = mw.schedules.build("gpipe", workers=2, microbatches=1)
        >>> print(*mw.effects(schedule, 1, schedule.lists[1][0]).reads)
        0act0 1param~1
    """

    kind: Kind
    stage: int
    mb: int = NONE
    replica: int = 0
    version: int = 0
    part: int = NONE
    piece: int = NONE

    def shifted(self, mb: int, version: int) -> Value:
        """Returns the same value some rounds later."""
        if self.kind in BY_VERSION:
            later = self.mb if self.mb == NONE else self.mb + mb
            return self._replace(mb=later, version=self.version + version)
        return self._replace(mb=self.mb + mb)

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.value}" + _tail(self.mb, self.replica, self.version, self.part)
        return text if self.piece == NONE else f"{text}~{self.piece}"


class Transfer(NamedTuple):
    """One end of a message between two workers.

    Args:
        sends: True for the send, False for the receive.
        value: What is sent.
        peer: The worker at the other end.

    Examples:
        >>> import meshwright as mw
        >>> lowered = mw.lower(mw.schedules.build("gpipe", workers=2, microbatches=1))
        >>> [str(entry) for entry in lowered.lists[0] if isinstance(entry, mw.Transfer)]
        ['0act0>1', '0grad0<1']
    """

    sends: bool
    value: Value
    peer: int

    def shifted(self, mb: int, version: int) -> Transfer:
        """Returns the same transfer some rounds later."""
        return Transfer(self.sends, self.value.shifted(mb, version), self.peer)

    def __str__(self) -> str:
        return f"{self.value}{'>' if self.sends else '<'}{self.peer}"


Entry = Action | Cell | Transfer
"""One element of a worker's list."""


def actions(entry: Entry) -> tuple[Action, ...]:
    """Returns the actions inside an entry: one, the two of a cell, or none for a transfer."""
    if isinstance(entry, Action):
        return (entry,)
    return (entry.first, entry.second) if isinstance(entry, Cell) else ()


def walk(entries: tuple[Entry, ...]) -> Iterator[Action]:
    """Iterates over all actions of a list. Opens cells and skips transfers."""
    for entry in entries:
        if type(entry) is Action:
            yield entry
        else:
            yield from actions(entry)


def parse(text: str) -> Entry:
    """Parse one entry from its text; the inverse of `str`."""
    if text.startswith("[") and text.endswith("]") and text.count("|") == 1:
        first, second = text[1:-1].split("|")
        return Cell(_parse_action(first), _parse_action(second))
    if match := _TRANSFER.fullmatch(text):
        value, arrow, peer = match.groups()
        if len(peer) > DIGITS:
            raise MeshwrightError(f"'{text[:40]}...' names an impossible worker", fix="a worker that the placement has")
        return Transfer(arrow == ">", parse_value(value), int(peer))
    return _parse_action(text)


def parse_value(text: str) -> Value:
    """Parse a value from its text."""
    if not (match := _VALUE.fullmatch(text)):
        raise MeshwrightError(f"'{text}' is not a value", fix="write it as in 2act0, 2grad5@1 or 1sum#3")
    kind, numbers = Kind(match["name"]), _numbers(match)
    piece = NONE if match["piece"] is None else int(match["piece"][:DIGITS])
    return Value(kind, numbers[0], *numbers[1:], piece=piece)


def _parse_action(text: str) -> Action:
    if not (match := _ACTION.fullmatch(text)) or (match["stage"] == "") != (match["name"] == "N"):
        raise MeshwrightError(f"'{text}' is not an action", fix="write it as in 2F0, 2B0@1#3, 2U#1, [2F0|5B1] or 2act0>3")
    op, numbers = Op(match["name"]), _numbers(match)
    if (op in COMPUTE) != (numbers[1] != NONE) and op not in (Op.S, Op.G):
        needs = "needs a microbatch" if op in COMPUTE else "belongs to a round and takes no microbatch"
        raise MeshwrightError(f"'{text}': {op.value} {needs}", fix="2F0 for a microbatch, 2U#1 for a round")
    return Action(op, *numbers)


def _numbers(match: re.Match[str]) -> tuple[int, int, int, int, int]:
    """Returns stage, mb, replica, version and part; a stage that is not written is NONE."""
    given = match.groupdict()

    def number(name: str, default: int) -> int:
        return int(given[name][:DIGITS]) if given[name] else default

    if any(len(text) > DIGITS for text in given.values() if text is not None and text.isdigit()):
        raise MeshwrightError(f"'{match[0][:40]}...' has a number that is too long", fix="numbers of at most 9 digits")

    return number("stage", NONE), number("mb", NONE), number("replica", 0), number("version", 0), number("part", NONE)


def _tail(mb: int, replica: int, version: int, part: int) -> str:
    text = "" if mb == NONE else str(mb)
    if replica:
        text += f"@{replica}"
    if version:
        text += f"#{version}"
    return text if part == NONE else f"{text}.{part}"


_FIELDS = r"(?P<mb>\d+)?(?:@(?P<replica>\d+))?(?:#(?P<version>\d+))?(?:\.(?P<part>\d+))?"
_ACTION = re.compile(rf"(?P<stage>\d*)(?P<name>[{''.join(Op)}])" + _FIELDS, re.ASCII)
_VALUE = re.compile(rf"(?P<stage>\d+)(?P<name>{'|'.join(Kind)})" + _FIELDS + r"(?:~(?P<piece>\d+))?", re.ASCII)
_TRANSFER = re.compile(r"(.*)([<>])(\d+)", re.ASCII)
