"""A tour in seconds, without a GPU: draw a schedule, prove it, break it, compare all of them, and write a trace.

`make demo` runs this; every step prints the command that does the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from meshwright import Cluster, Link, check, even_costs, lower, schedules, simulate
from meshwright.cli.compare import compare
from meshwright.report.perfetto import to_perfetto
from meshwright.report.terminal import print_timeline

TRACE = Path("build/chimera-trace.json")


def main() -> None:
    """Five steps."""
    console = Console(highlight=False)

    def step(title: str, command: str) -> None:
        console.rule(f"[bold]{title}")
        console.print(f"[dim]$ {command}\n")

    step("1. Who does what when", "meshwright show chimera --workers 4 --microbatches 4")
    chimera = schedules.build("chimera", workers=4, microbatches=4)
    costs = even_costs(stages=4, workers=4)
    timeline = simulate(chimera, costs)
    print_timeline(console, chimera, timeline)

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

    step("5. A trace to look at", "meshwright show chimera --send 0.2 --format perfetto -o chimera-trace.json")
    cluster = Cluster(Link(latency_s=0.2))
    TRACE.parent.mkdir(exist_ok=True)
    TRACE.write_text(to_perfetto(simulate(chimera, costs, cluster)))
    console.print(f"wrote {TRACE}: open it at ui.perfetto.dev")
    console.print("\nTry next: meshwright simulate zero_bubble --option variant=auto --option memory=6 --send 0.1")
    console.print("          meshwright show zbv --workers 4 --microbatches 8")


def _two_sends(entries: list[object]) -> tuple[int, int]:
    """The places of two neighbouring sends to different workers."""
    sends = [i for i, entry in enumerate(entries) if ">" in str(entry)]
    return sends[0], sends[1]


if __name__ == "__main__":
    main()
