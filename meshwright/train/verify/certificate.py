"""The result of a comparison with one process, and the rules for passing.

The error of a tensor is max|a - b| / max(max|b|, 1e-3 of the largest value in the model). Nothing may be missing: every rank
must have the gradients of each update and the weights of each version of the parameters that it holds.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.plan.plan_file import plan_table
from meshwright.ir.schedule import Schedule
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.stage.precision import written
from meshwright.train.setup.sharded_layers import ShardedGraph
from meshwright.train.verify.expected_parts import Expected
from meshwright.train.verify.serial_reference import SerialTrace
from meshwright.train.verify.verify_case import Case

FLOOR = 1e-3
"""A tensor's error is relative to its largest value, or to this fraction of the model's largest value if that is larger."""

SHOWN = 20
"""The number of problems that a certificate lists. Further problems are only counted."""


@dataclass(frozen=True)
class Certificate:
    """What `verify` found.

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
    versions: dict[str, str]

    def to_json(self) -> str:
        """Returns the certificate as JSON. Numbers that are not finite become strings: "Infinity", "-Infinity", "NaN"."""
        table = {"schema": 1, "kind": "certificate", **asdict(self)}
        return json.dumps(_json_numbers(table), indent=2, default=str, allow_nan=False)


@dataclass
class RankTrace:
    """The record of one rank: sums of losses with their weights, mean gradients, digests of all versions, and last weights."""

    sums: dict[int, tuple[float, float]] = field(default_factory=dict)
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    digests: dict[int, dict[str, int]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    """Steps in which the rank sent other words between the ranks of its box than declared."""


def certify(
    case: Case,
    layers: Layers,
    schedule: Schedule,
    reference: SerialTrace,
    traces: list[RankTrace],
    sharded: ShardedGraph | None = None,
) -> Certificate:
    """Compares the records of all ranks with that of one process. If `sharded`, a rank has parts of its parameters."""
    mesh = Mesh(schedule.workers, case.parallel.copies, 0, case.parallel.tp)
    trainable = {name for p, name in layers.names.items() if p.requires_grad}
    expected = Expected(reference, mesh, sharded)
    held = expected.names(layers, schedule)
    unequal = list(_unequal(traces, expected))
    problems = [*_missing(held, trainable, traces, len(reference.gradients)), *unequal]
    problems += _different_starts(layers, traces, expected)
    problems += [
        f"rank {rank} skipped the updates {trace.skipped}, one process skipped {reference.skipped}"
        for rank, trace in enumerate(traces)
        if trace.skipped != reference.skipped
    ]
    problems += [f"rank {rank}, {difference}" for rank, trace in enumerate(traces) for difference in trace.words]
    gradients = [(0.0, "nothing"), *_gradient_errors(expected, traces)]
    weights = [(0.0, "nothing"), *_weight_errors(expected, traces)]
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
        replicas_equal=not unequal,
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
        versions=_software_versions(),
    )


def digest(tensor: Tensor) -> int:
    """Returns a hash that changes if a bit changes or two elements are swapped, except with a probability of 2^-64."""
    bits = _bits(tensor).long()
    mixed = (bits ^ (torch.arange(1, len(bits) + 1) * -7046029254386353131)) * -4658895280553007687
    return int(((mixed ^ (mixed >> 29)) * -7723592293110705685).sum())


def _bits(tensor: Tensor) -> Tensor:
    """Returns the same memory as integers. Unlike floats, integers compare equal whenever their bits are equal."""
    flat = tensor.detach().contiguous().flatten()
    flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def _missing(held: list[set[str]], trainable: set[str], traces: list[RankTrace], updates: int) -> Iterator[str]:
    for rank, (names, trace) in enumerate(zip(held, traces, strict=True)):
        yield from _name_differences(f"weights on rank {rank}", names, trace.weights)
        for update in range(updates):
            yield from _name_differences(
                f"gradients of update {update} on rank {rank}", names & trainable, trace.gradients.get(update, {})
            )
        for version in range(updates + 1):
            yield from _name_differences(f"version {version} on rank {rank}", names & trainable, trace.digests.get(version, {}))
        if names & trainable and (more := sorted(set(trace.gradients) - set(range(updates)))):
            yield f"rank {rank} has the updates {more}, which one process does not have"
    unheld = trainable.difference(*held)
    if unheld:
        yield f"{sorted(unheld)[0]} is on no rank"


def _name_differences(where: str, names: set[str], found: Mapping[str, object]) -> Iterator[str]:
    if lost := sorted(names - set(found)):
        yield f"{where}: {lost[0]} is missing" + (f" and {len(lost) - 1} more" if len(lost) > 1 else "")
    if more := sorted(set(found) - names):
        yield f"{where}: {more[0]} should not be there"


def _different_starts(layers: Layers, traces: list[RankTrace], expected: Expected) -> Iterator[str]:
    """Finds weights that differ between workers and this process before the first step. The plan is not the cause of these."""
    built = {name: p.detach() for p, name in layers.names.items() if p.requires_grad}
    for rank, trace in enumerate(traces):
        first = trace.digests.get(0, {})
        if other := [name for name, found in first.items() if found != digest(expected.part(name, built[name], rank))]:
            yield (
                f"rank {rank} starts with other values of {other[0]} than build() returns here: does build() use only torch's "
                "generator?"
            )


def _unequal(traces: list[RankTrace], expected: Expected) -> Iterator[str]:
    """Compares the copies of each parameter on all ranks: digests for every version, all bits at the end."""
    first: dict[tuple[int, object], tuple[int, int]] = {}
    for rank, trace in enumerate(traces):
        for version, digests in sorted(trace.digests.items()):
            for name, found in digests.items():
                other, wanted = first.setdefault((version, expected.same_part(name, rank)), (rank, found))
                if found != wanted:
                    yield f"version {version} of {name} differs between ranks {other} and {rank}"
    last: dict[object, tuple[int, Tensor]] = {}
    for rank, trace in enumerate(traces):
        for name, tensor in trace.weights.items():
            other, same = last.setdefault(expected.same_part(name, rank), (rank, tensor))
            if tensor.shape != same.shape or not torch.equal(_bits(tensor), _bits(same)):
                yield f"{name} differs between ranks {other} and {rank} at the end"


def _gradient_errors(expected: Expected, traces: list[RankTrace]) -> Iterator[tuple[float, str]]:
    for update, gradients in enumerate(expected.reference.gradients):
        largest = _largest(gradients)
        for rank, trace in enumerate(traces) if update not in expected.reference.skipped else ():
            for name, found in trace.gradients.get(update, {}).items():
                if name in gradients:
                    wanted = expected.part(name, gradients[name], rank)
                    yield tensor_error(found, wanted, largest), f"gradient of {name} at update {update}"


def _weight_errors(expected: Expected, traces: list[RankTrace]) -> Iterator[tuple[float, str]]:
    weights = expected.reference.weights
    largest = _largest(weights)
    for rank, trace in enumerate(traces):
        for name, found in trace.weights.items():
            yield tensor_error(found, expected.part(name, weights[name], rank), largest), f"weight {name}"


def _largest(tensors: Mapping[str, Tensor]) -> float:
    return max((float(t.abs().max()) for t in tensors.values() if t.numel()), default=0.0)


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


def tensor_error(found: Tensor, expected: Tensor, largest: float) -> float:
    """Returns the error of a tensor as this file defines it."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not found.numel():
        return 0.0
    difference = float((found - expected).abs().max())
    scale = max(float(expected.abs().max()), FLOOR * largest)
    error = difference / scale if scale else difference
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
