"""A tour in seconds, without a GPU: draw a schedule, prove it, break it, compare all, run it for real, and write a trace.

`make demo` runs this; every step prints the command that does the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from meshwright import check, even_costs, lower, schedules, simulate, verify
from meshwright.cli.compare import compare
from meshwright.report.perfetto import both_to_perfetto
from meshwright.report.terminal import timeline_text
from meshwright.runtime.emulate import Job, emulate
from meshwright.train.models import gpt, text_batch

TRACE = Path("build/chimera-trace.json")


def main() -> None:
    """Seven steps."""
    console = Console(highlight=False)

    def step(title: str, command: str) -> None:
        console.rule(f"[bold]{title}")
        console.print(f"[dim]$ {command}\n")

    step("1. Who does what when", "meshwright show chimera --workers 4 --microbatches 4")
    chimera = schedules.build("chimera", workers=4, microbatches=4)
    costs = even_costs(stages=4, workers=4)
    timeline = simulate(chimera, costs)
    console.print(timeline_text(chimera, timeline), markup=False, soft_wrap=True)

    step("2. Proved before anything runs", "meshwright check chimera.json")
    console.print(str(check(chimera)))

    step("3. What a wrong order looks like", "meshwright check broken.json")
    lowered = lower(chimera)
    first = list(lowered.lists[1])
    a, b = _two_sends(first)
    first[a], first[b] = first[b], first[a]
    broken = replace(lowered, period=(lowered.lists[0], tuple(first), *lowered.lists[2:]))
    console.print(str(check(broken)), markup=False)

    step("4. All schedules at equal work, 5 activations allowed", "meshwright compare --workers 4 --microbatches 8 --memory 5")
    compare(workers=4, microbatches=8, memory=5.0)

    step(
        "5. Trained for real, equal to one process", "meshwright verify gpt --schedule chimera --pp 4 --microbatches 4 --steps 5"
    )
    certificate = verify(gpt, text_batch, parallel={"pp": 4, "schedule": "chimera", "microbatches": 4}, steps=5)
    assert certificate.passed, certificate.problems
    console.print(f"4 workers, 5 steps: loss {certificate.losses[0]:.3f} -> {certificate.losses[-1]:.3f}")
    console.print(
        f"largest relative error against one process: {certificate.max_relative_error:.1e} (bar {certificate.tolerance:.0e})"
    )

    step("6. Predicted against measured", "meshwright simulate chimera ... --forward 0.01 --backward 0.02 --emulate wall")
    costs = even_costs(stages=4, workers=4, forward_s=0.01, backward_s=0.02)
    predicted = simulate(chimera, costs)
    [measured] = emulate([Job(lower(chimera, costs=costs), costs, trace=True)], repeat=3)
    console.print(
        f"predicted {predicted.makespan_s * 1e3:.0f} ms, measured {measured.makespan_s * 1e3:.1f} ms on 4 emulated devices"
    )

    step("7. A trace to look at", "meshwright simulate chimera ... --emulate wall --trace chimera-trace.json")
    TRACE.parent.mkdir(exist_ok=True)
    assert measured.timeline is not None
    TRACE.write_text(both_to_perfetto(predicted, measured.timeline))
    console.print(f"wrote {TRACE}, prediction and measurement side by side: open it at ui.perfetto.dev")
    console.print("\nTry next: meshwright simulate zero_bubble --option variant=auto --send 0.1")
    console.print("          meshwright show zbv --workers 4 --microbatches 8")


def _two_sends(entries: list[object]) -> tuple[int, int]:
    """The places of two neighbouring sends to different workers."""
    sends = [i for i, entry in enumerate(entries) if ">" in str(entry)]
    return sends[0], sends[1]


if __name__ == "__main__":
    main()
