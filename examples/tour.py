"""A tour without a GPU: draw a schedule, prove it, break it, train a small GPT under it for real, stop, go on, look at the times.

`make demo` runs this; steps print the commands that do the same.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console

from meshwright import check, even_costs, lower, measure, schedules, simulate
from meshwright.report.measured_text import measured_text, prediction
from meshwright.report.perfetto import both_to_perfetto
from meshwright.report.terminal import timeline_text
from meshwright.train.job_file import Job, read_job

FOLDER = Path("build/demo")
TRACE = FOLDER / "trace.json"
STEPS = 30
JOB = """schema = 1
model = "gpt-small"
dataset = "stdlib"

[parallel]
pp = 4
schedule = "chimera"
microbatches = 4

[arguments]
output_dir = "build/demo"
max_steps = {steps}
per_device_train_batch_size = 16
learning_rate = 3e-3
lr_scheduler_type = "constant_with_warmup"
warmup_steps = 5
logging_steps = 5
save_steps = {save}
report_to = "none"
"""
CONSOLE = Console(highlight=False, soft_wrap=True)


def main() -> None:
    """Six steps."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)

    step("1. Who does what when, on four workers", "meshwright show chimera --workers 4 --microbatches 4")
    chimera = schedules.build("chimera", workers=4, microbatches=4)
    CONSOLE.print(timeline_text(chimera, simulate(chimera, even_costs(stages=4, workers=4))), markup=False, soft_wrap=True)

    step(
        "2. Proved before anything runs; a wrong order is shown",
        "meshwright show chimera --format json -o chimera.json",
        "meshwright check chimera.json",
    )
    CONSOLE.print(str(check(chimera)))
    CONSOLE.print(str(check(broken())), markup=False)

    step("3. Predicted against measured, on this machine", f"meshwright measure build/demo/job.toml --trace {TRACE}")
    trainer = job(STEPS, STEPS).trainer()
    found = measure(trainer)
    TRACE.write_text(both_to_perfetto(prediction(found), found.timeline))
    CONSOLE.print(measured_text(found), markup=False, soft_wrap=True)
    if (cores := os.cpu_count() or 1) < chimera.workers:
        CONSOLE.print(f"the prediction gives every worker a core of its own; here {chimera.workers} workers share {cores}")
    CONSOLE.print(f"wrote {TRACE}, prediction and measurement side by side: open it at ui.perfetto.dev")

    step(f"4. Trained for real: {STEPS} steps on Python's own sources", "meshwright train build/demo/job.toml")
    trainer.train()
    told(trainer)

    step(
        f'5. Gone on from its checkpoint to step {2 * STEPS}: resume = "last" in the file', "meshwright train build/demo/job.toml"
    )
    trainer.args = job(2 * STEPS, STEPS).trainer().args
    trainer.train(resume_from_checkpoint=True)
    told(trainer)

    step("6. The model, as from_pretrained reads it", "meshwright train build/demo/job.toml --save-model build/demo/model")
    trainer.save_model(str(FOLDER / "model"))
    CONSOLE.print(f"wrote {', '.join(sorted(path.name for path in (FOLDER / 'model').iterdir()))}; log: {FOLDER / 'log.jsonl'}")
    CONSOLE.print("\nTry next: meshwright verify gpt --schedule zbv --pp 4 --microbatches 8")
    CONSOLE.print("          meshwright train llama-small --pp 2 --dp 2 --max-steps 20 --logging-steps 5")
    CONSOLE.print("          meshwright compare --workers 4 --microbatches 8 --memory 5")


def job(steps: int, save: int) -> Job:
    """The job of the tour, written down as a file first."""
    path = FOLDER / "job.toml"
    path.write_text(JOB.format(steps=steps, save=save))
    return read_job(path)


def told(trainer: Any) -> None:
    """The loss, from first to last."""
    losses = [f"{entry['loss']:.2f}" for entry in trainer.state.log_history if "loss" in entry]
    CONSOLE.print(f"loss {' '.join(losses)}")


def step(title: str, *commands: str) -> None:
    """A headline, and the commands that do the same, where there are any."""
    CONSOLE.rule(f"[bold]{title}")
    CONSOLE.print("\n".join(f"[dim]$ {command}" for command in commands) + "\n" * bool(commands))


def broken() -> Any:
    """Chimera with two sends of worker 1 in the wrong order."""
    lowered = lower(schedules.build("chimera", workers=4, microbatches=4))
    entries = list(lowered.lists[1])
    a, b = [i for i, entry in enumerate(entries) if ">" in str(entry)][:2]
    entries[a], entries[b] = entries[b], entries[a]
    return replace(lowered, period=(lowered.lists[0], tuple(entries), *lowered.lists[2:]))


if __name__ == "__main__":
    main()
