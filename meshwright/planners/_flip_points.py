"""When another plan would be better: the same question with another batch, faster or slower links, more or less memory.

A quantity is doubled and halved. If the answer changes, bisection finds where; the point is stated only if planning 5 % beyond it
really gives another answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster, Link
from meshwright.ir.plan.chosen_plan import Plan
from meshwright.planners._limits import Asked

ACTIONS = 400_000
"""Larger searches are not repeated."""
BEYOND = 1.05
STEPS = 6
Planner = Callable[..., Iterator[Plan]]


def flip_points(planner: Planner, plan: Plan, asked: Asked) -> tuple[dict[str, Any], ...]:
    """Returns for each quantity where the answer changes, and to what."""
    if plan.counts.get("actions", 0) > ACTIONS:
        return ()
    found: list[dict[str, Any]] = []
    finite = any(device.memory_bytes < float("inf") for device in asked.cluster.devices) and not asked.limits.memory_free
    quantities = {"links": _with_links, **({"memory": _with_memory} if finite else {})}
    mine = signature(plan)
    for what, change in quantities.items():
        for factor in (2.0, 0.5):
            if (flip := _flip(planner, asked, change, factor, mine)) is not None:
                found.append({"what": what, "direction": "more" if factor > 1 else "less", **flip})
    for direction, counts in (("more", (2, 4)), ("less", (-2, -4))):
        if (flip := _batch_flip(planner, asked, counts, mine)) is not None:
            found.append({"what": "batch", "direction": direction, **flip})
    return tuple(found)


def signature(plan: Plan | None) -> str:
    """What a plan is, without sizes that follow from the batch."""
    if plan is None:
        return "nothing fits"
    keys = ("schedule", "options", "pp", "dp", "tp", "tensor", "dp_mode", "recompute", "width")
    return ", ".join(f"{key} {plan.parallel[key]}" for key in keys if key in plan.parallel)


def _answer(planner: Planner, asked: Asked) -> str:
    try:
        *_, best = planner(
            profile=asked.profile,
            cluster=asked.cluster,
            microbatches=asked.microbatches,
            batch=asked.batch,
            limits=asked.limits,
        )
    except MeshwrightError:
        return signature(None)
    return signature(best)


def _flip(
    planner: Planner, asked: Asked, change: Callable[[Cluster, float], Cluster], factor: float, mine: str
) -> dict[str, Any] | None:
    def answer(scale: float) -> str:
        return _answer(planner, replace(asked, cluster=change(asked.cluster, scale)))

    if answer(factor) == mine:
        return None
    same, other = 1.0, factor
    for _ in range(STEPS):
        middle = (same * other) ** 0.5
        if answer(middle) == mine:
            same = middle
        else:
            other = middle
    beyond = other * (BEYOND if factor > 1 else 1 / BEYOND)
    new = answer(beyond)
    return None if new == mine else {"factor": other, "plan": new}


def _batch_flip(planner: Planner, asked: Asked, factors: tuple[int, ...], mine: str) -> dict[str, Any] | None:
    """The first multiple or part of the batch with another answer that is still there 5 % beyond, as far as that is whole."""
    given = asked.batch or asked.microbatches
    assert given is not None
    for factor in factors:
        size = given * factor if factor > 0 else given // -factor
        if size < 1 or (factor < 0 and given % -factor):
            continue
        new = _answer(planner, replace(asked, batch=size) if asked.batch else replace(asked, microbatches=size))
        if new != mine:
            return {"factor": size / given, "size": size, "plan": new}
    return None


def _with_links(cluster: Cluster, scale: float) -> Cluster:
    def faster(link: Link) -> Link:
        return Link(link.latency_s, link.bytes_per_s * scale)

    hosts = tuple(replace(host, inside=faster(host.inside), card=faster(host.card)) for host in cluster.hosts)
    spine = faster(cluster.spine) if cluster.spine is not None else None
    links = {pair: faster(link) for pair, link in cluster.links.items()}
    rates = tuple(tuple(rate * scale for rate in row) for row in cluster.bandwidths)
    return replace(cluster, link=faster(cluster.link), links=links, hosts=hosts, bandwidths=rates, spine=spine)


def _with_memory(cluster: Cluster, scale: float) -> Cluster:
    return replace(cluster, devices=tuple(replace(d, memory_bytes=d.memory_bytes * scale) for d in cluster.devices))
