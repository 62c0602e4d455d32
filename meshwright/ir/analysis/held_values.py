"""What a worker holds before its list starts and after it ends: the parameters and optimizer state that its list builds on."""

from __future__ import annotations

from meshwright.ir.action import Kind, Op, Value, walk
from meshwright.ir.analysis.effects import rule
from meshwright.ir.analysis.named_values import held, opt
from meshwright.ir.schedule import Schedule


def initial(schedule: Schedule, worker: int) -> tuple[Value, ...]:
    """Returns what a worker holds before its list starts: the first version of its parameters and their optimizer state.

    If the schedule continues a run, the worker also holds the version before it, of the units that it reads one round late.
    """
    units, first = [unit for unit, workers in enumerate(schedule.holders) if worker in workers], schedule.first
    older = tuple(value for unit in late_units(schedule, worker) for value in held(schedule, unit, first - 1, worker))
    newest = [(*held(schedule, unit, first, worker), opt(unit, first, worker)) for unit in units]
    return older + tuple(value for values in newest for value in values)


def final(schedule: Schedule, worker: int) -> tuple[Value, ...]:
    """Returns what a worker must still hold after its list, so that the next rounds can continue: `initial`, `steps` later."""
    return tuple(value._replace(version=value.version + schedule.steps) for value in initial(schedule, worker))


def late_units(schedule: Schedule, worker: int) -> tuple[int, ...]:
    """Returns the units whose version before the first one a worker reads, or owns for others. Empty if it starts a run."""
    if not schedule.first:
        return ()
    of, readers = rule(schedule), range(schedule.workers) if schedule.owners else (worker,)
    forwards = [(reader, action) for reader in readers for action in walk(schedule.lists[reader]) if action.op is Op.F]
    reads = {value for reader, action in forwards for value in of(reader, action).reads if value.kind is Kind.PARAM}
    late = {value.stage for value in reads if value.version == schedule.first - 1}
    return tuple(sorted(unit for unit in late if not schedule.owners or worker in schedule.holders[unit]))
