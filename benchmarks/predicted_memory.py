"""Predicted against measured memory of real runs: `python -m benchmarks.predictions memory`.

Measured is the growth of a worker over an idle one, at the peak of two steps: resident pages, with a page that two workers share
(windows of shared memory) counted half on each. Before it counts as idle, a worker has trained a tiny model with the same plan:
that loads what torch loads at its first step. Predicted is the sum of all classes of a plan's memory, without the reserve.

glibc keeps freed blocks in its heap and cannot use all of the holes. To measure the sizes of tensors and not these holes, blocks
of `MMAP_BYTES` and more are mapped from the system and given back (M_MMAP_THRESHOLD). `HOLES=1 python -m
benchmarks.predictions memory` measures with the default of glibc.
"""

from __future__ import annotations

import ctypes
import os
import platform
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

import meshwright as mw
from benchmarks.predicted_models import gpt, llama, train
from meshwright.ir.plan.chosen_plan import MemoryUse
from meshwright.ir.plan.planned_file import plan_file_json
from meshwright.planners._limits import PlanLimits
from meshwright.planners._pricing.pricing import Pricer
from meshwright.planners._search.candidate_plans import Candidate
from meshwright.planners._search.cuts.even_cuts import even_cuts
from meshwright.planners._search.families import families
from meshwright.planners._search.group_bounds import placement_of
from meshwright.planners._search.plan_bounds import PlanBounds
from meshwright.planners._search.problem import Problem
from meshwright.planners._search.tensor_costs import tensor_choices
from meshwright.runtime.launch.workers import Workers
from meshwright.train.models.example_batches import example_for
from meshwright.train.models.model_names import ModelFile

BATCH = 8
M_MMAP_THRESHOLD, MMAP_BYTES = -3, 64 << 10
MODELS = {"gpt": gpt(512, 8, 256), "llama": llama(512, 8, 256)}
TINY = {"gpt": gpt(64, 8, 32), "llama": llama(64, 8, 32)}


@dataclass(frozen=True)
class Held:
    """A plan whose memory is predicted and measured. A microbatch has one row."""

    model: str
    schedule: str
    pp: int
    options: dict[str, Any] = field(default_factory=dict)
    dp: int = 1
    tp: int = 1
    zero: str = "replicated"
    recompute: bool = False

    @property
    def count(self) -> int:
        """Its ranks."""
        return self.pp * self.dp * self.tp

    def __str__(self) -> str:
        options = "".join(f" {key}={value}" for key, value in self.options.items())
        degrees = "".join(f" {key} {getattr(self, key)}" for key in ("pp", "dp", "tp") if getattr(self, key) > 1)
        modes = f"{'' if self.zero == 'replicated' else ' ' + self.zero}{' recompute' if self.recompute else ''}"
        return f"{self.model:6}{self.schedule}{options}{degrees}{modes}"


PLANS = (
    Held("gpt", "onef1b", 2),
    Held("gpt", "gpipe", 3),
    Held("gpt", "chimera", 4),
    Held("gpt", "onef1b", 1, dp=2),
    Held("gpt", "onef1b", 1, tp=2),
    Held("llama", "zero_bubble", 2, {"variant": "h1"}),
    Held("llama", "interleaved", 2, {"chunks": 2}),
    Held("llama", "onef1b", 1, dp=2, zero="zero-1"),
    Held("llama", "onef1b", 2, recompute=True),
    Held("llama", "onef1b", 2, dp=2),
)


def own_bytes(name: str, file: str = "status") -> int:
    """Memory of this process in /proc: VmRSS is what it has, VmHWM the most that it had since `forget_peak`."""
    text = Path("/proc/self", file).read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(name))


def without_holes() -> None:
    """Blocks of `MMAP_BYTES` and more are mapped from the system, and given back when they are freed."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


def forget_peak() -> int:
    """Starts a new peak, and returns what this worker has while it is idle."""
    Path("/proc/self/clear_refs").write_text("5")
    return own_bytes("VmRSS") - shared_bytes()


def shared_bytes() -> int:
    """The share of other processes in the shared memory that this one has mapped."""
    return own_bytes("RssShmem") - own_bytes("Pss_Shmem", "smaps_rollup")


class Peaks(TrainerCallback):
    """Writes the peak of each rank into a file, at the end of training. Windows of shared memory are there until then."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """All steps are done."""
        Path(self.folder, f"peak{dist.get_rank()}").write_text(str(own_bytes("VmHWM") - shared_bytes()))


def profiled(model: ModelFile, cluster: mw.Cluster) -> mw.Profile:
    """The bytes of the layers of a model. Times are estimated: memory needs no measured ones."""
    skeleton = mw.sketch(model.build)
    example = example_for("example", skeleton.model, rows=2, length=model.positions)(0)
    return mw.profile_model(skeleton.model, example, rows=(1, 2), cluster=cluster, estimate=True)


def predicted(held: Held, profile: mw.Profile, cluster: mw.Cluster) -> tuple[tuple[MemoryUse, ...], str]:
    """The memory of each worker, and the text of a plan file."""
    problem = Problem(profile, cluster, PlanLimits(), microbatches=None, batch=BATCH)
    bounds = PlanBounds(problem)
    family = next(f for f in families(held.schedule) if dict(f.options) == held.options)
    tensor = next(choice for choice in tensor_choices(profile, held.tp) if choice.name == "line")
    stages = placement_of(family, held.pp).stages
    ends = even_cuts(bounds.timed(1, 1, tensor).sums["work"], (1.0,) * stages)
    plan = Candidate(family, held.pp, held.dp, tensor, 1, 1, BATCH // held.dp, held.zero, held.recompute, "copies", ends, 0.0)
    pricer = Pricer(problem, bounds)
    priced = pricer.price(plan)
    _, uses = pricer.engine(priced)
    return uses, plan_file_json(mw.Parallel.of({**priced.parallel, "ranks": ()}))


def grown(held: Held, text: str) -> list[int]:
    """Trains two steps as planned. Returns by how much each rank has grown."""
    with Workers(held.count) as workers, tempfile.TemporaryDirectory() as folder:
        if not os.environ.get("HOLES"):
            workers.run(without_holes)
        train(TINY[held.model], text, workers, folder, batch=BATCH, steps=2)
        idle = workers.run(forget_peak)
        train(MODELS[held.model], text, workers, folder, batch=BATCH, steps=2, callback=Peaks(folder))
        return [int(Path(folder, f"peak{rank}").read_text()) - idle[rank] for rank in range(held.count)]


def worker_of(held: Held, rank: int) -> int:
    """The worker of a rank: copies follow each other, and the ranks of a tensor box are neighbours."""
    return rank // held.tp % held.pp


def memory(only: str = "") -> float:
    """The mean error of the predicted growth of workers."""
    core = mw.Device(f"core of {platform.machine()}", 8e9, {"fp32": 1e11}, 1e10)
    errors, profiles = [], dict[str, mw.Profile]()
    for held in (each for each in PLANS if only in str(each)):
        cluster = mw.Cluster(mw.Link(1e-5, 1e9), devices=(core,) * held.count)
        if held.model not in profiles:
            profiles[held.model] = profiled(MODELS[held.model], cluster)
        uses, text = predicted(held, profiles[held.model], cluster)
        found = grown(held, text)
        wanted = [uses[worker_of(held, rank)].total - uses[worker_of(held, rank)].reserve for rank in range(held.count)]
        ratios = [a / b for a, b in zip(wanted, found, strict=True)]
        errors.append(mean(abs(ratio - 1) for ratio in ratios))
        each = ", ".join(f"{a / 1e6:.0f}/{b / 1e6:.0f}" for a, b in zip(wanted, found, strict=True))
        print(f"{held!s:42} predicted/measured {mean(ratios):.2f}   (MB: {each})", flush=True)
    return mean(errors)
