"""Predicted against measured: every run of a chosen plan adds a line, and the next plan shows how far earlier ones were off.

The lines are in `meshwright/predictions.jsonl` of the user's cache folder (XDG_CACHE_HOME, else ~/.cache). They never change
which plan is chosen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from statistics import median

from meshwright.ir.plan.chosen_plan import Plan
from meshwright.ir.plan.planned_file import PlannedFile, plan_file_json

KEPT = 20
"""The number of latest runs of a device that count."""


def log_file() -> Path:
    """The file with the predictions of this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "meshwright", "predictions.jsonl")


def keep_prediction(device: str, predicted_s: float, measured_s: float) -> None:
    """Adds a run. Does nothing if the file cannot be written, because the run itself was successful."""
    line = json.dumps({"device": device, "predicted_s": predicted_s, "measured_s": measured_s})
    try:
        log_file().parent.mkdir(parents=True, exist_ok=True)
        with log_file().open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError:
        return


def keep_measured(
    planned: PlannedFile, metrics: dict[str, float], folder: Path | None, *, held: bool = True, first: bool = True
) -> None:
    """Adds the prediction of a plan to the metrics of its run, if the plan was made for this run (`held`).

    The first rank keeps it for later plans, if the plan names its device, and writes the measured plan into `folder`.
    """
    predicted, measured_s = dict(planned.predicted or {}), metrics.get("train_step_time", 0.0)
    if not predicted.get("step_s") or measured_s <= 0:
        return
    if held:
        metrics["predicted_step_time"], metrics["predicted_error"] = predicted["step_s"], predicted.get("error", 0.0)
    if first and held and planned.device:
        keep_prediction(planned.device, predicted["step_s"], measured_s)
    if first and folder is not None:
        measured = {**predicted, "measured_step_s": measured_s}
        text = plan_file_json(planned.parallel, stages=planned.stages, predicted=measured, made_for=planned.made_for)
        (folder / "plan.json").write_text(text, encoding="utf-8")


def earlier_errors(device: str) -> list[float]:
    """Returns by how much the last predictions for a device were off, each as `off_by` says."""
    try:
        lines = log_file().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    return [error for line in lines if (error := _error(line, device)) is not None][-KEPT:]


def with_earlier_errors(plan: Plan, device: str) -> Plan:
    """Returns a plan whose band is at least the median error of earlier predictions for its device, and says so."""
    errors = earlier_errors(device)
    if not errors:
        return plan
    runs = f"{len(errors)} earlier run{'s' if len(errors) > 1 else ''} on {device}"
    note = f"predictions of {runs} were off by {median(errors):.0%} (median)"
    return replace(plan, notes=(*plan.notes, note), error=max(plan.error, median(errors)))


def _error(line: str, device: str) -> float | None:
    """Returns the error of one line; None for other devices and for lines that are damaged."""
    try:
        found = json.loads(line)
        if found["device"] != device:
            return None
        error = off_by(float(found["predicted_s"]), float(found["measured_s"]))
    except (ValueError, TypeError, KeyError, ZeroDivisionError, RecursionError):
        return None
    return error if isfinite(error) and error >= 0 else None


def off_by(predicted_s: float, measured_s: float) -> float:
    """Returns the error of a prediction: 0.25 if the longer of the two times is 25 % longer than the other one."""
    return max(predicted_s / measured_s, measured_s / predicted_s) - 1.0


def band_of(step_s: float, error: float) -> tuple[float, float]:
    """Returns the shortest and the longest measured step that are off by no more than `error`."""
    return step_s / (1.0 + error), step_s * (1.0 + error)


def comparison_line(predicted_s: float, measured_s: float, error: float) -> str:
    """Returns predicted against measured in words."""
    line = f"plan: predicted step {predicted_s:.4g} s"
    low, high = band_of(predicted_s, error)
    if error:
        line += f" ({low:.4g} to {high:.4g} s)"
    line += f", measured {measured_s:.4g} s"
    if predicted_s <= 0 or measured_s <= 0:
        return line
    side = "short" if predicted_s < measured_s else "long"
    where = "" if not error else ", inside the band" if low <= measured_s <= high else ", outside the band"
    return f"{line}: too {side} by {off_by(predicted_s, measured_s):.0%}{where}"


def not_compared_line(predicted_s: float, changes: Sequence[str]) -> str:
    """Returns why a prediction is not compared with a run."""
    return f"plan: predicted step {predicted_s:.4g} s, not compared: the plan was made for other inputs: {'; '.join(changes)}"
