"""The `stages` of a plan file describe what `parallel` runs. If they contradict it, one of the two was changed by hand.

The cuts must be those of `parallel.stages`, and the devices those of `parallel.ranks`. Without the lists of a schedule only the
first stage of each worker is compared: all schedules give stage k to worker k there, or to several workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.input_limits import shown
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.plan.unset_values import Unset

RECOMPUTES = ("none", "inline", "early")
FIX = "change 'parallel' and 'stages' together, or leave 'stages' out"


def refuse_other_stages(stages: Sequence[Mapping[str, Any]], parallel: Parallel) -> None:
    """Raises if the stages of a plan file are not those that its `parallel` runs."""
    layers = [stage["layers"] for stage in stages]
    if not layers:
        return
    if layers[0][0] != 0:
        raise MeshwrightError(f"the first stage of a plan file begins with layer {layers[0][0]}, not with layer 0", fix=FIX)
    for (_, last), (first, _) in pairwise(layers):
        if first != last + 1:
            raise MeshwrightError(
                f"a stage of a plan file ends with layer {last}, and the next one begins with layer {first}", fix=FIX
            )
    starts, cuts = [first for first, _ in layers[1:]], list(parallel.stages)
    if starts != cuts and not any(isinstance(cut, str) for cut in cuts):
        raise MeshwrightError(
            f"the stages of a plan file begin with the layers {shown(starts)}, but its 'parallel' has stages {shown(cuts)}",
            fix=FIX,
        )
    _refuse_recompute(stages, parallel)
    if not isinstance(parallel.pp, Unset):
        _refuse_devices(stages, parallel)


def _refuse_recompute(stages: Sequence[Mapping[str, Any]], parallel: Parallel) -> None:
    mode = parallel.recompute
    if isinstance(mode, float) or (isinstance(mode, str) and mode not in RECOMPUTES) or parallel.order is not None:
        return  # budgets are settled where costs are known
    again: list[bool | None] = [mode in ("inline", "early")] * len(stages)
    if not isinstance(mode, str | None):
        again = [share > 0 for share in mode] if len(mode) == len(stages) else [None] * len(stages)
    if mode is None and len(parallel.costs) == len(stages):  # a schedule may place its own recompute; costs say where
        again = [cost.recompute_s > 0 if cost.forward_s else None for cost in parallel.costs]
    for number, (stage, recomputes) in enumerate(zip(stages, again, strict=True)):
        if recomputes is not None and bool(stage.get("recompute", recomputes)) != recomputes:
            raise MeshwrightError(
                f"stage {number} of a plan file recomputes a share of {stage['recompute']:g}, but its 'parallel' has recompute "
                f"{mode!r}" + (f" and {parallel.costs[number].recompute_s:g} s for it" if parallel.costs else ""),
                fix=FIX,
            )


def _refuse_devices(stages: Sequence[Mapping[str, Any]], parallel: Parallel) -> None:
    ranks = parallel.ranks or tuple(range(parallel.processes))
    named = {device for stage in stages for device in stage["devices"]}
    if named != set(ranks):
        raise MeshwrightError(
            f"the stages of a plan file run on the devices {shown(sorted(named))}, but its ranks are {shown(sorted(ranks))}",
            fix=FIX,
        )
    homes = homes_of(parallel, ranks)
    for number, stage in enumerate(stages):
        devices = set(stage["devices"])
        if any(devices & home and not home <= devices for home in homes):
            raise MeshwrightError(
                f"stage {number} of a plan file runs on the devices {shown(sorted(devices))}, which are not whole workers of its "
                f"ranks {shown(list(ranks))}",
                fix=FIX,
            )
        if number < len(homes) and len(devices) == len(homes[number]) and devices != homes[number]:
            raise MeshwrightError(
                f"stage {number} of a plan file runs on the devices {shown(sorted(devices))}, but by its ranks on "
                f"{shown(sorted(homes[number]))}",
                fix=FIX,
            )


def homes_of(parallel: Parallel, ranks: Sequence[int]) -> list[set[int]]:
    """Returns the devices of each worker, or of each team of workers that shares a stage, in all data-parallel copies."""
    teams = list(accumulate(parallel.width or (1,) * parallel.workers, initial=0))
    size = parallel.workers * parallel.tp
    return [
        {
            ranks[copy * size + place]
            for copy in range(parallel.copies)
            for place in range(first * parallel.tp, last * parallel.tp)
        }
        for first, last in pairwise(teams)
    ]
