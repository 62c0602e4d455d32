"""`compare --profile`: costs of stages from a profile, for each schedule cut into as many stages as it has, evenly by time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import isfinite
from pathlib import Path

from meshwright.cli._parts import cost_flags
from meshwright.costs.gradient_sums import stage_sums, ties_of
from meshwright.costs.memory.memory_classes import reserve_bytes
from meshwright.costs.stages import stage_costs
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster, Device
from meshwright.ir.input_limits import file_text
from meshwright.ir.partition import partition
from meshwright.ir.plan.chosen_plan import PlanStage
from meshwright.ir.profile import Profile
from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost


@dataclass(frozen=True)
class ProfileCosts(cost_flags.CostFlags):
    """Flags of costs whose stages come from a profile. `file` is the profile."""

    profile: Profile | None = None
    rows: int | None = None

    @property
    def is_profiled(self) -> bool:
        """Stages have the costs of a profile."""
        return True

    def stages(self, schedule: Schedule) -> Sequence[StageCost]:
        """Returns what the stages of a schedule cost. Worker w is device w of the cluster."""
        assert self.profile is not None
        teams = schedule.placement.teams
        layers = [range(a, b) for a, b in itertools.pairwise(_starts(self.profile, self.rows, schedule.stages))]
        machine = _machine(self.cluster, schedule.workers)
        of_replicas = [
            stage_costs(
                self.profile,
                [PlanStage(run.start, run.stop - 1, of_stage[0][:1]) for run, of_stage in zip(layers, replica, strict=True)],
                machine,
                rows=self.rows,
            )
            for replica in teams
        ]
        found = [_slowest(costs) for costs in zip(*of_replicas, strict=True)]
        holders = [sorted({w for copy in teams for team in copy[k] for w in team}) for k in range(schedule.stages)]
        sizes = [cost.parameter_bytes for cost in found]
        sums = stage_sums(ties_of(self.profile), machine, machine, layers, holders, sizes)
        return tuple(
            replace(cost, sync_s=added.sync_s, tied_bytes=added.tied_bytes, tied_s=added.tied_s)
            for cost, added in zip(found, sums, strict=True)
        )

    def links(self, schedule: Schedule) -> Cluster | None:
        """Returns the cluster, whose network cards the messages of this schedule divide among them."""
        if self.cluster is None or not self.cluster.has_cards:
            return self.cluster
        ends = {
            (a, b)
            for replica in schedule.placement.teams
            for here, there in itertools.pairwise(replica)
            for one, other in itertools.product(here, there)
            for a, b in itertools.product(one, other)
            if a != b
        }
        return self.cluster.shared(sorted({*ends, *((b, a) for a, b in ends)}))

    def capacities(self, workers: int) -> tuple[float, ...] | None:
        """Returns the memory of the devices without the reserve; None if none of it is known."""
        devices = self.cluster.devices[:workers] if self.cluster is not None else ()
        if not any(isfinite(device.memory_bytes) for device in devices):
            return None
        return tuple(device.memory_bytes - reserve_bytes(device.memory_bytes) for device in devices)

    def refuse(self, workers: int) -> None:
        """Raises if the cluster has too few devices."""
        _machine(self.cluster, workers)

    def spread(self, schedule: Schedule) -> Sequence[StageCost]:
        """Returns the same: a profile is cut for every number of stages."""
        return self.stages(schedule)


def with_profile(flags: cost_flags.CostFlags, path: Path | None, rows: int | None) -> cost_flags.CostFlags:
    """Returns flags whose costs come from a profile, or these flags if there is none."""
    from meshwright.ir.files.profile_json import profile_from_json
    from meshwright.ir.files.profile_text import profile_from_text
    from meshwright.planners._profile_fit import refuse_other_device

    if path is None:
        if rows is not None:
            raise MeshwrightError("--rows is the size of a microbatch of a profile", fix="--profile profile.json --rows 4")
        return flags
    if flags.file is not None:
        raise MeshwrightError(f"--costs {flags.file} and --profile {path} both give costs", fix="give only one of the two")
    text = file_text(path, "the profile", fix="meshwright profile MODEL -o profile.json")
    profile = profile_from_json(text) if path.suffix == ".json" else profile_from_text(text)
    if profile.rows and (rows is None or rows < 1):
        raise MeshwrightError(f"{path} needs the rows of a microbatch, got {rows}", fix=f"--rows {profile.rows[-1]}")
    if flags.cluster is not None:
        refuse_other_device(profile, flags.cluster)
    given = {field.name: getattr(flags, field.name) for field in fields(flags)}
    return ProfileCosts(**{**given, "file": path}, profile=profile, rows=rows if profile.rows else None)


def _slowest(costs: Sequence[StageCost]) -> StageCost:
    """The cost of a stage that several devices hold, one in each replica: the slowest of them decides."""
    times = {name: max(getattr(cost, name) for cost in costs) for name in ("forward_s", "input_s", "weight_s", "recompute_s")}
    return replace(costs[0], **times)


@lru_cache(maxsize=64)
def _starts(profile: Profile, rows: int | None, stages: int) -> tuple[int, ...]:
    chain = profile.at(rows)
    if len(chain.forward_s) < stages:
        raise MeshwrightError(f"{len(chain.forward_s)} layers of the profile cannot be cut into {stages} stages")
    times = [forward + backward for forward, backward in zip(chain.forward_s, chain.backward_s, strict=True)]
    return partition(times, [int(size) for size in chain.output_bytes], stages)[1]


def _machine(cluster: Cluster | None, workers: int) -> Cluster:
    """Returns the cluster with one device for each worker at least."""
    found = cluster or Cluster()
    if found.size and found.size < workers:
        raise MeshwrightError(f"{workers} workers need {workers} devices, the cluster has {found.size}", fix=f"-w {found.size}")
    return found if found.size else replace(found, devices=(Device(),) * workers)
