"""What a local worker takes of memory for training its stages: `python -m benchmarks.memory [pp]`.

A GPT-2 of 195 MB is trained for two steps with plain SGD, once as a model with its weights and once as a sketch. Of every worker
the memory that nobody else has (USS) is read before it gets work, when training begins, and at its largest behind a step.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, set_seed

import meshwright
from meshwright.runtime.launch.workers import Workers

SIZES = {"vocab_size": 2048, "n_positions": 32, "n_embd": 768, "n_layer": 7, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}


def build() -> Any:
    """The model, always the same."""
    set_seed(0)
    return GPT2LMHeadModel(GPT2Config(**SIZES))


def own_mb() -> int:
    """Memory that only this process has."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private")) >> 10


def at_rest() -> int:
    """Of a worker without work."""
    return own_mb()


class Reads(TrainerCallback):
    """Prints what a worker has."""

    def __init__(self) -> None:
        self.begun = self.most = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Its stages are there."""
        self.begun = own_mb()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Gradients too."""
        self.most = max(self.most, own_mb())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Say it."""
        print(f"  rank {dist.get_rank()}: {self.begun} MB when training begins, {self.most} MB at most", flush=True)


def run(model: Any, pp: int) -> None:
    """Train on fresh workers."""
    data = [{"input_ids": list(range(16)), "labels": list(range(16))} for _ in range(16)]
    with Workers(pp) as workers, tempfile.TemporaryDirectory() as folder:
        print(f"  at rest: {max(workers.run(at_rest))} MB", flush=True)
        args = meshwright.TrainingArguments(
            output_dir=folder,
            max_steps=2,
            per_device_train_batch_size=4,
            optim="sgd",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            parallel={"pp": pp},
        )
        meshwright.Trainer(model, args, train_dataset=data, callbacks=[Reads()], workers=workers).train()


if __name__ == "__main__":
    stages = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    whole = build()
    print(f"a model of {sum(p.nbytes for p in whole.parameters()) >> 20} MB, pp={stages}")
    run(whole, stages)
    del whole
    print("a sketch of it")
    run(meshwright.sketch(build), stages)
