"""Predicted against measured: every run of a chosen plan adds a line, and the next plan shows how far earlier ones were off.

The lines are in `meshwright/predictions.jsonl` of the user's cache folder (XDG_CACHE_HOME, else ~/.cache). They never change
which plan is chosen.
"""

from __future__ import annotations

import json
import os
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


def keep_measured(planned: PlannedFile, folder: Path, metrics: dict[str, float], *, first: bool) -> None:
    """Adds the prediction of a chosen plan to the metrics of its run. The first rank keeps it, and writes the plan."""
    predicted, measured_s = dict(planned.predicted or {}), metrics.get("train_step_time", 0.0)
    if not predicted.get("step_s") or measured_s <= 0:
        return
    metrics["predicted_step_time"], metrics["predicted_error"] = predicted["step_s"], predicted.get("error", 0.0)
    if not first:
        return
    inputs = dict(planned.made_for or {})
    keep_prediction(dict(inputs.get("profile", {})).get("device", ""), predicted["step_s"], measured_s)
    text = plan_file_json(
        planned.parallel,
        stages=planned.stages,
        predicted={**predicted, "measured_step_s": measured_s},
        made_for=inputs,
    )
    (folder / "plan.json").write_text(text, encoding="utf-8")


def earlier_errors(device: str) -> list[float]:
    """Returns by how much the last predictions for a device were off, as shares of the measured times."""
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
        error = abs(float(found["predicted_s"]) / float(found["measured_s"]) - 1.0)
    except (ValueError, TypeError, KeyError, ZeroDivisionError, RecursionError):
        return None
    return error if isfinite(error) else None


def comparison_line(predicted_s: float, measured_s: float, error: float) -> str:
    """Returns predicted against measured in words."""
    off = predicted_s / measured_s - 1.0 if measured_s > 0 else 0.0
    return f"plan: predicted step {predicted_s:.4g} s (+-{error:.0%}), measured {measured_s:.4g} s: {off:+.0%}"
