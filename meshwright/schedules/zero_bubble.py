"""Zero-bubble 1F1B (Qi et al., ICLR'24): backwards are split; weight halves, which no worker waits for, fill the bubbles.

    0: F0 F1 F2 .  .  I0 W0 F3 I1 W1 ..     h1: as much memory as 1F1B (D activations), bubble (D-1)(F + I - W)
    1: .  F0 F1 .  I0 F2 I1 W0 F3 I2 ..     h2: 2D-1 activations, no bubble within a worker's span for F = I = W
    2: .  .  F0 I0 F1 I1 F2 I2 W0 F3 ..     auto: from costs and latency, with at most `memory` activations alive

An activation counts from its F to its W. `rest` is the weight of an activation that only waits for its W, relative to a full
one, if that is known: I then frees part of the memory, as in the paper. `span` minimizes the longest worker span, which the
paper reports, instead of the makespan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost, hop_s, rows_for
from meshwright.schedules._orders.order_strings import actions_of
from meshwright.schedules._orders.split_orders import Limits, StageLine, linear, shared

COMPARED: tuple[dict[str, object], ...] = ({"variant": "h1"}, {"variant": "h2"}, {"variant": "auto"})
CAPPED: dict[str, object] = {"variant": "auto"}


def build(
    *,
    workers: int,
    microbatches: int,
    costs: Sequence[StageCost] | None = None,
    cluster: Cluster | None = None,
    variant: Literal["h1", "h2", "auto"] = "h1",
    memory: int | None = None,
    rest: float = 1.0,
    span: bool = False,
) -> Schedule:
    """Returns a closed form, or the best order that a short search finds under a memory cap."""
    if variant != "auto":
        for option, given in (("memory", memory is not None), ("rest", rest != 1.0), ("span", span)):
            if given:
                raise MeshwrightError(f"zero_bubble: {option} needs variant=auto, got variant={variant}", fix="variant=auto")
        words = linear(workers, microbatches, workers if variant == "h1" else 2 * workers - 1)
    else:
        memory = workers if memory is None else memory
        if memory < 1 or not 0 < rest <= 1:
            raise MeshwrightError(
                f"zero_bubble: memory={memory}, rest={rest}", fix="memory of at least 1, rest above 0 and at most 1"
            )
        memory = min(memory, microbatches + 2 * workers)  # more are never alive
        costs = rows_for(costs, workers)
        words = _auto(StageLine.of(costs, microbatches, hop_s(costs, cluster)), memory, rest, span)
    return Schedule("zero_bubble", Placement.line(workers), microbatches, actions_of(words))


def _auto(line: StageLine, memory: int, rest: float, span: bool) -> list[str]:
    from meshwright.schedules._orders.job_shop import auto

    each = (memory,) * len(line.forward)
    return auto(line, Limits(each, each) if rest == 1.0 else shared(line, memory, rest), span=span)
