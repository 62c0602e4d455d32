"""The result of a measured run: its lowered schedule, the costs of its stages, and the timeline of one step.

    {"schema": 1, "kind": "measurement", "steps": [3, 6], "schedule": {...}, "costs": {...}, "timeline": {...}}

The parts have the same form as the files that other verbs read: a schedule, a cost file and a timeline.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.files.schedule_json import schedule_from_json, schedule_to_json
from meshwright.ir.reader import Reader, parsed, positive, rows
from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost, costs_from_json, costs_to_json
from meshwright.ir.timeline import Timeline

SCHEMA = 1
FILE = "measurement.json"
"""The name of the measurement file in the output folder of a run."""

_KEYS = frozenset(["schema", "kind", "steps", "schedule", "costs", "timeline"])


@dataclass(frozen=True)
class Measurement:
    """The result of a measured run. `meshwright.measure` returns one.

    Attributes:
        schedule: The lowered schedule that ran.
        costs: For each stage its seconds and bytes for one microbatch, the mean over traced steps.
        timeline: The last traced step. Worker w of copy j is worker w + schedule.workers * j.
        steps: The first and the last traced step of the run, counted from 1.

    Examples:
        >>> import meshwright as mw
        >>> schedule, costs = mw.schedules.build("gpipe", workers=2, microbatches=2), mw.even_costs(stages=2, workers=2)
        >>> found = mw.Measurement(mw.lower(schedule), costs, mw.simulate(schedule, costs), steps=(3, 6))
        >>> found.copies, found.timeline.makespan_s
        (1, 9.0)
    """

    schedule: Schedule
    costs: tuple[StageCost, ...]
    timeline: Timeline
    steps: tuple[int, int] = (1, 1)

    @property
    def copies(self) -> int:
        """The number of data-parallel copies of the pipeline (dp)."""
        return self.timeline.workers // self.schedule.workers


def measurement_to_json(found: Measurement) -> str:
    """Write a measurement.

    Args:
        found: The measurement.

    Returns:
        JSON text, from which `measurement_from_json` makes an equal measurement.

    Examples:
        >>> import meshwright as mw
        >>> schedule, costs = mw.schedules.build("gpipe", workers=2, microbatches=2), mw.even_costs(stages=2, workers=2)
        >>> found = mw.Measurement(mw.lower(schedule), costs, mw.simulate(schedule, costs))
        >>> mw.measurement_from_json(mw.measurement_to_json(found)) == found
        True
    """
    return json.dumps(
        {
            "schema": SCHEMA,
            "kind": "measurement",
            "steps": found.steps,
            "schedule": json.loads(schedule_to_json(found.schedule)),
            "costs": json.loads(costs_to_json(found.costs)),
            "timeline": json.loads(found.timeline.to_json()),
        }
    )


def measurement_from_json(text: str) -> Measurement:
    """Read a measurement, for example `measurement.json` in the output folder of a traced run.

    Args:
        text: The JSON text.

    Returns:
        The measurement.

    Raises:
        MeshwrightError: The text is not a measurement, or its parts do not fit each other.

    Examples:
        ```python
        found = meshwright.measurement_from_json(Path("out/measurement.json").read_text())
        predicted = meshwright.simulate(found.schedule, found.costs)
        ```
    """
    read = Reader(parsed(text, "a measurement"), "a measurement", kind="measurement", schema=SCHEMA, keys=_KEYS)
    schedule: Schedule = read("schedule", _part(schedule_from_json))
    costs: tuple[StageCost, ...] = read("costs", _part(costs_from_json))
    timeline: Timeline = read("timeline", _part(Timeline.from_json))
    if len(costs) != schedule.stages or timeline.workers % schedule.workers:
        raise MeshwrightError(
            f"a measurement of {schedule.stages} stages and {schedule.workers} workers has costs for {len(costs)} stages and a "
            f"timeline of {timeline.workers} workers",
            fix="use the file as it was written",
        )
    return Measurement(schedule, costs, timeline, read("steps", _steps))


def _part(convert: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Converts a part that is also a file format of its own."""
    return lambda value: convert(json.dumps(value))


def _steps(value: Any) -> tuple[int, int]:
    first, last = map(positive, rows(value))
    if last < first:
        raise MeshwrightError(f"steps {first} to {last} are an empty range")
    return first, last
