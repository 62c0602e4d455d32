"""How good predictions of real runs are: profile, plan, run, compare. `python -m benchmarks.predictions [times|memory]`

Times: ten plans of a small GPT and a small Llama on two workers. Each is predicted from a profile that is measured just before
the run, so that both see the same machine; the median of some rounds counts. At most 15 % off in the mean.

Memory: the growth of a worker over an idle one, at the peak of some steps, for plans on two to four workers. At most 10 % off in
the mean. Workers have trained a tiny model before they count as idle: that loads what torch loads at its first step.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback, set_seed

import meshwright as mw
from meshwright import planners
from meshwright.planners._planned_text import planned_text
from meshwright.runtime.discover.discover import discover
from meshwright.runtime.launch.workers import Workers
from meshwright.train.models.example_batches import example_for
from meshwright.train.models.model_names import ModelFile

HEAD = "AutoModelForCausalLM"
ENDS = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt(width: int, blocks: int, length: int) -> ModelFile:
    sizes = {"n_embd": width, "n_layer": blocks, "n_head": width // 32, "n_positions": length}
    return ModelFile(HEAD, {"model_type": "gpt2", **sizes, **ENDS, **DROPOUT})


def llama(width: int, blocks: int, length: int) -> ModelFile:
    sizes = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": blocks,
        "num_attention_heads": width // 32,
    }
    more = {"max_position_embeddings": length, "num_key_value_heads": width // 64, "tie_word_embeddings": False}
    return ModelFile(HEAD, {"model_type": "llama", **sizes, **more, **ENDS})


TIMED = {"gpt": gpt(256, 8, 128), "llama": llama(256, 8, 128)}
HELD = {"gpt": gpt(512, 8, 256), "llama": llama(512, 8, 256)}
TIMED_PLANS: tuple[dict[str, Any], ...] = (
    {"schedule": "onef1b", "pp": 2},
    {"schedule": "gpipe", "pp": 2},
    {"schedule": "zero_bubble", "pp": 2},
    {"schedule": "chimera", "pp": 2},
    {"pp": 1, "dp": 2},
)
HELD_PLANS: tuple[dict[str, Any], ...] = (
    {"schedule": "onef1b", "pp": 2},
    {"schedule": "gpipe", "pp": 2},
    {"schedule": "onef1b", "pp": 3},
    {"schedule": "chimera", "pp": 4},
    {"pp": 1, "dp": 2},
)
ROWS, BATCH, STEPS = (1, 2, 4), 16, 7
ROUNDS = int(os.environ.get("ROUNDS", "3"))
TIME_BAR, MEMORY_BAR = 0.15, 0.10


def own_bytes(name: str) -> int:
    """Memory of this process in /proc: VmRSS is what it has, VmHWM the most that it had since `forget_peak`."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(name))


def forget_peak() -> int:
    """Starts a new peak, and returns what this worker has while it is idle."""
    Path("/proc/self/clear_refs").write_text("5")
    return own_bytes("VmRSS")


class Peaks(TrainerCallback):
    """Writes the peak of each rank into a file, at the end of training."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """All steps are done."""
        Path(self.folder, f"peak{dist.get_rank()}").write_text(str(own_bytes("VmHWM")))


def data(model: ModelFile) -> list[dict[str, Any]]:
    batch = example_for("example", model.build(), rows=BATCH * STEPS, length=model.positions)(0)
    return [{name: column[row] for name, column in batch.items()} for row in range(BATCH * STEPS)]


def planned(model: ModelFile, cluster: mw.Cluster, choice: dict[str, Any]) -> tuple[mw.Plan, str]:
    """A plan with these constraints, from a new profile, and the text of its file."""
    skeleton = mw.sketch(model.build)
    example = example_for("example", skeleton.model, rows=2, length=model.positions)(0)
    profile = mw.profile_model(skeleton.model, example, rows=ROWS, cluster=cluster)
    found = planners.plan(profile, cluster, batch=BATCH, planner="search", tensor=False, seconds=5.0, **choice)
    return found, planned_text(found, profile, cluster, batch=BATCH)


def train(model: ModelFile, text: str, workers: Workers, folder: str, steps: int = STEPS) -> float:
    """Trains as planned, and returns the median time of a step."""
    set_seed(0)
    Path(folder, "plan.json").write_text(text)
    copies = int(json.loads(text)["parallel"].get("dp", 1))
    args = mw.TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=BATCH // copies,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1000,
        parallel=str(Path(folder, "plan.json")),
    )
    more = {"callbacks": [Peaks(folder)], "workers": workers}
    result = mw.Trainer(mw.sketch(model.build), args, train_dataset=data(model), **more).train()
    return float(result.metrics["train_step_time"])


def shown(choice: dict[str, Any]) -> str:
    return " ".join(f"{name} {value}" for name, value in choice.items())


def times() -> float:
    """The mean error of predicted step times."""
    errors = []
    for name, model in TIMED.items():
        with Workers(2) as workers, tempfile.TemporaryDirectory() as folder:
            for choice in TIMED_PLANS:
                rounds = []
                for _ in range(ROUNDS):
                    found = discover(workers=2)
                    assert found is not None, "only rank 0 measures here"
                    plan, text = planned(model, found.cluster, choice)
                    rounds.append((plan.step_s, train(model, text, workers, folder)))
                ratio = median(predicted / measured for predicted, measured in rounds)
                errors.append(abs(ratio - 1))
                each = ", ".join(f"{1e3 * a:.0f}/{1e3 * b:.0f}" for a, b in rounds)
                print(f"{name:6} {shown(choice):28} predicted/measured {ratio:.2f}   (ms: {each})", flush=True)
    return mean(errors)


def memory() -> float:
    """The mean error of the predicted growth of workers."""
    errors = []
    core = mw.Device(f"core of {platform.machine()}", 8e9, {"fp32": 1e11}, 1e10)
    for name, model in HELD.items():
        for choice in HELD_PLANS:
            count = choice["pp"] * choice.get("dp", 1)
            cluster = mw.Cluster(mw.Link(1e-5, 1e9), devices=(core,) * count)
            plan, text = planned(model, cluster, choice)
            with Workers(count) as workers, tempfile.TemporaryDirectory() as folder:
                tiny = gpt(64, 8, 32)
                train(tiny, planned(tiny, cluster, choice)[1], workers, folder, steps=2)
                idle = workers.run(forget_peak)
                train(model, text, workers, folder, steps=2)
                grown = [int(Path(folder, f"peak{rank}").read_text()) - idle[rank] for rank in range(count)]
            wanted = [use.total - use.reserve for use in plan.memory] * choice.get("dp", 1)
            ratios = [a / b for a, b in zip(wanted, grown, strict=True)]
            errors.append(mean(abs(ratio - 1) for ratio in ratios))
            each = ", ".join(f"{a / 1e6:.0f}/{b / 1e6:.0f}" for a, b in zip(wanted, grown, strict=True))
            print(f"{name:6} {shown(choice):28} predicted/measured {mean(ratios):.2f}   (MB: {each})", flush=True)
    return mean(errors)


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
