"""Terminal output of a run: phases and logs while it runs, and a summary at the end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli._parts import inputs, outputs

if TYPE_CHECKING:
    from meshwright.train.trainer import Trainer

TraceFile = Annotated[
    Path | None,
    inputs.output_option("--trace", help="Write a Perfetto trace of steps 3 to 6, and keep the measurement."),
]


def follow(trainer: Trainer, trace: Path | None, *, as_json: bool) -> None:
    """Makes a trainer show its start and its logs, and trace some steps if asked."""
    from meshwright.report.progress import Stream
    from meshwright.train.loop.callbacks import TextLines
    from meshwright.train.loop.traced_steps import Traced

    trainer.add_callback(TextLines(Stream.STDERR if as_json else Stream.STDOUT))
    if trace is not None:
        if trainer.is_world_process_zero():
            outputs.refuse_output(trace)
        trainer.traced = Traced(Path(os.path.abspath(trace)))


def report(trainer: Trainer, output: Any, trace: Path | None, *, as_json: bool) -> None:
    """Prints the loss, the speed and the peak memory of each rank."""
    from meshwright.report.prediction_log import comparison_line, not_compared_line
    from meshwright.report.progress import size_text

    history, peaks, metrics = trainer.state.log_history, trainer.peak_bytes, output.metrics
    if as_json:
        found = {"steps": output.global_step, "loss": output.training_loss, "log": history}
        changed = {"other_inputs": list(trainer.other_inputs)} if trainer.other_inputs else {}
        typer.echo(json.dumps({**found, "metrics": metrics, "peak_bytes": peaks, **changed}))
        return
    losses = [entry["loss"] for entry in history if "loss" in entry] or [output.training_loss]
    plan = trainer.args.plan
    rate = metrics.get("train_samples_per_second", 0.0)
    typer.echo(
        f"{plan.schedule}  {', '.join(plan.degrees)}, {plan.microbatches} microbatches: {output.global_step} steps, "
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {rate:.0f} rows/s"
    )
    tokens = [f"{metrics[name]:,.0f} tokens/s" for name in ("train_tokens_per_second",) if name in metrics]
    step = [f"step {metrics['train_step_time']:.4g} s (median)", *tokens, f"{metrics['total_flos']:.3g} operations"]
    typer.echo(", ".join(step))
    if "predicted_step_time" in metrics:
        typer.echo(comparison_line(metrics["predicted_step_time"], metrics["train_step_time"], metrics["predicted_error"]))
    planned = trainer.args.planned
    if planned is not None and trainer.other_inputs and (step_s := (planned.predicted or {}).get("step_s")):
        typer.echo(not_compared_line(step_s, trainer.other_inputs))
    named = f"of ranks {', '.join(map(str, plan.members))}" if plan.ranks else "per rank"
    typer.echo(f"peak memory {named}: {', '.join(map(size_text, peaks))}")
    if trace is not None:
        typer.echo(f"trace: {trace} (ui.perfetto.dev); meshwright measure {trainer.folder} shows where the time went")
    typer.echo(f"log: {trainer.folder / 'log.jsonl'}")
