"""What a step waits for most, from its timeline: one stage, one link, a sync, the host, or the schedule itself.

stage      the stage's time on the critical path, minus what it would be if the stage were as fast as the mean of the others
link       time that messages between two workers delay the path
sync       time that collectives and updates delay the path
host       gaps that nothing else explains
schedule   the remaining time in which workers do not compute: the pipeline fills and drains
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost
from meshwright.ir.timeline import Timeline
from meshwright.passes.lower import lowered_flow
from meshwright.report.critical_path import CriticalPath, Wait
from meshwright.simulate.event_graph import EventGraph


class What(StrEnum):
    """Kinds of bottlenecks."""

    STAGE = "stage"
    LINK = "link"
    SYNC = "sync"
    HOST = "host"
    SCHEDULE = "schedule"


@dataclass(frozen=True)
class Bottleneck:
    """The largest cost of a step.

    Attributes:
        what: A stage, a link, a sync, the host or the schedule.
        stage: The stage, if it is one.
        workers: The workers of that stage; or the two ends of a link, the source of the longest wait first.
        cost_s: Seconds of the step that it costs.
        step_s: Seconds of the step.
        wait: The longest wait that belongs to it.
        sentence: All of this in words.
    """

    what: What
    stage: int | None
    workers: tuple[int, ...]
    cost_s: float
    step_s: float
    wait: Wait | None
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields, ready for JSON."""
        return {**asdict(self), "what": self.what.value, "wait": None if self.wait is None else self.wait._asdict()}


def bottleneck(schedule: Schedule, costs: Sequence[StageCost], timeline: Timeline) -> Bottleneck:
    """Finds what one step of a lowered schedule waits for most.

    Args:
        schedule: The lowered schedule that ran.
        costs: The measured costs of its stages.
        timeline: One step, measured or predicted; the workers of data-parallel copies follow each other.

    Returns:
        The largest cost, with its seconds and a sentence.

    Raises:
        MeshwrightError: The timeline belongs to another schedule.
    """
    path = CriticalPath(EventGraph(lowered_flow(schedule)), timeline)
    stage_s = [cost.forward_s + cost.backward_s + cost.recompute_s for cost in costs]
    excess = {stage: _excess(stage, stage_s) * seconds for stage, seconds in path.stages.items()}
    slow = max(excess, key=lambda stage: excess[stage], default=0)
    between = {frozenset(pair): path.links[pair] + path.links.get(pair[::-1], 0.0) for pair in path.links}
    link = max(path.links, key=lambda pair: (between[frozenset(pair)], path.links[pair]), default=None)
    busy = sum(timeline.busy_s(worker) for worker in range(timeline.workers)) / timeline.workers
    known = excess.get(slow, 0.0) + sum(path.links.values()) + path.sync_s + path.host_s
    found = {
        What.SCHEDULE: max(0.0, path.step_s - busy - known),
        What.STAGE: excess.get(slow, 0.0),
        What.LINK: between[frozenset(link)] if link is not None else 0.0,
        What.SYNC: path.sync_s,
        What.HOST: path.host_s,
    }
    what = max(found, key=lambda name: found[name])
    workers = _workers(schedule, slow) if what is What.STAGE else link if what is What.LINK and link is not None else ()
    wait = _longest(path.waits, what, workers, schedule.workers)
    words = _words(what, slow, workers, stage_s) + _price(found[what], path.step_s, wait)
    return Bottleneck(what, slow if what is What.STAGE else None, workers, found[what], path.step_s, wait, words)


def _excess(stage: int, seconds: Sequence[float]) -> float:
    """Returns the share of a stage's time that exceeds the mean of the other stages."""
    others = [s for number, s in enumerate(seconds) if number != stage]
    if not others or not seconds[stage]:
        return 0.0
    return max(0.0, 1.0 - sum(others) / len(others) / seconds[stage])


def _workers(schedule: Schedule, stage: int) -> tuple[int, ...]:
    return tuple(sorted({w for replica in schedule.placement.teams for team in replica[stage] for w in team}))


def _longest(waits: Sequence[Wait], what: What, workers: tuple[int, ...], count: int) -> Wait | None:
    """Returns the longest wait that a bottleneck causes, or the longest of all."""
    if what is What.STAGE:
        waits = [wait for wait in waits if wait.source in workers] or waits
    elif what is What.LINK:
        waits = [wait for wait in waits if {wait.source, wait.worker % count} == set(workers)] or waits
    elif what is What.SYNC:
        waits = [wait for wait in waits if wait.source is None] or waits
    return waits[0] if waits else None


def _words(what: What, stage: int, workers: tuple[int, ...], seconds: Sequence[float]) -> str:
    match what:
        case What.STAGE:
            others = [s for number, s in enumerate(seconds) if number != stage]
            where = f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
            mean = sum(others) / len(others)
            return f"stage {stage} on {where} takes {_time(seconds[stage])} per microbatch, the others {_time(mean)} on average"
        case What.LINK:
            return f"messages between workers {workers[0]} and {workers[1]} delay the step, mostly those to worker {workers[1]}"
        case What.SYNC:
            return "workers wait while gradients are summed and weights are updated"
        case What.HOST:
            return "workers are between actions, neither computing nor waiting for another (data, Python, the host's scheduler)"
        case What.SCHEDULE:
            return "workers are idle while the pipeline fills and drains, and no stage or link costs more than that"


def _price(cost_s: float, step_s: float, wait: Wait | None) -> str:
    text = f"; that costs {_time(cost_s)} of the {_time(step_s)} of a step"
    if wait is None:
        return text
    source = "" if wait.source is None else f" from worker {wait.source}"
    return f"{text}. The longest wait: worker {wait.worker}, {_time(wait.seconds)} per step for {wait.kind}{source}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
