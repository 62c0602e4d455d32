"""Requests that contradict each other, the cluster or the model: refused before a search, with the numbers."""

from __future__ import annotations

from math import gcd

from meshwright.errors import MeshwrightError
from meshwright.planners._limits import MOST_MICROBATCHES, Asked, PlanLimits, SplitRows
from meshwright.planners._search.families import FAMILIES, families
from meshwright.planners._search.problem import Problem


def refuse_contradictions(planner: str, asked: Asked) -> None:
    """Raises if no plan can be what was asked for, whatever the memory."""
    limits, devices, layers = asked.limits, asked.cluster.size, len(asked.profile.layers)
    if limits.pp is not None and limits.pp > layers:
        most = max(1, min(layers, devices // (limits.dp or 1)))
        raise MeshwrightError(
            f"a pipeline of {limits.pp} workers needs as many layers, the model has {layers}", fix=f"--pp {most}"
        )
    refuse_requests(planner, limits, devices, microbatches=asked.microbatches, batch=asked.batch)
    _refuse_long_batch(asked)


def refuse_requests(planner: str, limits: PlanLimits, devices: int, *, microbatches: int | None, batch: int | None) -> None:
    """Raises if a request contradicts itself or the number of devices, whatever the model."""
    if planner == "spp":
        _refuse_of_spp(limits)
    if (microbatches or 0) > MOST_MICROBATCHES:
        raise MeshwrightError(
            f"a step of {microbatches} microbatches is too long to simulate: at most {MOST_MICROBATCHES}",
            fix="fewer and larger microbatches",
        )
    if limits.schedule is not None and not families(limits.schedule):
        raise MeshwrightError(
            f"{limits.schedule} is not planned: it trains with delayed parameters",
            fix=", ".join(sorted({family.schedule for family in FAMILIES})),
        )
    needed = (limits.pp or 1) * (limits.dp or 1)
    if needed > devices:
        flags = " x ".join(f"{name} {n}" for name, n in (("pp", limits.pp), ("dp", limits.dp)) if n)
        fix = _fewer(limits, devices, batch)
        raise MeshwrightError(f"{flags} needs {needed} devices, the cluster has {devices}", fix=fix)
    if batch is not None:
        _refuse_cut(batch, limits)
        return
    if limits.split_rows is not SplitRows.IGNORE and limits.rows is None:
        raise MeshwrightError(
            f"--split-rows {limits.split_rows} looks at the rows of a microbatch, which are not known", fix="--rows 4"
        )
    if limits.dp is not None and not limits.allows(limits.dp, limits.rows):
        raise MeshwrightError(
            f"{limits.dp} copies cannot share the {limits.rows} rows of a microbatch (--split-rows {limits.split_rows})",
            fix=f"--rows {limits.dp}",
        )


def _refuse_cut(batch: int, limits: PlanLimits) -> None:
    """Raises if a batch cannot be divided among the copies, or into the microbatches, that were asked for."""
    if limits.dp is not None and batch % limits.dp:
        up = -(-batch // limits.dp) * limits.dp
        raise MeshwrightError(f"{batch} rows cannot be shared equally by {limits.dp} copies", fix=f"--batch {up}")
    if limits.rows is not None and batch % limits.rows:
        raise MeshwrightError(
            f"{batch} rows cannot be cut into microbatches of {limits.rows}",
            fix=f"--batch {-(-batch // limits.rows) * limits.rows}",
        )
    copies, rows = limits.dp or 1, limits.rows or 1
    if batch % (copies * rows):
        raise MeshwrightError(
            f"{batch // copies} rows of each of {copies} copies cannot be cut into microbatches of {rows}",
            fix=f"--batch {-(-batch // (copies * rows)) * copies * rows}, or --rows {gcd(batch // copies, rows)}",
        )


def _refuse_long_batch(asked: Asked) -> None:
    """Raises if a batch has too many microbatches, however its rows are divided."""
    if asked.batch is None or not asked.profile.rows:
        return
    limits = asked.limits
    copies, rows = limits.dp or max(1, asked.cluster.size // (limits.pp or 1)), limits.rows or asked.profile.rows[-1]
    if asked.batch > (most := MOST_MICROBATCHES * rows * copies):
        raise MeshwrightError(
            f"a step of {asked.batch} rows is too long to simulate: with {copies} copies and microbatches of {rows} rows it has "
            f"{-(-asked.batch // (rows * copies))} of them, at most {MOST_MICROBATCHES} are possible",
            fix=f"--batch {most}, or microbatches of more rows",
        )


def _refuse_of_spp(limits: PlanLimits) -> None:
    other = limits.schedule if limits.schedule not in (None, "listed") else None
    for flag, value in (("--schedule", other), ("--dp", limits.dp), ("--pp", limits.pp)):
        if value is not None:
            raise MeshwrightError(
                f"spp chooses stages and replicas itself and runs them by `listed`: it takes no {flag} {value}",
                fix="--planner search",
            )


def _fewer(limits: PlanLimits, devices: int, batch: int | None) -> str:
    """Returns a flag that fits on the devices."""
    if limits.dp is not None and (limits.pp or 1) <= devices:
        most = devices // (limits.pp or 1)
        return f"--dp {next(n for n in range(most, 0, -1) if (batch or 0) % n == 0)}"
    return f"--pp {devices}"


def nothing_runs(problem: Problem) -> MeshwrightError:
    """The error if not one plan could be enumerated: a schedule that does not run with the workers or microbatches asked for."""
    limits = problem.limits
    if problem.batch is not None and not any(problem.splits(dp) for dp in range(1, problem.devices + 1)):
        return no_split(problem)
    size = f"{problem.batch} rows" if problem.batch is not None else f"{problem.microbatches} microbatches"
    given = [f"pp {limits.pp}" if limits.pp else "", f"dp {limits.dp}" if limits.dp else "", size]
    given += [f"microbatches of {limits.rows} rows" if problem.batch is not None and limits.rows else ""]
    does = f"{limits.schedule} does not run" if limits.schedule else "no schedule runs"
    possible = [pp for pp in range(1, problem.devices // (limits.dp or 1) + 1) if _runs(problem, pp)]
    fix = " or ".join(f"--pp {pp}" for pp in possible[-2:]) or "another --schedule, or another batch"
    return MeshwrightError(f"{does} with {', '.join(filter(None, given))} on {problem.devices} devices", fix=fix)


def no_split(problem: Problem) -> MeshwrightError:
    """The error for a batch that only microbatches of few rows divide, so that there are too many of them."""
    batch, unit = problem.batch or 0, (problem.limits.rows or problem.profile.rows[-1]) * problem.devices
    return MeshwrightError(
        f"{batch} rows cannot be cut into at most {MOST_MICROBATCHES} equal microbatches for each copy",
        fix=f"--batch {max(1, batch // unit) * unit}",
    )


def _runs(problem: Problem, pp: int) -> bool:
    """Returns whether the requested schedule runs with `pp` workers and some number of copies."""
    copies = [problem.limits.dp] if problem.limits.dp else range(1, problem.devices // pp + 1)
    counts = {count for dp in copies for _, _, count in problem.splits(dp)}
    return any(
        family.fits(pp, count) and pp * family.chunks <= problem.layers
        for family in families(problem.limits.schedule)
        for count in counts
    )
