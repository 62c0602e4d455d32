"""The values that actions read and write, by what they are. Only `effects.py` decides who reads which."""

from __future__ import annotations

from meshwright.ir.action import NONE, Action, Kind, Op, Value
from meshwright.ir.schedule import Schedule, Sharding


def own(kind: Kind, action: Action, worker: int) -> Value:
    """What one action makes for another of the same stage and microbatch on this worker."""
    return Value(kind, action.stage, action.mb, action.replica, 0, action.part, worker)


def wgrad(unit: int, action: Action, worker: int) -> Value:
    """The gradient that one backward adds to a unit. It names the stage, because each stage of a tied unit adds one."""
    return Value(Kind.WGRAD, unit, action.mb, action.replica, action.stage, action.part, worker)


def param(unit: int, version: int, worker: int) -> Value:
    """A version of the parameters of a unit on a worker."""
    return Value(Kind.PARAM, unit, NONE, 0, version, NONE, worker)


def token(unit: int, version: int, op: Op) -> Value:
    """A version of the parameters of a unit that has an owner: part 0 goes from forward to forward, part 1 to backwards."""
    return Value(Kind.PARAM, unit, NONE, 0, version, int(op is not Op.F))


def held(schedule: Schedule, unit: int, version: int, worker: int) -> tuple[Value, ...]:
    """What a holder has of a version: its slice, its parameters, or as an owner the parameters for both kinds of readers."""
    if schedule.owners:
        return token(unit, version, Op.F), token(unit, version, Op.B)
    return ((shard if schedule.sharding is Sharding.PARAMETERS else param)(unit, version, worker),)


def shard(unit: int, version: int, worker: int) -> Value:
    """A version of the slice of a unit that a worker updates."""
    return Value(Kind.SHARD, unit, NONE, 0, version, NONE, worker)


def opt(unit: int, version: int, worker: int) -> Value:
    """The state of the optimizer of a unit after this many updates."""
    return Value(Kind.OPT, unit, NONE, 0, version, NONE, worker)


def sum_of(schedule: Schedule, unit: int, round_: int, worker: int) -> Value:
    """The sum of a unit. A collective leaves one on each member; a ring makes one and passes it on."""
    return Value(Kind.SUM, unit, version=round_, piece=NONE if schedule.ring else worker)


def one_sum(action: Action, worker: int) -> Value:
    """The sum of one gradient over all holders."""
    return Value(Kind.SUM, action.stage, action.mb, 0, action.version, NONE, worker)


def turn(reader: Action) -> Value:
    """A turn is named after the action that waits for it."""
    return Value(Kind.TURN, reader.stage, reader.mb, reader.replica, 0, reader.part, list(Op).index(reader.op))
