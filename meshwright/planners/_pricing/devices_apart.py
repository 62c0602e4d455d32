"""The memory of stages with several devices, if every device is simulated by itself.

Elsewhere one worker stands for all devices of a stage. But their messages take different times, and a faster device runs ahead
of a slower one, so a device may hold more messages than one that stands for all.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from meshwright.costs.stages import of_microbatch
from meshwright.ir.schedule import Schedule
from meshwright.passes.widen import widen
from meshwright.planners._pricing.priced_plan import Priced
from meshwright.planners._search.problem import Problem
from meshwright.simulate.simulator import proved_with_peaks

ALIKE, UNEQUAL = 1024, 16_384
"""The most actions of plans that are looked at: with stages of equal devices, and with devices of one stage that differ."""


def looks_apart(problem: Problem, priced: Priced) -> bool:
    """Whether the devices of stages are simulated by themselves."""
    devices = sum(priced.widths)
    most = UNEQUAL if any(problem.differ(stage.devices) for stage in priced.stages) else ALIKE
    return priced.workers < devices <= most // (2 * priced.microbatches)


def kinds_apart(problem: Problem, priced: Priced, schedule: Schedule) -> list[dict[str, float]]:
    """Returns the memory of the stages of a plan by kind, each on its fullest device, if all devices run their own lists."""
    widths, costs = priced.widths, of_microbatch(priced.costs, priced.widths)
    devices = [device for stage in priced.stages for device in stage.devices]
    links, paces = problem.cluster.placed(devices), problem.paces(priced.stages, priced.costs)
    _, kinds = proved_with_peaks(widen(schedule, widths), costs, links, paces=paces)
    ends = [0, *accumulate(widths)]
    return [max(kinds[a:b], key=lambda kind: sum(kind.values())) for a, b in pairwise(ends)]
