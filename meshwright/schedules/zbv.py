"""ZB-V (Qi et al., 2024): stages form a V, backwards are split; equal halves leave no bubble inside a worker's span.

    D = 3: stages 0, 1, 2 run down, 3, 4, 5 back up; worker 0 holds the first and the last
    0: 0F0 0F1 0F2 .   .   5F0 5I0 5W0 ...

Forwards and input halves keep the steady order of a wave. Weight halves fill the gaps, with at most D activations alive on a
worker, as in 1F1B.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.ir.action import Op
from meshwright.ir.cluster import Cluster
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost, hop_s, rows_for
from meshwright.schedules._orders.fill_weight_halves import fill
from meshwright.schedules._orders.wave import steady


def build(
    *, workers: int, microbatches: int, costs: Sequence[StageCost] | None = None, cluster: Cluster | None = None
) -> Schedule:
    """If costs are given, they decide where the gaps are."""
    stages = 2 * workers
    costs = rows_for(costs, stages)
    orders = steady(workers, microbatches, backward=Op.I)
    lists = fill(orders, stages=stages, cap=stages, costs=costs, latency_s=hop_s(costs, cluster))
    return Schedule("zbv", Placement.zigzag(workers, legs=2), microbatches, tuple(map(tuple, lists)))
