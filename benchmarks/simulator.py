"""Time bars of schedules, checker and simulator: `python -m benchmarks.simulator [--json]`, exit code 1 if one is missed.

CPU time (`process_time`), warm, best of 5, so that other load on the machine hardly counts. The command line is measured
cold: CPU time of the whole process, median of 5. Lines without a bar are there to read the others by.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from meshwright import Cluster, Link, Op, Schedule, StageCost, check, schedules, simulate
from meshwright.ir.action import walk
from meshwright.simulate import compile

TIMES = 5
CLUSTER = Cluster(Link(latency_s=0.1, bytes_per_s=10.0))
COST = StageCost(forward_s=1.0, input_s=1.0, weight_s=1.0, output_bytes=1.0, gradient_bytes=1.0, activation_bytes=1.0)


@dataclass(frozen=True)
class Result:
    """One measured number; `most` and `least` are its bar, None where there is none."""

    name: str
    value: float
    unit: str
    most: float | None = None
    least: float | None = None

    @property
    def ok(self) -> bool:
        """Is the bar met?"""
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)

    def __str__(self) -> str:
        bar = f"<= {self.most:g}" if self.most is not None else f">= {self.least:g}" if self.least is not None else ""
        return f"{self.name:<78} {self.value:>12,.4g} {self.unit:<9} {bar:<11} {'ok' if self.ok else 'MISSED'}"


def best_s(work: Callable[[], object], times: int = TIMES) -> float:
    """The least CPU time of some runs, after one that warms up."""
    work()
    return min(_once_s(work) for _ in range(times))


def _once_s(work: Callable[[], object]) -> float:
    start = process_time()
    work()
    return process_time() - start


def onef1b(workers: int, microbatches: int) -> Schedule:
    """The schedule that all figures are taken on."""
    return schedules.build("onef1b", workers=workers, microbatches=microbatches)


def compiled(workers: int, microbatches: int, most: float) -> Result:
    """One simulation of a compiled schedule, messages with latency and bandwidth included."""
    program = compile(onef1b(workers, microbatches), CLUSTER)
    costs = [COST] * workers
    seconds = best_s(lambda: program.makespan(costs))
    return Result(f"compiled simulate, D={workers} N={microbatches}, with links", 1e3 * seconds, "ms", most=most)


def plans() -> Result:
    """Many costs on one small schedule."""
    program = compile(onef1b(8, 16), CLUSTER)
    base = np.array(list(asdict(COST).values()))
    costs = base * np.random.default_rng(0).uniform(0.5, 2.0, (10_000, 8, len(base)))
    seconds = best_s(lambda: program.makespans(costs))
    return Result("plans, D=8 N=16, batched, with links", len(costs) / seconds, "plans/s", least=100_000)


def against_torch(workers: int, microbatches: int) -> Iterator[Result]:
    """The dry run of torch.distributed.pipelining on the same order of actions; it has neither costs nor links."""
    from torch.distributed.pipelining import schedules as torch_schedules

    schedule = onef1b(workers, microbatches)
    order = torch_order(schedule, torch_schedules)
    with_sends = torch_schedules._add_send_recv({rank: list(row) for rank, row in order.items()}, lambda stage: stage, workers)
    theirs = best_s(lambda: torch_schedules._simulate_comms_compute(with_sends, lambda stage: stage, workers), times=3)
    program = compile(schedule, CLUSTER)
    costs = [COST] * workers
    ours = best_s(lambda: program.makespan(costs))
    size = f"D={workers} N={microbatches}"
    yield Result(f"torch's own simulation, {size}", theirs, "s")
    yield Result(f"torch's simulation / compiled simulate, {size}", theirs / ours, "times", least=100)
    plain = best_s(lambda: simulate(schedule, costs, CLUSTER), times=1)
    yield Result(f"plain simulate, {size}: lower, sweep, memory, bound", plain, "s")
    yield Result(f"preparing it: compile, {size}", best_s(lambda: compile(schedule, CLUSTER), times=1), "s")


def torch_order(schedule: Schedule, torch_schedules: Any) -> dict[int, list[Any]]:
    """A schedule's lists in torch's own actions."""
    kinds = {Op.F: torch_schedules.FORWARD, Op.B: torch_schedules.FULL_BACKWARD}

    def row(entries: tuple[Any, ...]) -> list[Any]:
        return [torch_schedules._Action(action.stage, kinds[action.op], action.mb) for action in walk(entries)]

    return {worker: row(entries) for worker, entries in enumerate(schedule.lists)}


def checks() -> Iterator[Result]:
    """The proof, which places all communication on its way."""
    per_action = {}
    for microbatches, times in ((512, TIMES), (4096, 1)):
        schedule = onef1b(64, microbatches)
        count = sum(map(len, schedule.lists))
        seconds = min(_once_s(lambda schedule=schedule: proved(schedule)) for _ in range(times))
        per_action[microbatches] = seconds / count
        yield Result(f"check with comm, D=64 N={microbatches}", seconds, "s", most=2.0 if microbatches == 512 else None)
    growth = per_action[4096] / per_action[512]
    yield Result("check with comm, time per action, N=4096 / N=512", growth, "times", most=1.5)


def proved(schedule: Schedule) -> None:
    """Check a schedule that must hold."""
    verdict = check(schedule)
    assert verdict.ok, verdict


def command_line(verb: str) -> Result:
    """CPU time of one cold call, user and system, all threads."""
    script = Path(sys.executable).with_name("meshwright")
    start = [str(script)] if script.exists() else [sys.executable, "-m", "meshwright.cli.main"]
    words = [*start, verb, "onef1b", "--workers", "8", "--microbatches", "32"]
    seconds = statistics.median(_child_s(words) for _ in range(TIMES))
    return Result(f"cold command line: meshwright {' '.join(words[len(start) :])}", seconds, "s", most=0.4)


def _child_s(words: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def results() -> Iterator[Result]:
    """All of them, quick ones first."""
    yield command_line("show")
    yield command_line("simulate")
    yield plans()
    yield compiled(64, 512, most=10.0)
    yield compiled(2048, 64, most=50.0)
    yield from against_torch(64, 512)
    yield from checks()


def report(results: Callable[[], Iterator[Result]], about: str | None) -> int:
    """Print every result, or one object with --json; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    found = []
    for result in results():
        found.append(result)
        if not as_json:
            print(result, flush=True)
    ok = all(result.ok for result in found)
    if as_json:
        machine = {"python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
        rows = [{**asdict(result), "ok": result.ok} for result in found]
        print(json.dumps({"ok": ok, "machine": machine, "results": rows}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(report(results, __doc__))
