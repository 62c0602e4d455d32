"""Measures a plan on this machine. A few traced steps give the times and bytes of each stage, and a timeline to compare with.

    found = measure(trainer)
    predicted = simulate(found.schedule, found.costs)
    print(versus_text(versus(predicted, found.timeline)))

The trainer is not changed: ranks work on a copy.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from meshwright.errors import MeshwrightError
from meshwright.ir.files.measurement import Measurement
from meshwright.runtime.tracing.trace import Trace
from meshwright.train.data.batches import Position
from meshwright.train.loop.on_rank import session_for
from meshwright.train.loop.rank_job import RankJob
from meshwright.train.loop.traced_steps import WARM_UP, Tracing
from meshwright.train.loop.training_loop import RunLength
from meshwright.train.setup.build_schedule import SEGMENT

if TYPE_CHECKING:
    from meshwright.train.trainer import Trainer


def measure(trainer: Trainer, *, steps: int = 3) -> Measurement:
    """Measure a trainer's job on this machine.

    Args:
        trainer: A trainer that could train now. It is not changed, and nothing is written.
        steps: The number of steps that the costs are averaged over. Two warm-up steps run before them, and one step after them
            gives the timeline.

    Returns:
        The schedule, the costs of its stages in seconds and bytes, and the timeline of the last step.

    Raises:
        MeshwrightError: The data set is too short, or this is not rank 0 of a job that torchrun has started.

    Examples:
        ```python
        found = meshwright.measure(trainer)
        Path("costs.json").write_text(meshwright.costs_to_json(found.costs))
        ```
    """
    found = measured(trainer, steps)
    if found is None:
        raise MeshwrightError("only rank 0 has the timeline of all ranks", fix="call measure on all ranks, use it on rank 0")
    return found


def measured(trainer: Trainer, steps: int) -> Measurement | None:
    """Does the same as `measure`, but returns None on all ranks except rank 0."""
    if type(steps) is not int or steps < 1:
        raise MeshwrightError(f"steps must be a whole number of at least 1, got {steps!r}", fix="steps=3")
    job = trainer.job(trainer.train_dataset)
    found: list[Measurement | None] = trainer.run_on_ranks(_measure_on_rank, job, trainer.train_dataset, steps)
    return found[0]


def _measure_on_rank(job: RankJob, dataset: Any, steps: int) -> Measurement | None:
    if dist.get_world_size() == 1:
        job = deepcopy(job)
    source, trace = job.reader.source(dataset), Trace()
    length = RunLength.of(job.args, source)
    session = session_for(job, length.max_steps, trace)
    wanted = WARM_UP + steps + 1
    batches = list(islice(length.batches(session.source_for_rank(source), job.args, Position(0, 0)), wanted))
    if len(batches) < WARM_UP + 2:
        raise MeshwrightError(
            f"an epoch of {len(batches)} steps is too short to measure", fix=f"at least {WARM_UP + 2} steps of data"
        )
    tracing = Tracing(session, trace, WARM_UP + 1, len(batches))
    while batches:
        count = min(SEGMENT, tracing.steps_to_border or 1) if session.run.is_segmented else 1
        tracing.train(batches[:count])
        del batches[:count]
    session.close()
    return tracing.found
