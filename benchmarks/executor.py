"""The executor against torch.distributed.pipelining and against the simulator's ideal.

CPU per action with next to no compute, the step time of a small GPT, and the wall time of emulated devices.

    python -m benchmarks.executor --json

Every repeat runs all variants one after another in the same processes, each until it has settled and then timed; ratios
are taken per repeat, and the median is reported with a bootstrap interval. CPU time is that of all ranks together, so
foreign load hardly touches it.

How the ranks were started matters to torch, whose threads wake each other often: a system that shares its cores out by
session lets ranks of one session interrupt each other, and ranks with a session each, as torchrun starts them, less so.
The bars are for local workers, which have one session; `own_session` says what it is like in the other case.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from meshwright import even_costs, lower, schedules, simulate
from meshwright.ir.plan.plan import Parallel
from meshwright.runtime.emulate.emulate import EmulationJob, emulate
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.stage.layers import Layers
from meshwright.train.models import small_models as models
from meshwright.train.setup.build_schedule import lists_for

AT_MOST = {
    "cpu_per_action_ratio_gloo": 0.45,
    "cpu_per_action_ratio_shm": 0.25,
    "onef1b_wall_over_ideal_gloo": 1.10,
    "onef1b_wall_over_ideal_shm": 1.07,
    "zbv_wall_over_ideal": 1.15,
    "interleaved_wall_over_ideal": 1.15,
    "zbv_over_1f1b_wall": 0.85,
}
AT_LEAST = {"speedup_over_one_thread": 1.75}
STARTS = 3
"""How often processes are started anew for CPU per action: each time they find other places on the machine."""

LEVEL = "ratio_real_vs_schedule1f1b"
"""At most 1.00 within the paired noise: the lower end of its interval."""


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The cheapest optimizer there is."""
    return torch.optim.SGD(params, lr=1e-3)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The mean over all tokens."""
    return nn.functional.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


class Ours:
    """One rank of a run on our executor."""

    def __init__(self, layers: list[nn.Module], loss: Any, microbatches: int, transport: str, schedule: str = "onef1b") -> None:
        pp = dist.get_world_size()
        parallel = Parallel(pp=pp, microbatches=microbatches, transport=transport, schedule=schedule)
        settings = Settings(optimizer=sgd, microbatches=microbatches, loss=loss, transport=transport)
        self.engine = Engine(lists_for(parallel), Layers.of(layers, parallel.pp), settings)

    def step(self, x: Tensor, y: Tensor) -> None:
        """One training step."""
        self.engine.run(lambda _: (x, y))


class Theirs:
    """One rank of torch's own 1F1B on the same stages."""

    def __init__(self, layers: list[nn.Module], loss: Any, microbatches: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        cut = Layers.of(layers, world)
        module = nn.Sequential(*cut.of_stage(rank))
        self.last, self.first = rank == world - 1, rank == 0
        stage = PipelineStage(module, rank, world, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, microbatches, loss_fn=loss)
        self.optimizer = sgd(list(module.parameters()))

    def step(self, x: Tensor, y: Tensor) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        if self.first:
            self.schedule.step(x)
        elif self.last:
            self.schedule.step(target=y, losses=[])
        else:
            self.schedule.step()
        self.optimizer.step()


class Alone:
    """One thread that trains the whole model, on the first `ranks` ranks; the others wait and leave their cores free.

    On two ranks at once it shows what the machine's second core is worth, without any pipeline.
    """

    def __init__(self, layers: list[nn.Module], microbatches: int, ranks: int) -> None:
        self.model, self.microbatches = nn.Sequential(*layers), microbatches
        self.optimizer = sgd(list(self.model.parameters()))
        self.works = dist.get_rank() < ranks

    def step(self, x: Tensor, y: Tensor) -> None:
        """One training step, on the same microbatches."""
        if not self.works:
            return
        self.optimizer.zero_grad()
        for a, b in zip(x.chunk(self.microbatches), y.chunk(self.microbatches), strict=True):
            (cross_entropy(self.model(a), b) / self.microbatches).backward()
        self.optimizer.step()


def tiny() -> list[nn.Module]:
    """Four stages with next to no compute."""
    torch.manual_seed(0)
    return [nn.Linear(8, 8) for _ in range(4)]


def overhead(microbatches: int, steps: int, repeats: int, own_session: bool) -> dict[str, list[float]]:
    """CPU seconds of this rank per repeat and variant."""
    if own_session:
        os.setsid()
    x, y = torch.randn(microbatches, 8), torch.randn(microbatches, 8)
    mse = nn.functional.mse_loss
    variants: dict[str, Any] = {
        "torch": Theirs(tiny(), mse, microbatches),
        "gloo": Ours(tiny(), mse, microbatches, "torch"),
        "shm": Ours(tiny(), mse, microbatches, "shared"),
    }
    return _timed(variants, lambda v: v.step(x, y), steps, repeats, time.process_time, settle=2 * steps)


def real(microbatches: int, repeats: int) -> dict[str, list[float]]:
    """Wall seconds of a step of a small GPT per repeat and variant."""
    torch.set_num_threads(1)
    x, y = models.text_batch(0, rows=microbatches, length=128)

    def gpt() -> list[nn.Module]:
        torch.manual_seed(0)
        return models.gpt(blocks=12, width=256, heads=8, length=128, tied=False)

    variants: dict[str, Any] = {
        "torch": Theirs(gpt(), cross_entropy, microbatches),
        "shm": Ours(gpt(), cross_entropy, microbatches, "shared"),
        "gloo": Ours(gpt(), cross_entropy, microbatches, "torch"),
        "chimera": Ours(gpt(), cross_entropy, microbatches, "shared", "chimera"),
    }
    variants["serial"] = Alone(gpt(), microbatches, ranks=1)
    variants["serial_on_both"] = Alone(gpt(), microbatches, ranks=2)
    return _timed(variants, lambda v: v.step(x, y), 2, repeats, time.perf_counter, settle=1)


def emulated(repeats: int) -> dict[str, Any]:
    """Wall times of emulated devices, 8 workers and 16 microbatches, against each schedule's own ideal."""

    def job(name: str, op_s: float, transport: str = "shared", **options: object) -> tuple[EmulationJob, float]:
        schedule = schedules.build(name, workers=8, microbatches=16, **options)
        costs = even_costs(stages=schedule.stages, workers=8, forward_s=op_s, backward_s=2 * op_s)
        lowered = lower(schedule, costs=costs)
        return EmulationJob(lowered, costs, transport=transport), simulate(lowered, costs).makespan_s

    jobs = {
        "onef1b_wall_over_ideal_gloo": job("onef1b", 0.005, "torch"),
        "onef1b_wall_over_ideal_shm": job("onef1b", 0.005),
        "zbv_wall_over_ideal": job("zbv", 0.010),
        "interleaved_wall_over_ideal": job("interleaved", 0.010, chunks=2),
        "onef1b_10ms": job("onef1b", 0.010),
    }
    measured = dict(zip(jobs, emulate([job for job, _ in jobs.values()], repeat=repeats), strict=True))
    times = {name: [run.makespan_s for run in found.runs] for name, found in measured.items()}
    result: dict[str, Any] = {}
    for name, (_, ideal) in jobs.items():
        if name.endswith(("gloo", "shm", "ideal")):
            _report(result, name, ratio(times[name], [ideal] * repeats))
    _report(result, "zbv_over_1f1b_wall", ratio(times["zbv_wall_over_ideal"], times["onef1b_10ms"]))
    result["foreign_cpu"] = statistics.median(run.foreign_ratio for found in measured.values() for run in found.runs)
    return result


def _report(result: dict[str, Any], name: str, ratio: dict[str, float]) -> None:
    result[name] = ratio["median"]
    result[f"{name}_interval"] = [ratio["low"], ratio["high"]]


def _timed(
    variants: dict[str, Any], do: Callable[[Any], None], steps: int, repeats: int, clock: Callable[[], float], settle: int
) -> dict[str, list[float]]:
    """What `clock` says of some steps of each variant, after others in which it settles: another one ran before it."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for variant in variants.values():
        do(variant)
        do(variant)
    for _ in range(repeats):
        for name, variant in variants.items():
            dist.barrier()
            for _ in range(settle):
                do(variant)
            start = clock()
            for _ in range(steps):
                do(variant)
            found[name].append(clock() - start)
    return found


def ratio(top: list[float], bottom: list[float]) -> dict[str, float]:
    """The median of paired ratios, and a 90 % bootstrap interval."""
    pairs = [a / b for a, b in zip(top, bottom, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(1000))
    return {"median": statistics.median(pairs), "low": medians[50], "high": medians[949]}


def _sum(ranks: list[dict[str, list[float]]], name: str) -> list[float]:
    return [sum(values) for values in zip(*(rank[name] for rank in ranks), strict=True)]


def main() -> None:
    """Measure, print, and fail where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", choices=["overhead", "real", "emulated"])
    options = parser.parse_args()
    result: dict[str, Any] = {}
    if options.only in (None, "overhead"):
        result |= _overhead(options.repeats)
    if options.only in (None, "real"):
        result |= _real(options.repeats)
    if options.only in (None, "emulated"):
        result |= emulated(options.repeats)
    print(json.dumps(result, indent=None if options.json else 2))
    missed = [f"{name} {result[name]:.3f} > {bar}" for name, bar in AT_MOST.items() if result.get(name, 0) > bar]
    missed += [f"{name} {result[name]:.3f} < {bar}" for name, bar in AT_LEAST.items() if result.get(name, bar) < bar]
    if result.get(f"{LEVEL}_interval", [0])[0] > 1.0:
        missed.append(f"{LEVEL} {result[LEVEL]:.3f} > 1")
    if missed:
        print("missed: " + ", ".join(missed), file=sys.stderr)
        sys.exit(1)


def _overhead(repeats: int) -> dict[str, Any]:
    microbatches, steps = 16, 20
    actions = 2 * microbatches * 4 * steps
    cpu: dict[bool, dict[str, list[float]]] = {False: defaultdict(list), True: defaultdict(list)}
    for _ in range(STARTS):
        for own_session, found in cpu.items():
            with Workers(4) as pool:
                ranks = pool.run(overhead, microbatches, steps, -(-repeats // STARTS), own_session)
            for name in ranks[0]:
                found[name] += _sum(ranks, name)
    result: dict[str, Any] = {}
    for own_session, found in cpu.items():
        end = "_own_session" if own_session else ""
        result[f"cpu_per_action_us{end}"] = {name: statistics.median(t) / actions * 1e6 for name, t in found.items()}
        for name in ("gloo", "shm"):
            _report(result, f"cpu_per_action_ratio_{name}{end}", ratio(found[name], found["torch"]))
    return result


def _real(repeats: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    with Workers(2) as pool:
        ranks = pool.run(real, 8, repeats)
    for name in ("shm", "gloo"):
        _report(result, LEVEL + ("" if name == "shm" else "_gloo"), ratio(ranks[0][name], ranks[0]["torch"]))
    alone = ranks[0]["serial"]
    # Two workers leave 1F1B idle for one microbatch in nine, and Chimera not at all.
    _report(result, "speedup_over_one_thread", ratio(alone, ranks[0]["chimera"]))
    _report(result, "onef1b_speedup_over_one_thread", ratio(alone, ranks[0]["shm"]))
    _report(result, "torch_speedup_over_one_thread", ratio(alone, ranks[0]["torch"]))
    both = [max(pair) for pair in zip(*(rank["serial_on_both"] for rank in ranks), strict=True)]
    _report(result, "two_threads_over_one", ratio([2 * t for t in alone], both))
    return result


if __name__ == "__main__":
    main()
