"""The result of a comparison with one process: errors (`rank_differences.py`), the rule for passing, and counts of the run."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

import torch

from meshwright.ir.action import Kind
from meshwright.ir.analysis.timeline_counts import STAGE_KINDS, live_activations_max, stage_messages_per_step
from meshwright.ir.plan.plan_file import plan_table
from meshwright.ir.schedule import Schedule
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.stage.precision import written
from meshwright.runtime.tracing.trace import assemble
from meshwright.train.setup.sharded_layers import ShardedGraph
from meshwright.train.verify.expected_parts import Expected
from meshwright.train.verify.rank_differences import (
    RankTrace,
    different_starts,
    gradient_errors,
    missing,
    unequal,
    weight_errors,
)
from meshwright.train.verify.serial_reference import SerialTrace
from meshwright.train.verify.verify_case import Case

SHOWN = 20
"""The number of problems that a certificate lists. Further problems are only counted."""


@dataclass(frozen=True)
class Certificate:
    """The result of `verify`.

    Attributes:
        passed: Whether all errors are within the tolerance and nothing is missing.
        max_relative_error: The largest of the three errors.
        loss_error: The largest relative error of a loss.
        gradient_error: The largest relative error of a gradient.
        weight_error: The largest relative error of a weight at the end.
        worst: The tensor with the largest error.
        replicas_equal: Whether copies of a parameter were equal bit for bit in every version.
        problems: What is missing or unequal.
        tolerance: The largest error that passes.
        losses: The losses of the parallel run.
        reference_losses: The losses of one process.
        updates: How many updates were made.
        compared: How many tensors were compared.
        steps: How many steps were trained.
        dtype: What both runs computed in.
        precision: The mixed precision, if any.
        clip: The largest norm of a gradient, if clipped.
        skipped: Updates that were skipped because a gradient was not finite.
        seed: Where weights and dropout started.
        parallel: The plan.
        schedule: The name of the schedule.
        rounds: How many rounds the run had: updates of each parameter.
        stage_messages: Messages that carried the gradients or the parameters of a stage from worker to worker.
        stage_messages_per_step: The most of them that one worker sent in one time step before the last round. A time step is one
            forward or backward of a stage.
        turns: Messages without data, which only hold the order of workers.
        bytes_per_round: The bytes of all messages of a round (state, activations and their gradients), on average over rounds.
        collectives: Collectives inside the training loop, each counted once.
        collective_bytes_per_round: The bytes of the tensors handed to them in a round.
        live_activations_max: The most activations, of one stage and microbatch each, that all workers held at the same time.
        versions: Versions of Python, torch and Meshwright.

    Examples:
        ```python
        certificate = meshwright.verify(build, batch, parallel=dict(pp=2))
        assert certificate.passed, certificate.problems
        Path("certificate.json").write_text(certificate.to_json())
        ```
    """

    passed: bool
    max_relative_error: float
    loss_error: float
    gradient_error: float
    weight_error: float
    worst: str
    replicas_equal: bool
    problems: tuple[str, ...]
    tolerance: float
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    updates: int
    compared: int
    steps: int
    dtype: str
    precision: dict[str, Any]
    clip: float | None
    skipped: tuple[int, ...]
    seed: int
    parallel: dict[str, Any]
    schedule: str
    rounds: int
    stage_messages: int
    stage_messages_per_step: int
    turns: int
    bytes_per_round: float
    collectives: int
    collective_bytes_per_round: float
    live_activations_max: int
    versions: dict[str, str]

    def to_json(self) -> str:
        """Returns the certificate as JSON. Numbers that are not finite become strings: "Infinity", "-Infinity", "NaN"."""
        table = {"schema": 1, "kind": "certificate", **asdict(self)}
        return json.dumps(_json_numbers(table), indent=2, default=str, allow_nan=False)


def certify(
    case: Case,
    layers: Layers,
    schedule: Schedule,
    reference: SerialTrace,
    traces: list[RankTrace],
    sharded: ShardedGraph | None = None,
) -> Certificate:
    """Compares the records of all ranks with that of one process. If `sharded`, a rank has parts of its parameters."""
    mesh = Mesh.of(case.parallel, 0, schedule.workers)
    trainable = {name for p, name in layers.names.items() if p.requires_grad}
    expected = Expected(reference, mesh, sharded)
    held = expected.names(layers, schedule)
    copies = list(unequal(traces, expected))
    problems = [*missing(held, trainable, traces, expected), *copies]
    problems += different_starts(layers, traces, expected)
    problems += [
        f"rank {mesh.started(rank)} skipped the updates {trace.skipped}, one process skipped {reference.skipped}"
        for rank, trace in enumerate(traces)
        if trace.skipped != reference.skipped
    ]
    problems += [f"rank {mesh.started(rank)}, {difference}" for rank, trace in enumerate(traces) for difference in trace.words]
    gradients = [(0.0, "nothing"), *gradient_errors(expected, traces)]
    weights = [(0.0, "nothing"), *weight_errors(expected, traces)]
    losses = _losses(traces, case.steps)
    loss_error = max(_relative(a, b) for a, b in zip(losses, reference.losses, strict=True))
    gradient, weight, tolerance = max(gradients), max(weights), case.tolerance
    worst = max(gradient, weight)
    return Certificate(
        passed=worst[0] <= tolerance and loss_error <= tolerance and not problems,
        max_relative_error=worst[0],
        loss_error=loss_error,
        gradient_error=gradient[0],
        weight_error=weight[0],
        worst=worst[1],
        replicas_equal=not copies,
        problems=_shortened(problems),
        tolerance=tolerance,
        losses=tuple(losses),
        reference_losses=tuple(reference.losses),
        updates=len(reference.gradients),
        compared=len(gradients) + len(weights) - 2,
        steps=case.steps,
        dtype=case.dtype,
        precision=written(case.precision),
        clip=case.rules.clip,
        skipped=tuple(reference.skipped),
        seed=case.seed,
        parallel=plan_table(case.parallel),
        schedule=schedule.name,
        **_counted(schedule, traces, len(reference.gradients)),
        versions=_software_versions(),
    )


def _counted(schedule: Schedule, traces: list[RankTrace], rounds: int) -> dict[str, Any]:
    """Returns the counts of a run from those of its ranks."""
    counts = [trace.counts for trace in traces]
    messages = sum((one.messages for one in counts), Counter[Kind]())
    carried = sum(size for one in counts for kind, size in one.message_bytes.items() if kind is not Kind.TURN)
    timeline = assemble([trace.spans for trace in traces], schedule)
    return {
        "rounds": rounds,
        "stage_messages": sum(messages[kind] for kind in STAGE_KINDS),
        "stage_messages_per_step": stage_messages_per_step(timeline, max(rounds, 1)),
        "turns": messages[Kind.TURN],
        "bytes_per_round": carried / max(rounds, 1),
        "collectives": sum(one.collectives for one in counts),
        "collective_bytes_per_round": sum(one.collective_bytes for one in counts) / max(rounds, 1),
        "live_activations_max": live_activations_max(timeline),
    }


def _losses(traces: list[RankTrace], steps: int) -> list[float]:
    found = []
    for step in range(steps):
        sums = [trace.sums[step] for trace in traces if step in trace.sums]
        weight = sum(w for _, w in sums)
        found.append(sum(s for s, _ in sums) / (weight or 1.0) if sums else float("nan"))
    return found


def _relative(a: float, b: float) -> float:
    """Returns the relative error of a number, infinite if it is NaN."""
    error = abs(a - b) / max(abs(b), 1e-30)
    return error if error == error else float("inf")


def _shortened(problems: list[str]) -> tuple[str, ...]:
    more = len(problems) - SHOWN
    return tuple(problems) if more <= 0 else (*problems[:SHOWN], f"and {more} more")


def _json_numbers(value: Any) -> Any:
    """Replaces numbers that JSON does not have by strings."""
    if isinstance(value, Mapping):
        return {key: _json_numbers(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_json_numbers(item) for item in value]
    return json.dumps(value) if isinstance(value, float) and not isfinite(value) else value


def _software_versions() -> dict[str, str]:
    from meshwright import __version__

    return {"meshwright": __version__, "torch": torch.__version__, "python": platform.python_version()}
