"""Compare the records of ranks with what one process found: what is missing, unequal or off by more than rounding.

The error of a tensor is max|a - b| / max(max|b|, 1e-3 of the largest value in the model). Nothing may be missing: every rank
must have the gradients of each update and the weights of each version of the parameters that it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.ir.timeline import Span
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.tracing.counted_run import RankCounts
from meshwright.train.verify.expected_parts import Expected

FLOOR = 1e-3
"""A tensor's error is relative to its largest value, or to this fraction of the model's largest value if that is larger."""


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
    counts: RankCounts = field(default_factory=RankCounts)
    spans: list[Span] = field(default_factory=list)
    """The times of this rank's actions and messages, on the clock of all ranks. Of a tensor-parallel box, rank 0 has them."""


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


def missing(held: list[set[str]], trainable: set[str], traces: list[RankTrace], expected: Expected) -> Iterator[str]:
    """Finds tensors that a rank should have and has not, or the other way round."""
    updates = len(expected.reference.gradients)
    for number, (names, trace) in enumerate(zip(held, traces, strict=True)):
        rank = expected.mesh.started(number)
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


def different_starts(layers: Layers, traces: list[RankTrace], expected: Expected) -> Iterator[str]:
    """Finds weights that differ between workers and this process before the first step. The plan is not the cause of these."""
    built = {name: p.detach() for p, name in layers.names.items() if p.requires_grad}
    for rank, trace in enumerate(traces):
        first = trace.digests.get(0, {})
        if other := [name for name, found in first.items() if found != digest(expected.part(name, built[name], rank))]:
            yield (
                f"rank {expected.mesh.started(rank)} starts with other values of {other[0]} than build() returns here: does "
                "build() use only torch's generator?"
            )


def unequal(traces: list[RankTrace], expected: Expected) -> Iterator[str]:
    """Compares the copies of each parameter on all ranks: digests for every version, all bits at the end."""
    first: dict[tuple[int, object], tuple[int, int]] = {}
    named = expected.mesh.started
    for rank, trace in enumerate(traces):
        for version, digests in sorted(trace.digests.items()):
            for name, found in digests.items():
                other, wanted = first.setdefault((version, expected.same_part(name, rank)), (rank, found))
                if found != wanted:
                    yield f"version {version} of {name} differs between ranks {named(other)} and {named(rank)}"
    last: dict[object, tuple[int, Tensor]] = {}
    for rank, trace in enumerate(traces):
        for name, tensor in trace.weights.items():
            other, same = last.setdefault(expected.same_part(name, rank), (rank, tensor))
            if tensor.shape != same.shape or not torch.equal(_bits(tensor), _bits(same)):
                yield f"{name} differs between ranks {named(other)} and {named(rank)} at the end"


def gradient_errors(expected: Expected, traces: list[RankTrace]) -> Iterator[tuple[float, str]]:
    """Yields the error of each gradient of each update."""
    for update, gradients in enumerate(expected.reference.gradients):
        largest = _largest(gradients)
        for rank, trace in enumerate(traces) if update not in expected.reference.skipped else ():
            for name, found in trace.gradients.get(update, {}).items():
                if name in gradients:
                    wanted = expected.part(name, gradients[name], rank)
                    yield tensor_error(found, wanted, largest), f"gradient of {name} at update {update}"


def weight_errors(expected: Expected, traces: list[RankTrace]) -> Iterator[tuple[float, str]]:
    """Yields the error of each weight at the end."""
    weights = expected.reference.weights
    largest = _largest(weights)
    for rank, trace in enumerate(traces):
        for name, found in trace.weights.items():
            yield tensor_error(found, expected.part(name, weights[name], rank), largest), f"weight {name}"


def _largest(tensors: Mapping[str, Tensor]) -> float:
    return max((float(t.abs().max()) for t in tensors.values() if t.numel()), default=0.0)


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
