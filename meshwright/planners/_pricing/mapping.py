"""Which device runs which part of a plan: the same plan on other devices, improved by swaps.

The order of devices and two layouts give good mappings for regular clusters. Over arbitrary links a plan can be much faster with
two devices swapped. So the best plans are mapped again: from several orders of devices, two devices trade places as long as the
step gets shorter, or stays as long with less time on links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from random import Random

from meshwright.planners._pricing.priced_plan import Priced
from meshwright.planners._pricing.pricing import Pricer, tensor_of
from meshwright.planners._search.candidate_plans import Candidate, WidePlan
from meshwright.planners._search.families import shaped_by_costs, shaped_by_links
from meshwright.planners._search.grid_layout import grid
from meshwright.planners._search.interchangeable import arrangements
from meshwright.planners._search.plan_bounds import PlanBounds
from meshwright.planners._search.problem import Problem

Found = Candidate | WidePlan
Devices = tuple[int, ...]
SHUFFLED = 2
"""Random orders of devices to start from, besides the regular ones."""
EVERY_ORDER = 4
"""On at most this number of devices every order is a start."""
NEARLY = 1e-9


def shape_of(plan: Found) -> tuple[object, ...]:
    """Returns everything that defines a plan except its devices."""
    if isinstance(plan, WidePlan):
        cuts = tuple((stage.first, stage.last, stage.width) for stage in plan.stages)
        return plan.family, plan.microbatches, plan.rows, plan.recompute, cuts
    degrees = plan.pp, plan.dp, plan.tensor
    return plan.family, plan.microbatches, plan.rows, plan.share, plan.recompute, plan.zero, plan.ends, degrees


def on_devices(plan: Found, devices: Devices) -> Found:
    """Returns the same plan with these devices, in the order of its ranks."""
    if isinstance(plan, Candidate):
        return replace(plan, ranks=devices, layout="swapped")
    ends = [0, *accumulate(stage.width for stage in plan.stages)]
    stages = (replace(stage, devices=devices[a:b]) for stage, (a, b) in zip(plan.stages, pairwise(ends), strict=True))
    return replace(plan, stages=tuple(stages), source="swapped")


class Mapper:
    """Maps plans to devices, by simulation."""

    def __init__(self, problem: Problem, bounds: PlanBounds, pricer: Pricer) -> None:
        self.problem, self.bounds, self.pricer = problem, bounds, pricer

    @property
    def matters(self) -> bool:
        """Whether a plan takes another time on other devices."""
        return len(set(self.problem.kinds)) > 1

    def mapped(
        self, plans: Sequence[Priced], started: int, shapes: int, trials: int, over: Callable[[], bool]
    ) -> Iterator[Priced]:
        """Yields the best plans on better devices, one for each shape.

        `started` shapes are tried on the regular orders of devices. The best `shapes` of these go on from there, with at most
        `trials` simulations each.
        """
        if not self.matters:
            return
        plain = [each for each in plans if tensor_of(each.plan).tp == 1]  # tensor ranks are priced as neighbours
        fastest = {shape_of(each.plan): each for each in sorted(plain, key=lambda each: -each.step_s)}
        begun: list[list[Priced]] = []
        for each in sorted(fastest.values(), key=lambda each: each.step_s)[:started]:
            if not over() and (found := self._started(each.plan, self._starts(each.plan))):
                begun.append(found)
                yield found[0]
        used: list[Devices] = []
        for found in sorted(begun, key=lambda starts: _key(starts[0]))[:shapes]:
            count = len(found[0].parallel["ranks"])
            better = self.improved(found, trials, [devices for devices in used if len(devices) == count], over)
            used.append(self.devices_of(better.plan))
            yield better

    def devices_of(self, plan: Found) -> Devices:
        """Returns the device of each rank of a plan."""
        if isinstance(plan, WidePlan):
            return tuple(device for stage in plan.stages for device in stage.devices)
        return self.bounds.grid_of(plan).ranks

    def improved(self, found: list[Priced], trials: int, others: Sequence[Devices], over: Callable[[], bool]) -> Priced:
        """Returns the best of some mappings of a plan, or of `others`, or one that swaps of devices lead to.

        Plans whose order is built again for each mapping only try mappings, without swaps.
        """
        last = self.pricer.simulated + trials
        plan, known = found[0].plan, {self.devices_of(each.plan) for each in found}
        found = sorted([*self._started(plan, [each for each in others if each not in known]), *found], key=_key)
        best = found[0]
        if self._is_rebuilt(plan):
            return best
        for start in found:
            if self.pricer.simulated >= last or over():
                break
            climbed = self._climbed(start, last, over)
            best = climbed if _better(climbed, best) else best
        return best

    def _started(self, plan: Found, starts: Iterable[Devices]) -> list[Priced]:
        """Returns a plan on each of some devices on which it fits, the best first."""
        found = (self._priced(plan, devices) for devices in dict.fromkeys(starts))
        return sorted((priced for priced in found if priced is not None), key=_key)

    def _priced(self, plan: Found, devices: Devices) -> Priced | None:
        priced = self.pricer.quick(on_devices(plan, devices))
        return priced if priced is not None and priced.over_bytes <= 0 else None

    def _starts(self, plan: Found) -> Iterator[Devices]:
        """Orders of devices to start from: as it is, by number, by links in both directions, and at random; or every order."""
        own = self.devices_of(plan)
        yield own
        if self.problem.devices <= EVERY_ORDER and not self._is_rebuilt(plan):
            yield from (devices for devices in arrangements(self.problem.kinds) if len(devices) == len(own))
            return
        given = list(range(self.problem.devices))
        orders = [given, self.problem.order, self.problem.order[::-1]]
        for seed in range(SHUFFLED):
            orders.append(Random(seed).sample(given, len(given)))
        for order in orders:
            if isinstance(plan, WidePlan):
                yield tuple(order[: len(own)])
                continue
            for layout in ("stages", "copies") if plan.dp > 1 and plan.pp > 1 else ("stages",):
                yield grid(order, plan.pp, plan.dp, plan.tensor.tp, layout).ranks

    def _is_rebuilt(self, plan: Found) -> bool:
        """Whether the order of a plan depends on its devices."""
        return shaped_by_links(plan.family) or (shaped_by_costs(plan.family) and not self.problem.uniform)

    def _climbed(self, start: Priced, last: int, over: Callable[[], bool]) -> Priced:
        """Swaps two devices at a time, until no swap is better or the simulations are used up."""
        best, used = start, list(self.devices_of(start.plan))
        places = [*used, *(device for device in range(self.problem.devices) if device not in set(used))]
        alone = isinstance(start.plan, WidePlan) and len(start.plan.stages) == 1  # its devices can trade places for nothing
        kinds = self.problem.kinds
        pairs = [(a, b) for a, b in combinations(range(len(places)), 2) if a < len(used) and not (alone and b < len(used))]
        improving = True
        while improving:
            improving = False
            for a, b in pairs:
                if kinds[places[a]] == kinds[places[b]]:
                    continue
                if self.pricer.simulated >= last or over():
                    return best
                places[a], places[b] = places[b], places[a]
                priced = self._priced(start.plan, tuple(places[: len(used)]))
                if priced is not None and _better(priced, best):
                    best, improving = priced, True
                else:
                    places[a], places[b] = places[b], places[a]
        return best


def _key(priced: Priced) -> tuple[float, float]:
    """Shorter steps first, then less time on links: a plan with two slow links gets better one link at a time."""
    size = max((cost.output_bytes for cost in priced.costs), default=0.0)
    links = sum(link.latency_s + link.busy_s(size) for link in priced.links.links.values())
    return priced.step_s, links + sum(cost.sync_s for cost in priced.costs)


def _better(one: Priced, other: Priced) -> bool:
    (step, links), (than, rest) = _key(one), _key(other)
    return step < than * (1 - NEARLY) or (step <= than * (1 + NEARLY) and links < rest * (1 - NEARLY))
