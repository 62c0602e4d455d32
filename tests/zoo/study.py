"""What becomes of one family: exact, refused, wrong, or an error that is not ours to show."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from meshwright.capture.export import flatten
from meshwright.errors import MeshwrightError
from meshwright.train.layers import layers_for
from tests.zoo.compare import BARS, compared, mode, plain, run
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
    """Other sizes were refused and captured again."""
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
                    with mode(model, None, train=train):
                        found = run(plain(model), model, batch, family.items, train=train, keyed=False)
                    if found.loss != found.loss:
                        raise ValueError(f"the loss is {found.loss}")
            return dtype
        except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
            problem = problem or error
    assert problem is not None
    raise problem


def study(family: Family, stages: tuple[int, ...] = (2, 4)) -> Finding:
    """Capture a family, cut it, and compare it with itself."""
    begun = time.perf_counter()

    def found(verdict: Verdict, note: str = "", **more: object) -> Finding:
        seconds = time.perf_counter() - begun
        return Finding(family.name, family.kind, verdict, note=note, seconds=seconds, **more)  # type: ignore[arg-type]

    try:
        dtype = precision(family)
    except Exception as error:
        return found(Verdict.BROKEN, f"{type(error).__name__}: {error}")
    try:
        return _captured(family, built(family, dtype=dtype), dtype, stages, found)
    except MeshwrightError as error:
        return found(Verdict.REFUSED, str(error))
    except Exception as error:
        return found(Verdict.RAISES, f"{type(error).__name__}: {error}{_place(error)}")


def _place(error: Exception) -> str:
    """The last line of the package that an error came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/meshwright/" in f.filename]
    return f" (at {frames[-1].filename.rpartition('/meshwright/')[2]}:{frames[-1].lineno})" if frames else ""


def _captured(family: Family, model: nn.Module, dtype: torch.dtype, stages: tuple[int, ...], found) -> Finding:  # type: ignore[no-untyped-def]
    bar, worst, again, done = BARS[dtype], (0.0, ""), False, []
    flat = None
    for at, (rows, length) in enumerate(family.sizes):
        example = cast(family.batch(rows, length, 1), dtype)
        batch = cast(family.batch(rows, length, 2 + at), dtype)
        flat = flat or flatten(model, example)
        for count in stages:
            try:
                layers = layers_for(model, example, count, flat=flat)
            except MeshwrightError:
                if count == stages[0]:
                    raise
                continue
            try:
                error = compared(family, model, layers, batch)
            except MeshwrightError:
                if not at:
                    raise
                again = True
            except Exception as error:
                if at:
                    note = f"{type(error).__name__}: {error}{_place(error)} at {rows} x {length}"
                    return found(Verdict.RAISES, f"{note}; captured again: {_again(family, model, example, batch)}")
                raise
            if again:
                layers = layers_for(model, example, count, flat=flatten(model, example))
                error = compared(family, model, layers, batch)
            done.append(count)
            if error[0] > worst[0]:
                worst = (error[0], f"{error[1]} at {rows} x {length}, {count} stages{', captured again' if again else ''}")
            if worst[0] > bar:
                more = f"; captured again: {_again(family, model, example, batch)}" if at and not again else ""
                return found(Verdict.WRONG, worst[1] + more, error=worst[0])
    layers_found = len(layers.modules)
    return found(Verdict.EXACT, error=worst[0], layers=layers_found, stages=tuple(sorted(set(done))), again=again)


def _again(family: Family, model: nn.Module, example: Batch, batch: Batch) -> str:
    """What capturing at this size would give."""
    try:
        error, where = compared(family, model, layers_for(model, example, 2), batch)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return f"{error:.0e} {where}"
