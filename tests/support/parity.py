"""The matrix of parity: what is combined, what is defined, and a pairwise cover of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache, partial
from itertools import combinations, product
from typing import Any

from torch import Tensor, nn

from meshwright import MeshwrightError, Schedule, schedules
from meshwright.train.models import small_models as models

ASYNCHRONOUS = ("cyclic", "pipedream", "pipedream_2bw")
"""Schedules without a flush: they equal their own delayed rule, to the bit."""

EXTRA = {
    "chimera": ({"mode": "halving", "half_forward": True}, {"split": True, "pairs": 2}),
    "cyclic": ({"rule": "v1"}, {"margin": 1}),
    "shifted": ({"level": "early"}, {"level": "last"}),
    "onef1b": ({"warmup": 2},),
}
"""Sets of options beside those that a schedule wants compared."""


def variants() -> list[tuple[str, tuple[tuple[str, object], ...]]]:
    """Every schedule with every set of options worth a run."""
    found = [(n, o) for n in schedules.names() for o in (*schedules.compared(n), *EXTRA.get(n, ()))]
    return [(name, tuple(sorted(chosen.items()))) for name, chosen in found]


@dataclass(frozen=True)
class Point:
    """One run of the matrix; `count` says how N follows from D, and where it is `other` it is no multiple of D."""

    variant: tuple[str, tuple[tuple[str, object], ...]]
    pp: int
    count: str
    dp: int
    recompute: str
    dropout: bool
    model: str
    dtype: str
    transport: str

    @property
    def microbatches(self) -> int:
        """N."""
        if self.count == "other":
            tried = (self.pp + 1, self.pp + 2, max(1, self.pp // 2), 1)
            return next((n for n in tried if n % self.pp and built(self.variant, self.pp, n)), 0)
        return {"D": 1, "2D": 2, "4D": 4}[self.count] * self.pp

    def plan(self) -> dict[str, Any]:
        """The `parallel` of `verify`."""
        name, chosen = self.variant
        settled = self.schedule is not None and self.schedule.recompute is not None
        return {
            "pp": self.pp,
            "dp": self.dp,
            "schedule": name,
            "options": dict(chosen),
            "microbatches": self.microbatches,
            "recompute": None if settled else self.recompute,
            "transport": self.transport,
        }

    @property
    def schedule(self) -> Schedule | None:
        """The schedule as built; None where it refuses."""
        return built(self.variant, self.pp, self.microbatches) if self.microbatches else None

    def defined(self) -> bool:
        """Is this a run that should work?"""
        schedule = self.schedule
        if schedule is None or (schedule.recompute is not None and self.recompute != "none"):
            return False
        # With halves each draws its own rows: no stream of one process is like it.
        return not (self.dropout and schedule.parts > 1)

    def build(self) -> Any:
        """What makes the model: stages of unequal length, more layers than stages."""
        assert self.schedule is not None
        return partial(model, self.model, self.schedule.stages, 0.1 if self.dropout else 0.0)

    def batch(self) -> Any:
        """What makes batches: cuts of unequal size, and a shorter second batch."""
        return partial(batch, self.model, 2 * self.microbatches * self.dp + 1)

    def __str__(self) -> str:
        name, chosen = self.variant
        drop = "dropout" if self.dropout else "plain"
        words = [name, *(f"{k}={v}" for k, v in chosen), f"{self.pp}x{self.microbatches}x{self.dp}", self.recompute, drop]
        return "-".join([*words, self.model, self.dtype, self.transport])


def model(kind: str, stages: int, dropout: float) -> list[nn.Module]:
    """A small model with more layers than stages."""
    if kind == "mlp":
        return models.mlp(layers=stages + stages // 2 + 1, width=6, dropout=dropout)
    return models.gpt(blocks=stages, width=8, heads=2, length=6, tied=kind == "tied", dropout=dropout)


def batch(kind: str, rows: int, step: int) -> tuple[Tensor, Tensor]:
    """Every other batch is short, and the texts in it are too."""
    if kind == "mlp":
        return models.mlp_batch(step, rows=rows - 2 * (step % 2), width=6)
    return models.text_batch(step, rows=rows - 2 * (step % 2), length=6 - step % 2)


@cache
def built(variant: tuple[str, tuple[tuple[str, object], ...]], workers: int, microbatches: int) -> Schedule | None:
    """The schedule, or None where it refuses these sizes."""
    try:
        return schedules.build(variant[0], workers=workers, microbatches=microbatches, steps=2, **dict(variant[1]))
    except MeshwrightError:
        return None


def matrix(*, lean: bool = False) -> Iterator[Point]:
    """Everything that is defined; `lean` leaves out what does not touch the schedule."""
    kinds = ("mlp",) if lean else ("mlp", "tied", "gpt")
    dtypes, lines = (("float64",), ("auto",)) if lean else (("float64", "float32"), ("auto", "torch", "strict"))
    modes = ("none", "inline", "early")
    for values in product(
        variants(), (2, 4), ("D", "2D", "4D", "other"), (1, 2), modes, (False, True), kinds, dtypes, lines
    ):  # fmt: skip
        point = Point(*values)
        if point.defined():
            yield point


def pairwise_cover(points: list[Point], seed: int = 0) -> list[Point]:
    """Few points that hold every pair of values which some point holds: the greediest first, one threshold after another."""
    names = [f.name for f in fields(Point)]
    order = random.Random(seed).sample(points, len(points))
    seen: set[tuple[object, ...]] = set()
    chosen = []
    for least in (36, 28, 22, 16, 12, 9, 7, 5, 4, 3, 2, 1):
        for point in order[:3000] if least > 1 else order:
            values = [(name, getattr(point, name)) for name in names]
            new = {pair for pair in combinations(values, 2) if pair not in seen}
            if len(new) >= least:
                seen |= new
                chosen.append(point)
    return chosen
