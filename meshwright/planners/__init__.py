"""Each file here is a planner; its file name is what users type. `plan` finds it and calls it.

A planner file has one function `plan(*, profile, cluster, microbatches, limits) -> Iterator[Plan]`. It yields at least one plan,
and each is better than the one before.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from time import perf_counter

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.ir.cluster import Cluster
from meshwright.ir.layer_costs import Profile
from meshwright.ir.plan.chosen_plan import Plan
from meshwright.planners._limits import PlanLimits, SplitRows

__all__ = ["PlanLimits", "SplitRows", "names", "plan"]


def names() -> list[str]:
    """The names of all planners.

    Returns:
        The names, sorted. Each is a file in `meshwright/planners/`.

    Examples:
        >>> from meshwright import planners
        >>> planners.names()
        ['spp']
    """
    return sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_"))


def plan(
    profile: Profile,
    cluster: Cluster,
    *,
    microbatches: int,
    planner: str = "spp",
    rows: int | None = None,
    split_rows: SplitRows | str | None = None,
) -> Plan:
    """Choose stages, replicas and devices for a model on a cluster.

    Args:
        profile: What each layer costs.
        cluster: The devices and their links.
        microbatches: Microbatches of one step.
        planner: Which planner chooses.
        rows: Rows of one microbatch, for a profile that knows its rows.
        split_rows: `even`, `uneven` (the default) or `ignore` (the default for profiles without rows).

    Returns:
        The plan.

    Raises:
        MeshwrightError: There is no such planner, the cluster does not say which devices it has, or a size is not possible.

    Examples:
        >>> import meshwright as mw
        >>> layers = tuple(mw.LayerCost(f"block {n}", (1.0,), (1.0,), (1.0,), output_bytes=1e6) for n in range(4))
        >>> cluster = mw.Cluster(bandwidths=((0.0, 1e9), (1e9, 0.0)), devices=(mw.Device(), mw.Device()))
        >>> mw.plan(mw.Profile(layers), cluster, microbatches=4).widths
        (2,)
    """
    if planner not in names():
        raise MeshwrightError(f"there is no planner '{planner}'{did_you_mean(planner, names())}", fix=", ".join(names()))
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise MeshwrightError(f"microbatches must be a whole number of at least 1, got {microbatches!r}", fix="microbatches=16")
    if cluster.size < 1:
        raise MeshwrightError(
            "this cluster has links but no devices", fix="a TOML file with [[nodes]], or a matrix of bandwidths"
        )
    if profile.rows and rows is None:
        raise MeshwrightError("this profile knows its rows, so a plan needs the rows of a microbatch", fix="rows=8")
    chosen = SplitRows.UNEVEN if split_rows is None and profile.rows else SplitRows(split_rows or SplitRows.IGNORE)
    limits = PlanLimits(rows if profile.rows else None, chosen)
    try:
        module = importlib.import_module(f"{__name__}.{planner}")
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise MeshwrightError("planning needs numpy, which is not installed", fix="pip install 'meshwright[fast]'") from error
    start = perf_counter()
    best: Plan
    *_, best = module.plan(profile=profile, cluster=cluster, microbatches=microbatches, limits=limits)
    return replace(best, planning_s=perf_counter() - start)
