"""When another plan would be better: the same question with other links, with more or less memory, or with another batch.

Links and memory are multiplied by a factor, a batch changes in whole steps. Where the answer differs, bisection finds from which
value on. A value is stated only if planning 5 % beyond it gives another answer, and planning 5 % before it gives the present one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil, floor
from time import perf_counter

from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster, Link
from meshwright.ir.plan.chosen_plan import Plan
from meshwright.planners._limits import Asked, NothingFitsError
from meshwright.planners._nearest_fit import Planner, answered

BEYOND = 0.05
CLOSE = 1.02
"""Bisection ends when two factors are this near."""
FARTHEST = (2.0, 4.0)
"""How many times as much, or what part, is looked at."""
ISLANDS = 3
"""How often a search goes on where an answer is given only by a narrow range of values."""
IN_WORDS = {
    "links": ("faster links", "slower links"),
    "memory": ("more memory", "less memory"),
    "batch": ("a larger batch", "a smaller batch"),
    "microbatches": ("more microbatches", "fewer microbatches"),
}
SIGNATURE = ("schedule", "options", "pp", "dp", "tp", "tensor", "sequence", "box", "dp_mode", "recompute", "width")


def with_flips(planner: Planner, plan: Plan, asked: Asked, seconds: float) -> Plan:
    """Returns a plan with its flip points: the value of each quantity beyond which another plan is better, and that plan.

    Quantities that could not be examined within `seconds` are named in a note.
    """
    end, left, found, scales = perf_counter() + seconds, [], [], _scales(plan, asked)
    for number, scale in enumerate(scales):
        answers = Answers(planner, scale, plan, end)
        for more in (True, False):
            directions = 2 * (len(scales) - number) - (not more)
            answers.end = perf_counter() + max(0.0, end - perf_counter()) / directions  # what is left, in equal parts
            try:
                value = _flip(answers, more=more)
            except OutOfTimeError:
                left.append(f"{IN_WORDS[scale.what][not more]}{answers.seen(more=more)}")
                continue
            if value is not None:
                words = {"direction": "more" if more else "less", "factor": value / scale.start, "plan": answers.words[value]}
                found.append({"what": scale.what, **words, **({"size": round(value * scale.step)} if scale.step else {})})
    note = [f"not looked at within {seconds:g} s: other plans with {', '.join(left)} (--explain)"] if left else []
    return replace(plan, flips=tuple(found), notes=(*plan.notes, *note))


def _scales(plan: Plan, asked: Asked) -> list[QuantityScale]:
    """Returns the quantities that can change."""
    finite = any(device.memory_bytes < float("inf") for device in asked.cluster.devices) and not asked.limits.memory_free
    scales = [QuantityScale("links", lambda factor: replace(asked, cluster=with_links(asked.cluster, factor)))]
    if finite:
        scales.append(QuantityScale("memory", lambda factor: replace(asked, cluster=with_memory(asked.cluster, factor))))
    return [*scales, batch_scale(plan, asked)]


def signature(plan: Plan | None) -> str:
    """What a plan is, without its cuts and without what follows from the batch."""
    if plan is None:
        return "nothing fits"
    found = [f"{key} {plan.parallel[key]}" for key in SIGNATURE if key in plan.parallel]
    return ", ".join([*found, f"rows {plan.row['rows']}"] if plan.row.get("rows") else found)


@dataclass(frozen=True)
class QuantityScale:
    """A quantity that can change: what to ask for each value. With a step, values are whole numbers of steps."""

    what: str
    asked: Callable[[float], Asked]
    start: float = 1.0
    step: int = 0

    def beyond(self, value: float, *, more: bool) -> float:
        """Returns the value 5 % farther; the next whole one for steps."""
        far = value * (1 + BEYOND if more else 1 - BEYOND)
        if not self.step:
            return far
        return max(ceil(far), value + 1) if more else min(floor(far), value - 1)

    def before(self, value: float, *, more: bool) -> float:
        """Returns the value 5 % nearer, but not before the start."""
        near = self.beyond(value, more=not more)
        return max(near, self.start) if more else min(near, self.start)

    def middle(self, one: float, other: float) -> float | None:
        """Returns a value between two; None if they are neighbours."""
        found = (one * other) ** 0.5
        if self.step:
            found = round(found)
            return found if min(one, other) < found < max(one, other) else None
        return found if max(one, other) / min(one, other) > CLOSE else None


class OutOfTimeError(Exception):
    """The time to look for other answers is over."""


@dataclass
class Answers:
    """What a planner answers for each value of a scale."""

    planner: Planner
    scale: QuantityScale
    plan: Plan
    end: float
    words: dict[float, str] = field(default_factory=dict)
    _same: dict[float, bool] = field(default_factory=dict)

    def seen(self, *, more: bool) -> str:
        """Returns the nearest value with another answer in words, if there is one yet."""
        others = [value for value, same in self._same.items() if not same and (value > self.scale.start) == more]
        if not others:
            return ""
        nearest = min(others) if more else max(others)
        return f" (somewhere before {nearest / self.scale.start:.3g} times as much: {self.words[nearest]})"

    def same(self, value: float) -> bool:
        """Returns whether the answer is the present plan, or one that is not better although the present one fits, too."""
        if value not in self._same:
            if perf_counter() + self.plan.planning_s > self.end:
                raise OutOfTimeError
            found: Plan | None = None
            try:
                found = answered(self.planner, self.scale.asked(value))
                self.words[value] = found.name or signature(found)
            except NothingFitsError:
                self.words[value] = signature(None)
            except MeshwrightError as error:
                self.words[value] = error.what
            fits_there = self.scale.what == "memory" and value >= self.scale.start
            as_good = found is not None and fits_there and found.step_s >= self.plan.step_s * (1 - 1e-9)
            self._same[value] = found is not None and (as_good or signature(found) == signature(self.plan))
        return self._same[value]


def _flip(answers: Answers, *, more: bool) -> float | None:
    """Returns the nearest value from which on the answer is another one; None if there is none nearby."""
    scale = answers.scale
    ends = [scale.start * far if more else scale.start / far for far in FARTHEST]
    if scale.step:
        ends = [float(floor(end) if more else max(1, ceil(end))) for end in ends]
    for end in dict.fromkeys(ends):
        if end != scale.start and not answers.same(end) and (found := _nearest(answers, end, more=more)) is not None:
            return found
    return None


def _nearest(answers: Answers, end: float, *, more: bool) -> float | None:
    """Returns the nearest value from which on the answer is another one, if it is another one at `end`."""
    scale = answers.scale
    same, other = scale.start, end
    for _ in range(ISLANDS):
        while (middle := scale.middle(same, other)) is not None:
            same, other = (middle, other) if answers.same(middle) else (same, middle)
        beyond, before = scale.beyond(other, more=more), scale.before(other, more=more)
        if scale.step and beyond < 1:
            return None
        if not answers.same(before):
            same, other = scale.start, before
        elif answers.same(beyond):
            same, other = beyond, end
            if (beyond >= end) == more:
                return None
        else:
            return other
    return None


def batch_scale(plan: Plan, asked: Asked) -> QuantityScale:
    """Returns batches, in steps in which the present plan can still run: its microbatches stay a multiple of its workers.

    If they are none now, they stay even, or whole.
    """
    given = asked.batch or asked.microbatches
    assert given is not None
    count, workers = plan.microbatches, int(plan.row.get("pp") or len(plan.stages))
    unit = workers if count % workers == 0 else 2 if count % 2 == 0 else 1
    step = given // count * unit
    if asked.batch is not None:
        return QuantityScale("batch", lambda steps: replace(asked, batch=round(steps) * step), given / step, step)
    return QuantityScale("microbatches", lambda steps: replace(asked, microbatches=round(steps) * step), given / step, step)


def with_links(cluster: Cluster, factor: float) -> Cluster:
    """Returns a cluster whose bandwidths are multiplied by a factor; latencies stay."""

    def faster(link: Link) -> Link:
        return Link(link.latency_s, link.bytes_per_s * factor)

    return replace(
        cluster,
        link=faster(cluster.link),
        links={pair: faster(link) for pair, link in cluster.links.items()},
        hosts=tuple(replace(host, inside=faster(host.inside), card=faster(host.card)) for host in cluster.hosts),
        bandwidths=tuple(tuple(rate * factor for rate in row) for row in cluster.bandwidths),
        spine=None if cluster.spine is None else faster(cluster.spine),
        collective=faster(cluster.collective),
    )


def with_memory(cluster: Cluster, factor: float) -> Cluster:
    """Returns a cluster whose memory sizes are multiplied by a factor."""
    return replace(cluster, devices=tuple(replace(d, memory_bytes=d.memory_bytes * factor) for d in cluster.devices))
