"""`verify`: run a plan on local workers, compare it with one process, and write down what was found.

Loss of every step, mean gradient of every update, weights at the end, equality of replicas and ties bit by bit.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.ir.plan import Parallel
from meshwright.ir.schedule import Schedule
from meshwright.runtime.batch import Given, Loss
from meshwright.runtime.compute import Tally
from meshwright.runtime.engine import Engine, Settings
from meshwright.runtime.launch import Workers
from meshwright.runtime.layers import Layers
from meshwright.runtime.unit import Optimizer
from meshwright.train.lists import lists_for, stages_of
from meshwright.train.serial import Serial, Trace

TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 3e-2, "float16": 3e-3}
"""The largest relative error that passes."""

FLOOR = 1e-3
"""A tensor's error is relative to its own largest value, but not to less than this share of the model's largest."""


def momentum(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """What `verify` trains with unless it is told otherwise."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """What is verified; everything in it can be sent to a worker."""

    build: Callable[[], Any]
    batch: Callable[[int], Given]
    parallel: Parallel
    steps: int
    dtype: str
    seed: int
    loss: Loss | None
    optimizer: Optimizer

    def layers(self, stages: int) -> Layers:
        """The model, built from the seed in the dtype."""
        torch.manual_seed(self.seed)
        layers = Layers.of(self.build(), stages)
        for module in layers.modules:
            module.to(getattr(torch, self.dtype))
        return layers

    def data(self, step: int) -> Given:
        """A batch in the dtype."""
        given = self.batch(step)
        dtype = getattr(torch, self.dtype)

        def cast(t: Tensor) -> Tensor:
            return t.to(dtype) if t.is_floating_point() else t

        if isinstance(given, Tensor):
            return (cast(given),)
        if isinstance(given, Mapping):
            return {name: cast(t) for name, t in given.items()}
        return tuple(cast(t) for t in given)


@dataclass(frozen=True)
class Certificate:
    """What a comparison found; `worst` names the tensor with the largest error."""

    passed: bool
    max_relative_error: float
    loss_error: float
    gradient_error: float
    weight_error: float
    worst: str
    replicas_equal: bool
    tolerance: float
    losses: tuple[float, ...]
    steps: int
    dtype: str
    seed: int
    parallel: dict[str, Any]
    schedule: str
    versions: dict[str, str]

    def to_json(self) -> str:
        """The file form."""
        return json.dumps({"schema": 1, "kind": "certificate", **asdict(self)}, indent=2, default=str)


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
    workers: Workers | None = None,
) -> Certificate:
    """Compare a plan with one process. `build()` gives the model, `batch(step)` its data; workers import both by name."""
    if dtype not in TOLERANCE:
        raise MeshwrightError(f"there is no tolerance for {dtype!r}", fix=", ".join(TOLERANCE))
    case = Case(build, batch, Parallel.of(parallel), steps, dtype, seed, loss, optimizer)
    stages = stages_of(case.parallel)
    layers = case.layers(stages)
    schedule = lists_for(case.parallel, ties=layers.ties, steps=steps)
    pool = workers or Workers(case.parallel.ranks)
    try:
        (reference,) = pool.run(_serial, case, schedule, ranks=1)
        traces = pool.run(_parallel, case, schedule, ranks=case.parallel.ranks)
    finally:
        if workers is None:
            pool.close()
    return _certificate(case, schedule, reference, traces)


def _serial(case: Case, schedule: Schedule) -> Trace:
    layers = case.layers(schedule.stages)
    one = Serial(schedule, layers, case.optimizer, case.parallel.microbatches, case.parallel.dp, case.loss, case.seed)
    return one.run(case.data, case.steps)


@dataclass
class RankTrace:
    """What one rank saw: sums of losses and their weights, its own units' gradients and weights."""

    sums: list[tuple[float, float]]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def _parallel(case: Case, schedule: Schedule) -> RankTrace:
    layers = case.layers(schedule.stages)
    settings = Settings(
        optimizer=case.optimizer,
        microbatches=case.parallel.microbatches,
        copies=case.parallel.dp,
        loss=case.loss,
        transport=case.parallel.transport,
        seed=case.seed,
    )
    engine = Engine(schedule, layers, settings)
    gradients: list[dict[str, Tensor]] = []
    tallies: dict[int, Tally] = {}
    for first in range(case.steps) if schedule.flush else [0]:
        for unit in engine.units.values():
            unit.watch = partial(_note, layers, gradients, first)
        tallies |= engine.run(case.data, first)
    weights = {layers.names[p]: p.detach().clone() for unit in engine.units.values() for p in unit.params}
    engine.close()
    sums = [(float(t.loss), t.weight) for _, t in sorted(tallies.items())]
    return RankTrace(sums, gradients, weights)


def _note(
    layers: Layers, found: list[dict[str, Tensor]], first: int, round_: int, params: list[Any], views: list[Tensor]
) -> None:
    """Keep the mean gradients of an update."""
    while len(found) <= first + round_:
        found.append({})
    found[first + round_].update({layers.names[p]: v.clone() for p, v in zip(params, views, strict=True)})


def _certificate(case: Case, schedule: Schedule, reference: Trace, traces: list[RankTrace]) -> Certificate:
    errors: list[tuple[float, str]] = [(0.0, "")]
    weight_errors: list[tuple[float, str]] = [(0.0, "")]
    for round_, expected in enumerate(reference.gradients):
        largest = max((float(t.abs().max()) for t in expected.values() if t.numel()), default=0.0)
        for trace in traces:
            for name, found in trace.gradients[round_].items() if round_ < len(trace.gradients) else ():
                errors.append((_error(found, expected[name], largest), f"gradient of {name} at update {round_}"))
    largest = max((float(t.abs().max()) for t in reference.weights.values() if t.numel()), default=0.0)
    equal, seen = True, set()
    first: dict[str, Tensor] = {}
    for trace in traces:
        for name, found in trace.weights.items():
            seen.add(name)
            weight_errors.append((_error(found, reference.weights[name], largest), f"weight {name}"))
            equal &= bool(torch.equal(found, first.setdefault(name, found)))
    if missing := set(reference.weights) - seen:
        weight_errors.append((float("inf"), f"weight {sorted(missing)[0]}, which no rank holds"))
    counts = {len(trace.gradients) for trace in traces if trace.gradients}
    if counts - {len(reference.gradients)}:
        errors.append((float("inf"), f"{counts} updates instead of {len(reference.gradients)}"))
    losses = _losses(traces, case.steps)
    pairs = zip(losses, reference.losses, strict=True)
    loss_error = max((_relative(a, b) for a, b in pairs), default=0.0)
    gradient, weight, tolerance = max(errors), max(weight_errors), TOLERANCE[case.dtype]
    worst = max(gradient, weight)
    return Certificate(
        passed=worst[0] <= tolerance and loss_error <= tolerance and equal,
        max_relative_error=worst[0],
        loss_error=loss_error,
        gradient_error=gradient[0],
        weight_error=weight[0],
        worst=worst[1],
        replicas_equal=equal,
        tolerance=tolerance,
        losses=tuple(losses),
        steps=case.steps,
        dtype=case.dtype,
        seed=case.seed,
        parallel=asdict(case.parallel),
        schedule=schedule.name,
        versions={"torch": torch.__version__, "python": platform.python_version()},
    )


def _losses(traces: list[RankTrace], steps: int) -> list[float]:
    found = []
    for step in range(steps):
        sums = [trace.sums[step] for trace in traces if step < len(trace.sums)]
        weight = sum(w for _, w in sums)
        found.append(sum(s for s, _ in sums) / weight if weight else float("nan"))
    return found


def _relative(a: float, b: float) -> float:
    if a != a or b != b:
        return 0.0 if a != a and b != b else float("inf")
    return abs(a - b) / max(abs(b), 1e-30)


def _error(found: Tensor, expected: Tensor, largest: float) -> float:
    if not found.numel():
        return 0.0
    difference = float((found - expected).abs().max())
    scale = max(float(expected.abs().max()), FLOOR * largest)
    error = difference / scale if scale else difference
    return error if error == error else float("inf")
