"""Time bars of the search over plans: `python -m benchmarks.planner [--json]`, exit code 1 if one is missed.

CPU time of one core (`process_time`), warm: the first call in a process loads compiled loops from the disk and is not counted;
the better of the next two is. Clusters are hosts of eight devices, and once a matrix of random bandwidths.
"""

from __future__ import annotations

import random
import resource
import sys
from collections.abc import Iterator
from time import process_time
from typing import Any

import meshwright as mw
from benchmarks.simulator import Result, report
from meshwright.ir.files.cluster_file import read_cluster
from meshwright.planners import search
from meshwright.planners._limits import PlanLimits, SplitRows

TIMES = 2


def chain(layers: int) -> mw.Profile:
    """Layers with times and sizes near those of BERT on a V100, all different, as a published profile gives them."""
    choose = random.Random(layers)

    def near(value: float) -> float:
        return value * choose.uniform(0.5, 1.5)

    return mw.Profile(
        tuple(
            mw.LayerCost(f"{n}", (near(2e-3),), (near(2e-3),), (near(2e-3),), output_bytes=near(3e6), parameter_bytes=near(1e7))
            for n in range(layers)
        )
    )


def hosts(devices: int) -> mw.Cluster:
    """Hosts of eight devices."""
    return mw.Cluster(hosts=(mw.Host(8, mw.Link(5e-6, 25e9), mw.Link(2e-5, 3e9)),) * (devices // 8))


def matrix(devices: int) -> mw.Cluster:
    """Random bandwidths of all pairs."""
    choose = random.Random(devices)
    rates = [[1.0] * devices for _ in range(devices)]
    for a in range(devices):
        for b in range(a):
            rates[a][b] = rates[b][a] = choose.uniform(1e9, 25e9)
    return mw.Cluster(mw.Link(1e-5), bandwidths=tuple(map(tuple, rates)))


def trillion() -> tuple[mw.Profile, mw.Cluster]:
    """A GPT with 128 blocks of 25,600 features and 2,048 tokens in bf16, on 384 hosts of eight A100."""
    hidden, tokens, words = 25_600, 2048, 51_200
    machine = read_cluster("384xdgx-a100")
    speed = machine.devices[0].flops_per_s["bf16"]

    def layer(name: str, weights: float, flops: float, saved: float) -> mw.LayerCost:
        times = tuple(rows * flops / speed for rows in (1, 2, 4))
        width = 2.0 * hidden * tokens
        return mw.LayerCost(
            name, times, times, times, output_bytes=width, saved_bytes=saved, parameter_bytes=2 * weights,
            transient_bytes=2 * width, flops=flops,
        )  # fmt: skip

    block = 12.0 * hidden**2
    blocks = [layer(f"block {n}", block, 2 * block * tokens + 4 * tokens**2 * hidden, 34.0 * hidden * tokens) for n in range(128)]
    table = layer("table", float(words * hidden), 0.0, 8.0 * tokens)
    head = layer("head", float(words * hidden), 2.0 * words * hidden * tokens, 2.0 * hidden * tokens + 4.0 * words * tokens)
    profile = mw.Profile(
        (table, *blocks, head), rows=(1, 2, 4), tokens_per_row=tokens, precision="bf16", optimizer_bytes_per_parameter=12.0
    )
    return profile, machine


def second_s(profile: mw.Profile, machine: mw.Cluster, **step: Any) -> tuple[float, mw.Plan]:
    """The CPU time of a search in a process that has planned the same before, and its plan."""
    found = mw.plan(profile, machine, planner="search", **step)
    seconds = []
    for _ in range(TIMES):
        start = process_time()
        again = mw.plan(profile, machine, planner="search", **step)
        seconds.append(process_time() - start)
        assert again.to_dict() | {"planning_s": 0} == found.to_dict() | {"planning_s": 0}, "the same input, another plan"
    return min(seconds), found


def first_s(profile: mw.Profile, machine: mw.Cluster, *, microbatches: int | None = None, batch: int | None = None) -> float:
    """The CPU time until the search yields its first simulated plan."""
    limits = PlanLimits(split_rows=SplitRows.UNEVEN if profile.rows else SplitRows.IGNORE)
    start = process_time()
    next(search.plan(profile=profile, cluster=machine, microbatches=microbatches, batch=batch, limits=limits))
    return process_time() - start


def results() -> Iterator[Result]:
    """All of them, quick ones first."""
    for name, machine in (("hosts", hosts(64)), ("matrix", matrix(64))):
        seconds, _ = second_s(chain(200), machine, microbatches=64)
        yield Result(f"search, 200 layers x 64 devices, {name}, 64 microbatches", seconds, "s", most=0.3)
    for devices, most in ((256, 2.0), (1000, 8.0)):
        layers, machine = chain(1000), hosts(devices)
        seconds, _ = second_s(layers, machine, microbatches=256)
        yield Result(f"search, 1000 layers x {devices} devices, 256 microbatches", seconds, "s", most=most)
    yield Result("first simulated plan, 1000 x 1000", first_s(layers, machine, microbatches=256), "s", most=1.0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    yield Result("most memory of this process up to here", peak / 1e9, "GB", most=1.0)
    profile, machine = trillion()
    seconds, plan = second_s(profile, machine, batch=3072)
    yield Result("search, GPT of 10^12 parameters on 3,072 A100, 3,072 rows", seconds, "s", most=15.0)
    yield Result("... plans bounded", plan.counts["bounded"], "plans", least=10_000)
    yield Result("... winners proved", plan.counts["proved"], "plans", least=1)
    yield Result("... first simulated plan", first_s(profile, machine, batch=3072), "s", most=1.0)


if __name__ == "__main__":
    sys.exit(report(results, __doc__))
