"""A bound on the step of a plan whose costs and links are known, before its order is made.

The bounds of `group_bounds.py` know no links. This one adds them: messages delay the first forward of a worker and the last
backward after it, a link carries all microbatches of its boundaries, and a worker adds up the gradients of its stages one after
the other. To simulate a plan takes longer, and to make an order for its costs much longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from meshwright.ir.cluster import Cluster, Duplex
from meshwright.ir.placement import Placement
from meshwright.ir.stage_cost import StageCost

INF = float("inf")


@dataclass
class _Load:
    """The messages of a link: when the first can be sent, how long all take, and the least that follows the last one."""

    first_s: float = INF
    busy_s: float = 0.0
    rest_s: float = INF

    def add(self, first_s: float, busy_s: float, rest_s: float) -> None:
        """Adds messages that occupy the link for `busy_s` in all."""
        self.first_s, self.rest_s = min(self.first_s, first_s), min(self.rest_s, rest_s)
        self.busy_s += busy_s


def priced_bound_s(
    placement: Placement,
    costs: Sequence[StageCost],
    links: Cluster,
    microbatches: int,
    *,
    split: bool,
    early: bool = False,
    most: Sequence[float],
) -> float:
    """No order of so many microbatches is faster, updates not included.

    Replicas of the pipeline run equally many microbatches, or one of them one more. With `split`, weight halves may wait until
    other workers have what they need; with `early`, recompute does not wait for gradients. Worker w holds at most `most[w]`
    activations at once; others wait until one is released.
    """
    each = microbatches // placement.replicas
    forward = [cost.forward_s for cost in costs]
    back = [cost.input_s + (0.0 if early else cost.recompute_s) + (0.0 if split else cost.weight_s) for cost in costs]
    work = [cost.forward_s + cost.input_s + cost.recompute_s + cost.weight_s for cost in costs]
    heads: dict[int, float] = defaultdict(lambda: INF)
    tails: dict[int, float] = defaultdict(lambda: INF)
    works: dict[int, float] = defaultdict(float)
    stays: dict[int, float] = defaultdict(float)
    loads: dict[tuple[int, int], _Load] = defaultdict(_Load)
    gradient = [0.0] * len(costs)  # when the last gradient of a stage exists, at the earliest
    best = 0.0
    for replica in placement.teams:
        workers = [teams[0][0] for teams in replica]
        hops = _hops(workers, costs, links)
        start = [0.0, *accumulate(f + there for f, (there, _, _, _) in zip(forward, hops, strict=False))]
        down = [0.0, *accumulate(b + again for b, (_, _, again, _) in zip(back, hops, strict=False))]  # from a stage to stage 0
        trip = start[-1] + forward[-1] + back[-1] + down[-1]
        best = max(best, trip)
        after = 0.0  # the least that follows the last action of a stage
        for stage, worker in enumerate(workers):
            travels = 0.0 if split or stage == 0 else hops[stage - 1][2] + back[stage - 1] + after
            after = max(costs[stage].sync_s, travels)
            heads[worker], tails[worker] = min(heads[worker], start[stage]), min(tails[worker], after)
            works[worker] += each * work[stage]
            stays[worker] += trip - start[stage] - down[stage]
            gradient[stage] = max(gradient[stage], start[stage] + each * work[stage])
        for stage, (there, sends, again, returns) in enumerate(hops):
            ready, rest = start[stage] + forward[stage], down[stage] + back[stage]
            ends = workers[stage], workers[stage + 1]
            if sends:
                loads[_link(ends, links.duplex)].add(ready, each * sends, there - sends + trip - start[stage + 1])
            if returns:
                loads[_link(ends[::-1], links.duplex)].add(trip - rest - again, each * returns, again - returns + rest)
    for worker, head in heads.items():
        best = max(best, head + works[worker] + tails[worker], each * stays[worker] / most[worker])
    best = max([best, *(load.first_s + load.busy_s + load.rest_s for load in loads.values())])
    return max([best, *_sums(placement, costs, gradient)])


def _hops(workers: Sequence[int], costs: Sequence[StageCost], links: Cluster) -> list[tuple[float, float, float, float]]:
    """For each boundary how long an output travels, for how long it occupies the link, and the same for its gradient."""
    found = []
    for stage, (source, target) in enumerate(pairwise(workers)):
        if source == target:
            found.append((0.0, 0.0, 0.0, 0.0))
            continue
        there, again = links.between(source, target), links.between(target, source)
        sends, returns = there.busy_s(costs[stage].output_bytes), again.busy_s(costs[stage].gradient_bytes)
        found.append((sends + there.latency_s, sends, returns + again.latency_s, returns))
    return found


def _sums(placement: Placement, costs: Sequence[StageCost], gradient: Sequence[float]) -> list[float]:
    """For each worker the earliest end of its sums, which run one after the other."""
    found = []
    for held in placement.held:
        stages = {stage for _, stage in held}
        first = min(gradient[stage] for stage in stages)
        found.append(first + sum(costs[stage].sync_s for stage in stages))
        found += [gradient[stage] + costs[stage].sync_s for stage in stages]
    return found


def _link(ends: tuple[int, int], duplex: Duplex) -> tuple[int, int]:
    return ends if duplex is Duplex.FULL else (min(ends), max(ends))
