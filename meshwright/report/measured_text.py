"""A measurement as text or JSON: predicted against measured, the bottleneck in one sentence, costs in seconds and bytes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from meshwright.ir.files.measurement import Measurement
from meshwright.ir.timeline import Timeline
from meshwright.report.bottleneck import bottleneck
from meshwright.report.comparison import versus, versus_text
from meshwright.report.progress import size_text
from meshwright.simulate import simulate


def prediction(found: Measurement) -> Timeline:
    """Simulates the measured costs. The model gives every worker its own device; messages and syncs are free."""
    return simulate(found.schedule, found.costs)


def measured_text(found: Measurement) -> str:
    """Returns predicted against measured, a line per stage, and the bottleneck."""
    first, last = found.steps
    lines = [
        f"{found.schedule.name}  {found.schedule.workers} workers, dp {found.copies}, {found.schedule.microbatches} "
        f"microbatches; costs from steps {first} to {max(first, last - 1)}, measured: step {last}",
        versus_text(versus(prediction(found), found.timeline, largest=1)),
        "stage  forward ms  backward ms  activations    output  gradient  parameters",
    ]
    for number, cost in enumerate(found.costs):
        sizes = [size_text(n) for n in (cost.activation_bytes, cost.output_bytes, cost.gradient_bytes, cost.parameter_bytes)]
        times = f"{cost.forward_s * 1e3:>10.3f}  {cost.backward_s * 1e3:>11.3f}"
        lines.append(f"{number:>5}  {times}  {sizes[0]:>11}  {sizes[1]:>8}  {sizes[2]:>8}  {sizes[3]:>10}")
    lines.append(f"bottleneck: {bottleneck(found.schedule, found.costs, found.timeline).sentence}")
    return "\n".join(lines)


def measured_dict(found: Measurement) -> dict[str, Any]:
    """Returns the same as `measured_text`, ready for JSON."""
    return {
        "schedule": found.schedule.name,
        "workers": found.schedule.workers,
        "copies": found.copies,
        "microbatches": found.schedule.microbatches,
        "steps": found.steps,
        "versus": versus(prediction(found), found.timeline).to_dict(),
        "bottleneck": bottleneck(found.schedule, found.costs, found.timeline).to_dict(),
        "costs": [asdict(cost) for cost in found.costs],
    }
