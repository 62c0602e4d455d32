"""`verify`: run a plan on local workers, compare it with one process, and return a certificate.

It compares the loss of every step, the mean gradient of every update on every rank that holds it, and the weights at the end.
Copies of a parameter (replicas, ties, data parallelism, teams) must be equal bit for bit in every version. Under a tensor mode
every rank also compares the words that it sends in each step with those that are declared for its stages. The certificate also
has counts of the run: messages, bytes, collectives and live activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import Parallel
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.parameters.parameters import Rules
from meshwright.runtime.parameters.unit import Optimizer, Scheduler
from meshwright.runtime.stage.batch import Given
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.stage.objective import Loss, LossKind, Tally
from meshwright.runtime.stage.precision import Precision
from meshwright.runtime.tracing.trace import Trace
from meshwright.train.prepared import PreparedRun
from meshwright.train.setup.captured_layers import Uncut
from meshwright.train.verify.certificate import Certificate, certify
from meshwright.train.verify.rank_differences import RankTrace, digest
from meshwright.train.verify.serial_reference import Serial, SerialTrace
from meshwright.train.verify.verify_case import Case, prepare_case


def momentum(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the default optimizer of `verify`."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def verify(
    build: Callable[[], Any],
    batch: Callable[[int], Given],
    parallel: Parallel | Mapping[str, Any],
    *,
    steps: int = 5,
    dtype: str = "float64",
    seed: int = 0,
    loss: Loss | None = None,
    optimizer: Optimizer = momentum,
    scheduler: Scheduler | None = None,
    clip: float | None = None,
    precision: Precision | str = "fp32",
    workers: Workers | None = None,
    loss_kind: str = "mean",
) -> Certificate:
    """Train a few steps on local workers and in one process, and compare losses, gradients and weights.

    A captured model is first compared with its layers, as at the start of training.

    Args:
        build: A function that builds the model. Workers import it by name.
        batch: A function of the step that makes the batch. Workers import it by name.
        parallel: The plan: a `Parallel` or a mapping.
        steps: How many steps to train.
        dtype: `float64` or `float32`; both runs compute in it.
        seed: The seed of the weights and of dropout.
        loss: Your own loss, `f(output, target)`; None uses the model's loss.
        optimizer: A function that makes an optimizer for a list of parameters.
        scheduler: A function that makes a learning-rate schedule for an optimizer.
        clip: The norm that gradients are clipped to: all gradients together, or each unit if the schedule has no flush.
        precision: The format that layers compute in: `fp32`, `bf16` or `fp16`.
        workers: A pool of workers that is already running; None starts one.
        loss_kind: `mean` if the loss is a mean over rows or labels, `sum` if it is a sum.

    Returns:
        The certificate. A difference does not raise: `passed` is False.

    Raises:
        MeshwrightError: The model, the batches or the plan cannot be used.

    Examples:
        ```python
        from meshwright import verify
        from meshwright.train.models.small_models import mlp, mlp_batch

        certificate = verify(mlp, mlp_batch, parallel=dict(pp=2, schedule="zbv", microbatches=4), steps=2)
        assert certificate.passed
        ```
    """
    case = Case(
        build,
        batch,
        Parallel.of(parallel),
        steps,
        dtype,
        seed,
        loss,
        optimizer,
        Precision.of(precision),
        LossKind.of(loss_kind),
        scheduler=scheduler,
        rules=Rules(clip=clip),
    )
    if workers is not None and not callable(getattr(workers, "run", None)):
        raise MeshwrightError(f"workers must be a pool of running workers, got {workers!r}", fix="workers=None starts a pool")
    case, layers, run = prepare_case(case)
    pool = workers or Workers(case.parallel.started)
    try:
        (reference,) = pool.run(serial_trace, case, run, ranks=1)
        traces = pool.run(rank_trace, case, run, ranks=case.parallel.members)
    finally:
        if workers is None:
            pool.close()
    return certify(case, layers, run.schedule, reference, traces, run.sharded)


def serial_trace(case: Case, run: PreparedRun) -> SerialTrace:
    """Runs the reference: training in one process with all layers."""
    built, parallel, schedule = case.model(), case.parallel, run.schedule
    layers = run.open(built)
    one = Serial(
        schedule,
        layers,
        case.optimizer,
        parallel.microbatches,
        parallel.copies,
        case.loss,
        case.seed,
        precision=case.precision,
        loss_kind=case.loss_kind,
        scheduler=case.scheduler,
        rules=case.rules,
    )
    if case.flat is not None and schedule.flush and not case.flat.random and case.precision.dtype is None:
        # The model has no random numbers and no rounding to another format, so the user's model can be the reference.
        # Errors of the capture are then found too.
        one.whole = Uncut.of(built, case.data(0), own_loss=case.loss is not None)
    with case.wide_casts():
        return one.run(case.data, case.steps)


def rank_trace(case: Case, run: PreparedRun) -> RankTrace:
    """Runs this rank of the parallel run. A collective call: all ranks must call it."""
    mesh = run.mesh(dist.get_rank())
    layers, schedule = run.open(case.model(), mesh), run.schedule
    how = run.settings(optimizer=case.optimizer, scheduler=case.scheduler, rules=case.rules, seed=case.seed)
    trace, tallies, times = RankTrace(), dict[int, Tally](), Trace()
    engine = Engine(schedule, layers, how, times, counts=trace.counts)
    updates = 0
    for first in range(case.steps) if schedule.flush else [0]:
        for unit in engine.units.values():
            unit.watch = partial(_record_update, layers, trace, first)
        tallies |= engine.run(case.data, first)
        updates = first + schedule.steps
        if layers.tensor is not None:
            log = layers.tensor.wires.log
            trace.words += [f"step {first}, {difference}" for difference in log.differences()]
            log.clear()
    trace.spans = times.spans(schedule, mesh) if mesh.coordinate == 0 else []
    trace.skipped = list(engine.parameters.skipped)
    trace.sums = {step: (float(tally.loss), tally.weight) for step, tally in tallies.items()}
    trainable = [p for unit in engine.units.values() for p in unit.params]
    with engine.whole_parameters():
        trace.digests[updates] = {layers.names[p]: digest(p) for p in trainable}
        trace.weights = {layers.names[p]: p.detach().clone() for unit in engine.units for p in layers.unit(unit)}
    engine.close()
    return trace


def _record_update(layers: Layers, trace: RankTrace, first: int, round_: int, params: list[Any], views: list[Tensor]) -> None:
    """Called before an update: records its mean gradients, and the digests of the weights that it replaces."""
    update = first + round_
    trace.gradients.setdefault(update, {}).update({layers.names[p]: v.clone() for p, v in zip(params, views, strict=True)})
    trace.digests.setdefault(update, {}).update({layers.names[p]: digest(p) for p in params})
