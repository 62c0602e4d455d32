"""How good predictions of real runs are: profile, plan, run, compare. `python -m benchmarks.predictions [times|memory]`

Times: ten plans of a small GPT and a small Llama on two workers. Each is predicted from a profile that is measured just before
the run, so that both see the same machine; the median of some rounds counts. At most 15 % off in the mean. A round is accepted if
other processes used less than 10 % of all cores, while layers were timed and while the model was trained. If there is none, all
rounds of the plan count, and the output says so.

Memory: ten plans on two to four workers, see `predicted_memory`. At most 10 % off in the mean.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from time import perf_counter, process_time
from typing import Any, TypeVar

import meshwright as mw
from benchmarks.predicted_memory import memory
from benchmarks.predicted_models import gpt, llama, train
from meshwright import planners
from meshwright.planners._planned_text import planned_text
from meshwright.runtime.discover.discover import discover
from meshwright.runtime.launch.workers import Workers
from meshwright.train.models.example_batches import example_for
from meshwright.train.models.model_names import ModelFile

TIMED = {"gpt": gpt(256, 8, 128), "llama": llama(256, 8, 128)}
TIMED_PLANS: tuple[dict[str, Any], ...] = (
    {"schedule": "onef1b", "pp": 2},
    {"schedule": "gpipe", "pp": 2},
    {"schedule": "zero_bubble", "pp": 2},
    {"schedule": "chimera", "pp": 2},
    {"schedule": "onef1b", "pp": 1, "dp": 2},
)
ROWS, BATCH, STEPS = (1, 2, 4), 16, 7
ROUNDS = int(os.environ.get("ROUNDS", "3"))
TRIES = 2
"""At most so many times `ROUNDS` rounds are run until `ROUNDS` of them are accepted."""
QUIET = 0.10
TIME_BAR, MEMORY_BAR = 0.15, 0.10
HERTZ = os.sysconf("SC_CLK_TCK")
T = TypeVar("T")


def busy_s() -> float:
    """The seconds that all cores of this machine have worked, for whomever: all but idle and waiting for disks."""
    numbers = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
    return (sum(numbers) - numbers[3] - numbers[4]) / HERTZ


def watched(work: Callable[[], T], own_s: Callable[[], float]) -> tuple[T, float]:
    """Returns the result of some work, and the share of all cores that other processes used at the same time."""
    begin, busy, own = perf_counter(), busy_s(), own_s()
    found = work()
    foreign = busy_s() - busy - (own_s() - own)
    return found, max(0.0, foreign) / ((perf_counter() - begin) * (os.cpu_count() or 1))


@dataclass(frozen=True)
class Round:
    """A prediction, the run that it is about, and the largest share of all cores that others used."""

    predicted_s: float
    measured_s: float
    foreign: float


def one_round(model: ModelFile, cluster: mw.Cluster, choice: dict[str, Any], workers: Workers, folder: str) -> Round:
    """Profiles the layers, chooses a plan with these constraints, and trains it."""
    skeleton = mw.sketch(model.build)
    example = example_for("example", skeleton.model, rows=2, length=model.positions)(0)
    profile, before = watched(lambda: mw.profile_model(skeleton.model, example, rows=ROWS, cluster=cluster), process_time)
    plan = planners.plan(profile, cluster, batch=BATCH, planner="search", tensor=False, seconds=3.0, **choice)
    text = planned_text(plan, profile, cluster, batch=BATCH)
    measured, during = watched(
        lambda: train(model, text, workers, folder, batch=BATCH, steps=STEPS),
        lambda: process_time() + sum(workers.run(process_time)),
    )
    return Round(plan.step_s, measured, max(before, during))


def rounds_of(model: ModelFile, cluster: mw.Cluster, choice: dict[str, Any], workers: Workers, folder: str) -> list[Round]:
    """Runs rounds until enough are accepted, or the tries are used up."""
    found: list[Round] = []
    while len(found) < ROUNDS * TRIES and sum(each.foreign < QUIET for each in found) < ROUNDS:
        found.append(one_round(model, cluster, choice, workers, folder))
        if len(found) == ROUNDS and not any(each.foreign < QUIET for each in found):
            break  # this machine is not quiet now
    return found


def times() -> float:
    """The mean error of predicted step times."""
    errors, accepted, run = [], 0, 0
    for name, model in TIMED.items():
        measured = discover(workers=2)
        assert measured is not None, "only rank 0 measures here"
        with Workers(2) as workers, tempfile.TemporaryDirectory() as folder:
            for choice in TIMED_PLANS:
                rounds = rounds_of(model, measured.cluster, choice, workers, folder)
                quiet = [each for each in rounds if each.foreign < QUIET]
                accepted, run = accepted + len(quiet), run + len(rounds)
                ratio = median(each.predicted_s / each.measured_s for each in quiet or rounds)
                errors.append(abs(ratio - 1))
                each = ", ".join(f"{1e3 * r.predicted_s:.0f}/{1e3 * r.measured_s:.0f}" for r in quiet or rounds)
                said = f"{len(quiet)} of {len(rounds)} accepted" if quiet else f"none of {len(rounds)} accepted: all count"
                print(f"{name:6} {shown(choice):28} predicted/measured {ratio:.2f}   (ms: {each}; {said})", flush=True)
    print(f"{accepted} of {run} rounds accepted: other processes used less than {QUIET:.0%} of all cores")
    return mean(errors)


def shown(choice: dict[str, Any]) -> str:
    """Constraints in words."""
    return " ".join(f"{name} {value}" for name, value in choice.items())


def main(asked: list[str]) -> None:
    """Measure, print, and fail where a bar is missed."""
    missed = False
    for name, work, bar in (("times", times, TIME_BAR), ("memory", memory, MEMORY_BAR)):
        if not asked or name in asked:
            error = work()
            missed |= error > bar
            print(f"{name}: mean error {error:.1%}, bar {bar:.0%}", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
