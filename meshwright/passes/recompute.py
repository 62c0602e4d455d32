"""Which stages recompute, and how much: `inline` inside the backward, `early` as an R action that needs no gradient.

Stage-aware (Merak): a stage holds fewer microbatches in flight the later it comes, so with a byte budget later stages can
keep more. The share a stage drops is the smallest that fits, from counted live microbatches and measured bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Action, Entry, Op, Transfer, walk
from meshwright.ir.profile import StageCost
from meshwright.ir.schedule import Recompute, Schedule


class Mode(StrEnum):
    """What every stage does, where it is not said stage by stage."""

    NONE = "none"
    INLINE = "inline"
    EARLY = "early"


def recompute(schedule: Schedule, choice: Mode | Sequence[Recompute] | None) -> Schedule:
    """Settle recompute for every stage and place R actions where it is early; a schedule that has decided stays as it is."""
    if schedule.recompute is not None or choice is None:
        return schedule
    if isinstance(choice, Mode):
        share = 0.0 if choice is Mode.NONE else 1.0
        choice = [Recompute(share, choice is Mode.EARLY)] * schedule.stages
    if len(choice) != schedule.stages:
        raise MeshwrightError(f"{schedule.name} has {schedule.stages} stages, recompute names {len(choice)}")
    early = {stage for stage, how in enumerate(choice) if how.early and how.share > 0}

    def placed(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        result: list[Entry] = []
        for entry in entries:
            for action in () if isinstance(entry, Transfer) else walk((entry,)):
                if action.op in (Op.B, Op.I) and action.stage in early:
                    result.append(action._replace(op=Op.R))
            result.append(entry)
        return tuple(result)

    prologue, period, drain = (tuple(map(placed, lists)) for lists in (schedule.prologue, schedule.period, schedule.drain))
    return replace(schedule, recompute=tuple(choice), prologue=prologue, period=period, drain=drain)


def stage_aware(
    schedule: Schedule, costs: Sequence[StageCost], *, budget_bytes: float, layers: Sequence[int] | None = None
) -> tuple[Recompute, ...]:
    """The least recompute per stage that keeps every worker under a budget of bytes, in whole layers where given.

    `costs` are without recompute. A worker that holds several stages shares what is left evenly over their live bytes.
    """
    live = live_microbatches(schedule)
    shares = [0.0] * schedule.stages
    for worker, held in enumerate(schedule.placement.held):
        static = sum(2 * costs[stage].parameter_bytes for _, stage in held)
        inputs = sum(live[worker][pair] * (costs[pair[1] - 1].output_bytes if pair[1] else 0.0) for pair in held)
        working = max(costs[stage].activation_bytes for _, stage in held)
        full = sum(live[worker][pair] * costs[pair[1]].activation_bytes for pair in held)
        if static + full <= budget_bytes or not full:
            continue
        room = budget_bytes - static - inputs - working
        if room < 0:
            need = static + inputs + working
            raise MeshwrightError(
                f"worker {worker} needs {need:.6g} bytes even with full recompute, the budget is {budget_bytes:.6g}",
                fix="more workers, a smaller microbatch or a larger budget",
            )
        drop = 1.0 - min(1.0, room / full)
        for _, stage in held:
            count = layers[stage] if layers else 0
            shares[stage] = max(shares[stage], -(-drop * count // 1) / count if count else drop)
    return tuple(Recompute(share, early=False) for share in shares)


def live_microbatches(schedule: Schedule) -> list[dict[tuple[int, int], int]]:
    """For each worker and (replica, stage) the largest number of microbatches between forward and backward at once."""
    peaks: list[dict[tuple[int, int], int]] = []
    for entries, held in zip(schedule.lists, schedule.placement.held, strict=True):
        now, peak = dict.fromkeys(held, 0), dict.fromkeys(held, 0)
        ends = Op.W if any(action.op is Op.W for action in walk(entries)) else Op.B
        for action in walk(entries):
            pair = action.replica, action.stage
            if action.op is Op.F and not _second(action):
                now[pair] += 1
                peak[pair] = max(peak[pair], now[pair])
            elif action.op in (Op.B, ends) and (action.part < 0 or _second(action)):
                now[pair] -= 1
        peaks.append(peak)
    return peaks


def _second(action: Action) -> bool:
    return action.part > 0
