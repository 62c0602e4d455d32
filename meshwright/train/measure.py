"""What a plan costs on this machine: a few traced steps give each stage's times, and one more a timeline to hold against them.

    found = measure(trainer)
    predicted = simulate(found.schedule, found.costs)
    print(versus_text(versus(predicted, found.timeline)))

The trainer is left as it is: ranks work on a copy.
"""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import torch.distributed as dist

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Op, actions
from meshwright.ir.profile import StageCost
from meshwright.ir.schedule import Schedule
from meshwright.ir.timeline import Lane, Timeline
from meshwright.runtime.trace import Trace
from meshwright.train.data import Position
from meshwright.train.loop import Course
from meshwright.train.run import session_for

if TYPE_CHECKING:
    from meshwright.train.trainer import Trainer

WARM_UP = 2
"""Steps that are not measured: first calls allocate and choose."""


@dataclass(frozen=True)
class Measurement:
    """A lowered schedule, what its stages cost, and the timeline of one further step."""

    schedule: Schedule
    costs: tuple[StageCost, ...]
    timeline: Timeline


def measure(trainer: Trainer, *, steps: int = 3) -> Measurement:
    """Run `steps` traced steps of a trainer's job, and one more to compare with."""
    trainer.capture(trainer.train_dataset)
    found: list[Measurement | None] = trainer.everywhere(_measure_on_rank, steps)
    if found[0] is None:
        raise MeshwrightError("only rank 0 has the timeline of all ranks", fix="call measure on all ranks, use it on rank 0")
    return found[0]


def _measure_on_rank(trainer: Trainer, steps: int) -> Measurement | None:
    if dist.get_world_size() == 1:
        trainer = deepcopy(trainer)
    source, trace = trainer.source(trainer.train_dataset), Trace()
    course = Course.of(trainer.args, source)
    session = session_for(trainer, source.example(trainer.example_rows), course.max_steps, trace)
    source = session.reads(source)
    batches = list(zip(range(WARM_UP + steps + 1), course.batches(source, trainer.args, Position(0, 0)), strict=False))
    if len(batches) < WARM_UP + 2:
        raise MeshwrightError(
            f"an epoch of {len(batches)} steps is too short to measure", fix=f"at least {WARM_UP + 2} steps of data"
        )
    profile = None
    for number, batch in batches:
        if number == WARM_UP:
            trace.clear()
        if number == len(batches) - 1:
            profile = session.engine.timeline()
            trace.clear()
            dist.barrier()  # rank 0 has put the timeline together; the others would count that as waiting
        session.step(batch)
    timeline, schedule = session.engine.timeline(), session.engine.schedule
    session.close()
    if timeline is None or profile is None:
        return None
    return Measurement(schedule, costs_of(profile, schedule), timeline)


def costs_of(timeline: Timeline, schedule: Schedule) -> tuple[StageCost, ...]:
    """The mean time of every kind of action of every stage; a whole backward is halved."""
    times: dict[tuple[int, Op], list[float]] = defaultdict(list)
    for span in timeline.spans:
        done = list(actions(span.entry)) if span.lane is Lane.COMPUTE else []
        for action in done:
            times[action.stage, action.op].append((span.end_s - span.start_s) / len(done))
    mean = {key: fmean(found) for key, found in times.items()}

    def cost(stage: int) -> StageCost:
        whole = mean.get((stage, Op.B), 0.0)
        return StageCost(
            forward_s=mean.get((stage, Op.F), 0.0),
            input_s=mean.get((stage, Op.I), whole / 2),
            weight_s=mean.get((stage, Op.W), whole / 2),
            recompute_s=mean.get((stage, Op.R), 0.0),
        )

    return tuple(cost(stage) for stage in range(schedule.stages))
