"""Notes for users of schedules with delayed gradients: usable step sizes and clipping. Logged once, on rank 0.

On a quadratic with momentum beta, training is stable for step sizes up to 2 (1 + beta) / curvature, and up to
(1 - beta) / (share x curvature) if a share of the gradients is one step late (docs/cyclic.md). The ratio of both is the factor.
"""

from __future__ import annotations

import logging
from math import isfinite

import torch.distributed as dist

from meshwright.ir.action import Op, walk
from meshwright.ir.schedule import Schedule

log = logging.getLogger(__name__)


def late_shares(schedule: Schedule) -> list[float]:
    """Returns for each stage the share of microbatches whose forward reads a version that is one round old."""
    late = [0] * schedule.stages
    for action in (action for entries in schedule.lists for action in walk(entries)):
        if action.op is Op.F and action.mb // schedule.microbatches == schedule.first and action.version < schedule.first:
            late[action.stage] += 1
    return [count / schedule.microbatches for count in late]


def lost_factor(share: float, momentum: float) -> float:
    """Returns by which factor the largest stable step size shrinks; 1 if it does not."""
    return max(1.0, 2 * (1 + momentum) * share / (1 - momentum))


def note_delays(schedule: Schedule, momentum: float, clip: float | None) -> None:
    """Logs what delayed gradients cost, and how gradients are clipped."""
    if dist.get_rank() != 0:
        return
    factors = [lost_factor(share, momentum) for share in late_shares(schedule)]
    if max(factors) > 1:
        listed = ", ".join(f"{factor:.3g}" for factor in factors)
        log.warning(
            "gradients of %s are up to one step late: with momentum %.3g the largest stable step size shrinks by a factor of up "
            "to %.3g (stage by stage: %s); use a smaller learning rate or less momentum",
            schedule.name, momentum, max(factors), listed,
        )  # fmt: skip
    if clip is not None and isfinite(clip):
        log.warning(
            "%s has no point at which the norm of a whole gradient is known: each of its %d units (stages and groups of tied "
            "parameters) is clipped to %.4g / sqrt(%d) = %.4g instead",
            schedule.name, schedule.units, clip, schedule.units, clip / schedule.units**0.5,
        )  # fmt: skip
