"""A timeline as a Chrome trace, for ui.perfetto.dev: a process per worker, a thread per lane, arrows for messages.

A prediction and a measurement of one run go into one file as two processes, with a thread per worker and lane.
"""

from __future__ import annotations

import json
from typing import Any

from meshwright.ir.action import Transfer
from meshwright.ir.timeline import Lane, Timeline

MICRO = 1e6


def to_perfetto(timeline: Timeline) -> str:
    """Returns trace events in microseconds, with counters for what each worker holds."""
    events: list[dict[str, Any]] = []
    lanes = list(Lane)
    for worker in range(timeline.workers):
        events.append({"ph": "M", "pid": worker, "name": "process_name", "args": {"name": f"worker {worker}"}})
        for number, lane in enumerate(lanes):
            events.append({"ph": "M", "pid": worker, "tid": number, "name": "thread_name", "args": {"name": lane.value}})
    flows: dict[object, int] = {}
    for span in timeline.spans:
        place = {"pid": span.worker, "tid": lanes.index(span.lane), "ts": span.start_s * MICRO}
        length = (span.end_s - span.start_s) * MICRO
        events.append({"ph": "X", "name": str(span.entry), "cat": span.lane.value, "dur": length, **place})
        if isinstance(span.entry, Transfer):
            ends = (span.worker, span.entry.peer) if span.entry.sends else (span.entry.peer, span.worker)
            number = flows.setdefault((span.entry.value, ends), len(flows))
            phase = {"ph": "s"} if span.entry.sends else {"ph": "f", "bp": "e"}
            events.append({**phase, "id": number, "name": "message", "cat": "message", **place})
    for worker, levels in enumerate(timeline.memory):
        for level in levels:
            for name, held in (("activations", level.activations), ("bytes", level.bytes)):
                events.append({"ph": "C", "pid": worker, "name": name, "ts": level.time_s * MICRO, "args": {name: held}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def both_to_perfetto(predicted: Timeline, measured: Timeline) -> str:
    """Returns two timelines in one trace; workers have the same order in both."""
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate((("predicted", predicted), ("measured", measured))):
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        for worker in range(timeline.workers):
            for lane in Lane:
                title = f"worker {worker} {lane.value}"
                events.append(
                    {"ph": "M", "pid": process, "tid": _thread(worker, lane), "name": "thread_name", "args": {"name": title}}
                )
        for span in timeline.spans:
            place = {"pid": process, "tid": _thread(span.worker, span.lane), "ts": span.start_s * MICRO}
            length = (span.end_s - span.start_s) * MICRO
            events.append({"ph": "X", "name": str(span.entry), "cat": span.lane.value, "dur": length, **place})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _thread(worker: int, lane: Lane) -> int:
    return worker * len(Lane) + list(Lane).index(lane)
