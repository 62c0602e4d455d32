"""`simulate plan.json`: the schedule of a plan file as it will be trained, its costs and links, and its prediction."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cli._parts import cost_flags, outputs
from meshwright.costs.memory.memory_classes import reserve_bytes
from meshwright.costs.placed_plan import placed_costs, placed_links
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.input_limits import shown
from meshwright.ir.links.machines import same_kind
from meshwright.ir.plan.plan_stages import homes_of
from meshwright.ir.plan.planned_file import PlannedFile, cluster_input, is_plan_file, planned_file
from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost, rows_for
from meshwright.ir.timeline import Timeline
from meshwright.train.setup.build_schedule import lists_for
from meshwright.train.setup.settled_plan import settled


@dataclass(frozen=True)
class PlannedRun:
    """The simulation that a plan file describes: the lists that training runs, with costs and links of the plan's workers."""

    file: PlannedFile
    schedule: Schedule
    costs: Sequence[StageCost]
    cluster: Cluster
    notes: tuple[str, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the workers of the first data-parallel copy, as emulated devices have them."""
        return workers_of(self.file)

    def summary(self, timeline: Timeline) -> dict[str, Any]:
        """Returns what `--json` adds."""
        plan = self.file.parallel
        return {
            "plan": {
                "predicted": self.file.predicted or {},
                "made_for": self.file.made_for or {},
                "ranks": list(plan.ranks),
                "ratio_to_predicted": self._ratio(timeline),
                "notes": list(self.notes),
            }
        }

    def text(self, timeline: Timeline) -> str:
        """Returns lines for the terminal: predicted in the file, and simulated here."""
        plan, step = self.file.parallel, (self.file.predicted or {}).get("step_s")
        lines = [f"plan: {', '.join(plan.degrees)}, {plan.microbatches} microbatches"]
        if plan.ranks:
            idle = sorted(set(range(plan.started)) - set(plan.ranks))
            lines[0] += f", ranks {', '.join(map(str, plan.ranks))}" + (f" (idle: {', '.join(map(str, idle))})" if idle else "")
        if step is not None:
            ratio = self._ratio(timeline)
            more = "" if ratio is None else f"   ratio {ratio:.4f}"
            lines.append(f"plan: predicted {step:.6g} s   simulated here {self._step_s(timeline):.6g} s{more}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _step_s(self, timeline: Timeline) -> float:
        """The simulated lists, and the updates that the plan predicts: updates take no time in a simulation."""
        return timeline.makespan_s + float((self.file.predicted or {}).get("update_s", 0.0))

    def _ratio(self, timeline: Timeline) -> float | None:
        step = (self.file.predicted or {}).get("step_s")
        return self._step_s(timeline) / step if step else None


def workers_of(file: PlannedFile) -> tuple[int, ...]:
    """Returns the rank of each worker of the first data-parallel copy; of a tensor-parallel one, its first rank."""
    plan = file.parallel
    return plan.ranks[: plan.workers * plan.tp : plan.tp]


def _memory_notes(file: PlannedFile, cluster: Cluster) -> list[str]:
    """Says which workers of a plan need more memory than the devices of this cluster have."""
    plan, notes = file.parallel, list[str]()
    needs = (file.predicted or {}).get("needed_bytes") or ()
    homes = homes_of(plan, plan.ranks or tuple(range(plan.processes))) if cluster.devices and needs else []
    for worker, (need, home) in enumerate(zip(needs, homes, strict=False)):
        least = min((cluster.devices[device].memory_bytes for device in home if device < cluster.size), default=float("inf"))
        if need + reserve_bytes(least) > least:
            notes.append(
                f"worker {worker} needs {need / 1e9:.4g} GB and a reserve, a device of this cluster has {least / 1e9:.4g} GB"
            )
    return notes


def planned_run(name: str, *, flags: cost_flags.CostFlags, refused: Sequence[str]) -> PlannedRun | None:
    """Returns what a plan file asks to simulate; None if the name is something else, for example a schedule.

    `refused` are flags that were given, but are decided by the plan.
    """
    path = Path(name)
    if path.suffix != ".json" or not os.path.isfile(path) or not is_plan_file(outputs.read(path)):
        return None
    if refused:
        raise MeshwrightError(f"{name} is a plan, which decides {' and '.join(refused)}", fix=f"leave out {refused[0]}")
    file = planned_file(path)
    plan = settled(file.parallel)
    if plan.costs and (times := flags.given(cost_flags.STAGE_TIMES)):
        raise MeshwrightError(
            f"{name} has the costs of its stages, which replace {' and '.join(times)}",
            fix=f"leave out {times[0]}, or --costs FILE",
        )
    schedule = lists_for(plan, steps=1)
    notes = [f"its prediction and its costs are those of another plan: {change}" for change in file.changes({})]
    if plan.costs and flags.file is None:
        costs: Sequence[StageCost] = rows_for(plan.costs, schedule.stages)
    else:
        costs = flags.stages(schedule)
        notes.append(
            "the plan has no costs, so those of the flags are used" if flags.file is None else f"costs from {flags.file}"
        )
    cluster = flags.cluster or Cluster()
    if flags.cluster_file is not None:
        now = {"cluster": cluster_input(cluster)}
        notes += [f"priced again: {change}" for change in file.changes(now) if change.startswith("cluster")]
        notes += _memory_notes(file, cluster)
        costs = placed_costs(plan, schedule, costs, cluster) if plan.costs and flags.file is None else costs
        named = [device.kind for device in cluster.devices if device.kind]
        if file.device and named and not any(same_kind(file.device, kind) for kind in named):
            notes.append(f"layers take the times of {file.device}: the plan has no others, and only links are priced again")
        cluster = placed_links(plan, schedule, cluster)
    elif cluster.free and schedule.workers > 1:
        notes.append("messages take no time here: --cluster says which links the plan was made for")
    if len(costs) != schedule.stages:
        raise MeshwrightError(f"{shown(name)} has {schedule.stages} stages, but {len(costs)} rows of costs")
    return PlannedRun(file, schedule, costs, cluster, tuple(notes))
