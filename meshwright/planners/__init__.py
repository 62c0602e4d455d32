"""Each file here is a planner; its file name is what users type. `plan` finds it and calls it.

A planner file has one function `plan(*, profile, cluster, microbatches, batch, limits) -> Iterator[Plan]`. It yields at least one
plan, and each is better than the one before.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.ir.analysis.order import no_collection
from meshwright.ir.cluster import Cluster
from meshwright.ir.plan.chosen_plan import Plan
from meshwright.ir.profile import Profile
from meshwright.planners._limits import Asked, NothingFitsError, PlanLimits, Refusal, SplitRows
from meshwright.schedules import names as schedule_names

__all__ = ["NothingFitsError", "PlanLimits", "SplitRows", "names", "plan"]


def names() -> list[str]:
    """The names of all planners.

    Returns:
        The names, sorted. Each is a file in `meshwright/planners/`.

    Examples:
        >>> from meshwright import planners
        >>> planners.names()
        ['even', 'search', 'spp']
    """
    return sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_"))


def plan(
    profile: Profile,
    cluster: Cluster,
    *,
    microbatches: int | None = None,
    batch: int | None = None,
    planner: str = "spp",
    rows: int | None = None,
    split_rows: SplitRows | str | None = None,
    memory_free: bool = False,
    schedule: str | None = None,
    pp: int | None = None,
    dp: int | None = None,
    tensor: bool = True,
    zero: bool = True,
    seconds: float = float("inf"),
    explain: bool | float = False,
    refusal: Refusal | None = None,
    progress: Callable[[float, str], None] | None = None,
) -> Plan:
    """Choose stages, replicas and devices for a model on a cluster; `search` also chooses schedule, degrees and memory modes.

    Args:
        profile: What each layer costs.
        cluster: The devices and their links.
        microbatches: Microbatches of one step.
        batch: Rows of one step, instead of `microbatches`; the rows of a microbatch are then chosen. The profile must have rows.
        planner: Which planner chooses: `even`, `spp` or `search`.
        rows: Rows of one microbatch; with `batch` only plans with such microbatches are tried.
        split_rows: `even`, `uneven` (the default) or `ignore` (the default for profiles without rows).
        memory_free: Ignore the memory of the devices.
        schedule: Only this schedule.
        pp: Only pipelines with this number of workers.
        dp: Only plans with this number of data-parallel copies.
        tensor: Whether ranks may share the tensors of a layer.
        zero: Whether copies may divide optimizer state, gradients or parameters among them.
        seconds: End the search after this time, with the best plan so far.
        explain: Also find out when another plan would be better (`Plan.flips`). A number limits this to that many seconds.
        refusal: Called with the keywords of a chosen plan and the rows of its microbatches; returns why the model cannot run it.
        progress: Called during a search with the share of its work that is done, and with what it has found in words.

    Returns:
        The plan.

    Raises:
        MeshwrightError: There is no such planner, the cluster does not say which devices it has, a size is not possible, or
            nothing fits; or the profile has the times of a device that the cluster does not have, or another precision.

    Examples:
        >>> import meshwright as mw
        >>> layers = tuple(mw.LayerCost(f"block {n}", (1.0,), (1.0,), (1.0,), output_bytes=1e6) for n in range(4))
        >>> cluster = mw.Cluster(bandwidths=((0.0, 1e9), (1e9, 0.0)), devices=(mw.Device(), mw.Device()))
        >>> mw.plan(mw.Profile(layers), cluster, microbatches=4).widths
        (2,)
    """
    sizes = {"microbatches": microbatches, "batch": batch, "pp": pp, "dp": dp, "rows": rows}
    refuse_values(planner, cluster, sizes, schedule=schedule, split_rows=split_rows, seconds=seconds)
    if profile.rows:
        _refuse_no_rows(rows, batch)
    chosen = SplitRows(split_rows or (SplitRows.UNEVEN if profile.rows else SplitRows.IGNORE))
    limits = PlanLimits(rows, chosen, memory_free, schedule, pp, dp, tensor, zero, seconds, refusal, progress)
    try:
        module = importlib.import_module(f"{__name__}.{planner}")
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise MeshwrightError("planning needs numpy, which is not installed", fix="pip install 'meshwright[fast]'") from error
    from meshwright.planners._flip_points import with_flips
    from meshwright.planners._nearest_fit import answered, with_nearest_fit
    from meshwright.planners._profile_fit import profile_notes, refuse_other_device

    refuse_other_device(profile, cluster)
    asked = Asked(profile, cluster, microbatches, batch, limits)
    start = perf_counter()
    try:
        with no_collection():
            best = answered(module.plan, asked)
    except NothingFitsError as error:
        search = importlib.import_module(f"{__name__}.search")
        raise with_nearest_fit(error, module.plan, search.plan, asked) from None
    best = replace(best, planning_s=perf_counter() - start, notes=(*best.notes, *profile_notes(asked)))
    asked = replace(asked, limits=replace(limits, progress=None))
    return with_flips(module.plan, best, asked, float("inf") if explain is True else explain) if explain else best


def refuse_for_any_model(
    planner: str,
    cluster: Cluster,
    *,
    microbatches: int | None,
    batch: int | None,
    rows: int | None,
    split_rows: SplitRows | str | None,
    schedule: str | None,
    pp: int | None,
    dp: int | None,
    seconds: float,
) -> None:
    """Raises what `plan` raises for every model whose profile has rows, so that none is profiled for nothing."""
    from meshwright.planners._refused_requests import refuse_requests

    sizes = {"microbatches": microbatches, "batch": batch, "pp": pp, "dp": dp, "rows": rows}
    refuse_values(planner, cluster, sizes, schedule=schedule, split_rows=split_rows, seconds=seconds)
    _refuse_no_rows(rows, batch)
    limits = PlanLimits(rows, SplitRows(split_rows or SplitRows.UNEVEN), schedule=schedule, pp=pp, dp=dp)
    refuse_requests(planner, limits, cluster.size, microbatches=microbatches, batch=batch)


def _refuse_no_rows(rows: int | None, batch: int | None) -> None:
    if rows is None and batch is None:
        raise MeshwrightError(
            "this profile knows its rows, so a plan needs the rows of a microbatch", fix="--rows 8, or --batch 64"
        )


def refuse_values(
    planner: str,
    cluster: Cluster,
    sizes: Mapping[str, int | None],
    *,
    schedule: str | None,
    split_rows: str | None,
    seconds: float,
) -> None:
    """Raises if a single value is not possible, or if there are no devices."""
    if planner not in names():
        raise MeshwrightError(f"there is no planner '{planner}'{did_you_mean(planner, names())}", fix=", ".join(names()))
    for what, count in sizes.items():
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise MeshwrightError(
                f"{what} must be a whole number of at least 1, got {count!r}", fix=f"--{what} {1 if what in ('pp', 'dp') else 16}"
            )
    if (sizes["microbatches"] is None) == (sizes["batch"] is None):
        raise MeshwrightError("a plan needs either a number of microbatches or a batch", fix="--microbatches 16, or --batch 64")
    if schedule is not None and schedule not in schedule_names():
        raise MeshwrightError(
            f"there is no schedule '{schedule}'{did_you_mean(schedule, schedule_names())}", fix=", ".join(schedule_names())
        )
    if split_rows is not None and split_rows not in set(SplitRows):
        raise MeshwrightError(f"split_rows is one of {', '.join(SplitRows)}, got {split_rows!r}", fix="--split-rows uneven")
    if not seconds >= 0:
        raise MeshwrightError(f"a search cannot take {seconds} seconds", fix="--seconds 5")
    if cluster.size < 1:
        raise MeshwrightError(
            "this cluster has links but no devices", fix="a TOML file with [[nodes]], or a matrix of bandwidths"
        )
