"""One walk of training: a step, or a segment of several steps if the schedule has no flush.

A segment has no collective besides those of its schedule until its last step has ended, because an all-reduce after every step
would end the stagger of its workers. So the learning rates of its steps are computed before it starts, and the losses of its
steps are summed over all ranks when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING

from meshwright.runtime.stage.batch import Given, Own
from meshwright.runtime.stage.objective import LossKind, Tally

if TYPE_CHECKING:
    from meshwright.train.session.session import Session


@dataclass(frozen=True)
class StepResult:
    """The result of a training step, equal on every rank. `loss` is the mean over the whole batch of all ranks.

    `grad_norm` is the norm of the mean gradient.
    """

    step: int
    loss: float
    weight: float
    grad_norm: float
    learning_rate: float
    skipped: bool = False
    rows: int = 0
    tokens: int = 0


def train_segment(session: Session, batches: Sequence[Given | Own]) -> list[StepResult]:
    """Trains the steps of one walk on these batches, and returns their results."""
    for batch in batches:
        session.check_ids(batch)
    session.model_changes.check()
    first, rates, count, engine, several = session.steps, session.rates, len(batches), session.engine, session.run.is_segmented
    learning_rates = rates.plan(range(first, first + count)) if several else [rates.learning_rate]
    if not several:
        rates.follow()
    for layer in session.layers.modules:
        layer.train()
    tallies = engine.run(lambda step: batches[step - first], first, count if several else None)
    mine = [(tallies.get(first + i, Tally()), session.counted(batch)) for i, batch in enumerate(batches)]
    flat = [x for tally, counted in mine for x in (float(tally.loss), tally.weight, *counted)]
    parameters = engine.parameters
    squares = [parameters.square_of_units(first + i) for i in range(count)] if several else []
    sums = session.sum_over_ranks(*flat, *squares, in_order=several)
    skipped = bool(parameters.skipped) and parameters.skipped[-1] == first
    if not skipped and not several:
        rates.step()
    session.steps += count
    norms = [square**0.5 for square in sums[len(flat) :]] if several else [parameters.norms.pop(first, nan)]
    losses = _mean_losses(sums[: len(flat)], summed=session.settings.loss_kind is LossKind.SUM)
    return [
        StepResult(first + i, loss, weight, norms[i], learning_rates[i], skipped, rows, tokens)
        for i, (loss, weight, rows, tokens) in enumerate(losses)
    ]


def _mean_losses(sums: Sequence[float], *, summed: bool) -> Iterator[tuple[float, float, int, int]]:
    """Yields loss, weight, rows and tokens of each step. `sums` has four sums per step; a `summed` loss is not divided."""
    for loss, weight, rows, tokens in (sums[at : at + 4] for at in range(0, len(sums), 4)):
        divisor = 1.0 if summed else weight
        yield loss / divisor if divisor else float("nan"), divisor, int(rows), int(tokens)
