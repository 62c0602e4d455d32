"""What becomes of one family: exact, refused, wrong, or an error that is not ours to show."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any
from zlib import crc32

import torch
from torch import nn

from meshwright.capture.trace.export import flatten
from meshwright.capture.trace.graph import Flat
from meshwright.errors import MeshwrightError
from meshwright.train.setup.check_capture import Evaluation, Start, check_start
from tests.support.layers_of_models import layers_for
from tests.zoo.compare import BARS, Graphs, compared, mode, plain, run
from tests.zoo.family import Batch, Family, built, cast


class Verdict(Enum):
    """What a family comes to."""

    EXACT = "exact"
    REFUSED = "refused"
    WRONG = "wrong"
    RAISES = "raises"
    BROKEN = "broken"  # the family's own model or batch does not run: a mistake of the zoo


@dataclass(frozen=True)
class Finding:
    """A family, its verdict, and the numbers behind it."""

    name: str
    kind: str
    verdict: Verdict
    error: float = 0.0
    layers: int = 0
    stages: tuple[int, ...] = ()
    again: bool = False
    """What was captured is for some sizes only: others are captured when they come."""
    note: str = ""
    seconds: float = 0.0


def precision(family: Family) -> torch.dtype:
    """Double where the model itself runs in it; what it raises is a mistake of the zoo."""
    problem: Exception | None = None
    for dtype in (torch.float64, torch.float32) if family.dtype is None else (family.dtype,):
        try:
            for rows, length in family.sizes:
                batch = cast(family.batch(rows, length, 0), dtype)
                for train in (True, False):
                    model = built(family, dtype=dtype)
                    with mode(model, train=train):
                        found = run(plain(model), model, batch, family.items, train=train, keyed=False)
                    if found.loss != found.loss:
                        raise ValueError(f"the loss is {found.loss}")
            return dtype
        except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
            problem = problem or error
    assert problem is not None
    raise problem


def study(family: Family) -> Finding:
    """Capture a family, check it as a trainer does at its start, cut it, and compare it with itself."""
    begun = time.perf_counter()

    def found(verdict: Verdict, note: str = "", **more: Any) -> Finding:
        return Finding(family.name, family.kind, verdict, note=note, seconds=time.perf_counter() - begun, **more)

    try:
        dtype = precision(family)
    except Exception as error:
        return found(Verdict.BROKEN, f"{type(error).__name__}: {error}")
    try:
        finding = _captured(family, dtype, found)
        if finding.verdict is Verdict.WRONG and finding.error < BARS[torch.float32]:  # rounds to single precision inside
            finding = _captured(family, torch.float32, found)
    except MeshwrightError as error:
        return found(Verdict.REFUSED, str(error))
    except Exception as error:
        return found(Verdict.RAISES, f"{type(error).__name__}: {error}{_place(error)}")
    return finding


def stages_of(family: Family) -> tuple[int, ...]:
    """Two stages, and for every third family four as well."""
    return (2, 4) if crc32(family.name.encode()) % 3 == 0 else (2,)


def _place(error: Exception) -> str:
    """The last line of the package that an error came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/meshwright/" in f.filename]
    return f" (at {frames[-1].filename.rpartition('/meshwright/')[2]}:{frames[-1].lineno})" if frames else ""


def _captured(family: Family, dtype: torch.dtype, found: Callable[..., Finding]) -> Finding:
    model = built(family, dtype=dtype)
    (rows, length), *_ = family.sizes
    example = cast(family.batch(rows, length, 1), dtype)
    flat = flatten(model, example)
    evaluation, refused = Evaluation(), None
    try:
        evaluation = check_start(Start(model, flat, example))
    except MeshwrightError as error:
        refused = error
    finding = _compared(family, model, flat, evaluation, example, found)
    if refused is None or BARS[dtype] < finding.error < BARS[torch.float32]:
        return finding
    if finding.verdict is Verdict.EXACT:
        return found(Verdict.WRONG, f"refused without a reason, it is exact: {refused}", error=1.0)
    return found(Verdict.REFUSED, str(refused))


def _compared(
    family: Family, model: nn.Module, flat: Flat, evaluation: Evaluation, example: Batch, found: Callable[..., Finding]
) -> Finding:
    dtype = example_dtype(model)
    worst, done, more = 0.0, [], False
    for count in stages_of(family):
        try:
            layers = layers_for(model, example, count, flat=flat, evaluated=evaluation.graph)
        except MeshwrightError:
            if not done:
                raise
            continue
        for train in (True, False):
            if not train and evaluation.refused is not None:
                return found(Verdict.REFUSED, f"in evaluation: {evaluation.refused}")
            graphs = Graphs(layers if train or layers.evaluation is None else layers.evaluation)
            for number, (rows, length) in enumerate(family.sizes):
                batch = cast(family.batch(rows, length, 2 + number), dtype)
                error, where = compared(family, model, layers, graphs, batch, train=train)
                if error > BARS[dtype]:
                    return found(Verdict.WRONG, f"{where} at {rows} x {length}, {count} stages", error=error)
                worst = max(worst, error)
            more = more or len(graphs.every) > 1
        done.append(count)
    return found(Verdict.EXACT, error=worst, layers=len(layers.modules), stages=tuple(done), again=more)


def example_dtype(model: nn.Module) -> torch.dtype:
    """What a model computes in."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
