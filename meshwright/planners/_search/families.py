"""The schedules that a search tries, and what is known of each without building it: its placement, and the sizes it accepts.

`live` is the least number of activations that a worker holds at once, each of one of its stages: forwards whose backward, or
whose first half of a backward, has not ended. It rejects plans before they are built; what a plan really holds comes from its
lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from meshwright.ir.placement import Placement
from meshwright.schedules import parameters
from meshwright.schedules._orders.chimera_slots import worker_of


@dataclass(frozen=True, eq=False)
class Family:
    """A schedule with its options.

    Args:
        schedule: Its name.
        options: Its options.
        chunks: Stages of a worker.
        replicas: Copies of the pipeline inside the schedule.
        split: Whether backwards are split, so that no worker waits for weight halves.
        early: Whether it recomputes by actions of its own while it waits for gradients, on all stages but the last.
        placement: Which worker has which stage, by the number of workers.
        fits: Whether it accepts these numbers of workers and microbatches.
        live: The least activations that are alive on worker w of D with N microbatches.
        most: The most of them; None if that is the same number.
    """

    schedule: str
    placement: Callable[[int], Placement]
    options: Mapping[str, object] = field(default_factory=dict)
    chunks: int = 1
    replicas: int = 1
    split: bool = False
    early: bool = False
    fits: Callable[[int, int], bool] = lambda D, N: True
    live: Callable[[int, int, int], int] = lambda w, D, N: 1
    most: Callable[[int, int, int], int] | None = None

    @property
    def name(self) -> str:
        """The schedule with its options, in words."""
        options = " ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.schedule} {options}".strip()

    @property
    def has_line(self) -> bool:
        """Whether each stage has one worker of its own, so that stages can have several devices."""
        return self.chunks == 1 and self.replicas == 1

    def recompute_shares(self, stages: int, recompute: bool) -> tuple[float, ...]:
        """Returns which share of each stage is recomputed in a plan that recomputes or does not."""
        return (float(recompute),) * (stages - 1) + (float(recompute and not self.early),)


def _whole_units(D: int, N: int) -> bool:
    return D % 2 == 0 and N % 2 == 0 and (N <= D or N % D == 0)


def _even(D: int, N: int) -> bool:
    return D % 2 == 0 and N % 2 == 0


def _pairs(D: int) -> Placement:
    return Placement.of(lambda r, stage: worker_of(D, 2, r, stage), stages=D, replicas=4)


def _interleaved(chunks: int) -> Family:
    return Family(
        "interleaved",
        lambda D: Placement.looped(D, chunks=chunks),
        {"chunks": chunks},
        chunks=chunks,
        fits=lambda D, N: D > 1 and N % D == 0,
        live=lambda w, D, N: min(chunks * N, 2 * (D - 1 - w) + (chunks - 1) * D + 1),
    )


def _wave(legs: int) -> Callable[[int, int, int], int]:
    """The activations of a wave: as many forwards as there are stages come first."""
    return lambda w, D, N: min(legs * D, (legs - 2) * min(N, D) + N + 1 + w, legs * N)


def _two_ways(w: int, D: int, N: int) -> int:
    """The activations of a V that is unfolded into two directions."""
    return _wave(2)(min(w, D - 1 - w), D // 2, N // 2)


FAMILIES: tuple[Family, ...] = (
    Family("onef1b", Placement.line, live=lambda w, D, N: min(N, D - w)),
    Family("onef1b", Placement.line, {"warmup": 2}, live=lambda w, D, N: min(N, 2 * (D - 1 - w) + 1)),
    Family("gpipe", Placement.line, live=lambda w, D, N: N),
    Family(
        "shifted",
        Placement.line,
        early=True,
        fits=lambda D, N: D > 1,
        live=lambda w, D, N: min(N, D - w),
        most=lambda w, D, N: min(N, max(D - w, 3 if w == D - 2 else 0)),
    ),
    Family("zero_bubble", Placement.line, {"variant": "h1"}, split=True, live=lambda w, D, N: min(N, D - w)),
    Family("zero_bubble", Placement.line, {"variant": "h2"}, split=True, live=lambda w, D, N: min(N, 2 * (D - 1 - w) + 1)),
    Family("listed", Placement.line, live=lambda w, D, N: min(N, max(1, 4 * (D - 1 - w)))),
    _interleaved(2),
    _interleaved(4),
    Family("zbv", lambda D: Placement.zigzag(D, legs=2), chunks=2, split=True, fits=lambda D, N: D > 1, live=_wave(2)),
    Family("hanayo", lambda D: Placement.zigzag(D, legs=2), {"waves": 1}, chunks=2, fits=lambda D, N: D > 1, live=_wave(2)),
    Family("hanayo", lambda D: Placement.zigzag(D, legs=4), {"waves": 2}, chunks=4, fits=lambda D, N: D > 1, live=_wave(4)),
    Family("chimera", Placement.mirrored, replicas=2, fits=_whole_units, live=lambda w, D, N: _two_ways(w, D, min(N, D))),
    Family("chimera", Placement.mirrored, {"mode": "steady"}, replicas=2, fits=_even, live=_two_ways),
    Family("chimera", Placement.mirrored, {"split": True}, replicas=2, split=True, fits=_even, live=_two_ways),
    Family(
        "chimera",
        _pairs,
        {"pairs": 2},
        replicas=4,
        fits=lambda D, N: _whole_units(D, N) and D % 4 == 0 and N % 4 == 0,
        live=lambda w, D, N: 1 + (min(N, D) + 1) // 2,
        most=lambda w, D, N: min(N, D),
    ),
    Family(
        "dualpipe",
        Placement.mirrored,
        replicas=2,
        split=True,
        fits=lambda D, N: _even(D, N) and N >= 2 * D - 2,
        live=lambda w, D, N: D + (N > 2 * D - 2 or 0 < w < D - 1),
    ),
    Family(
        "dualpipev",
        lambda D: Placement.zigzag(D, legs=2),
        chunks=2,
        split=True,
        fits=lambda D, N: D > 1 and N >= 2 * D - 1,
        live=lambda w, D, N: 2 * D + (N > 2 * D - 1 or w > 0),
    ),
    Family("gems", Placement.mirrored, replicas=2, fits=lambda D, N: D > 1 and N >= 2),
)
ZERO_3 = Family("interleaved", lambda D: Placement.looped(1, chunks=4), {"chunks": 4}, chunks=4, live=lambda w, D, N: 4)
"""One worker that gathers the parameters of four stages, one after the other."""


def families(schedule: str | None = None) -> tuple[Family, ...]:
    """Returns all, or those of one schedule."""
    return tuple(family for family in FAMILIES if schedule in (None, family.schedule))


@cache
def shaped_by_costs(family: Family) -> bool:
    """Whether the order of a schedule depends on costs, which are then part of the plan."""
    shaped = {"zbv", "zero_bubble", "chimera", "listed", "onef1b"}
    options = family.options
    uses = {"zero_bubble": options.get("variant") == "auto", "chimera": bool(options.get("split"))}
    uses["onef1b"] = "memory" in options
    uses["listed"] = options.get("strict") is False or "memory" in options
    return family.schedule in shaped and "costs" in parameters(family.schedule) and uses.get(family.schedule, True)


def shaped_by_links(family: Family) -> bool:
    """Whether the order of a schedule depends on links too. A run does not know them, so a plan stores such an order itself."""
    return family.schedule in ("listed", "onef1b") and shaped_by_costs(family)
