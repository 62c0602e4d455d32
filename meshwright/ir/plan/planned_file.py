"""The file of a chosen plan, `plan.json`: what to run, its prediction, and the inputs of the planner.

    {"schema": 2, "kind": "plan",
     "parallel": {"pp": 2, "schedule": "listed", "microbatches": 8, "ranks": [3, 1]},
     "order": {...},
     "stages": [{"layers": [0, 3], "devices": [3], "width": 1, "recompute": 0.0}, ...],
     "predicted": {"step_s": 0.31, "lower_bound_s": 0.3, "peak_bytes": [2.1e9, 1.9e9]},
     "made_for": {"profile": {"digest": "...", "device": "a100"}, "cluster": {"digest": "..."}, "batch": 64, "precision": "bf16",
                  "length": 2048, "model": {"digest": "...", "text": "66 layers with 26950 MB of parameters"},
                  "parallel": {"digest": "...", "text": "as planned"}}}

The digest of `parallel` tells whether it was edited since: then the prediction, and the costs in it, are those of another plan.
`order` is the schedule itself, if its lists depend on costs, so that exactly the planned schedule runs. Any code that reads a
plan file reads this one too, and uses its `parallel` and `order`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.files.cluster_writer import cluster_to_toml
from meshwright.ir.input_limits import file_text, shown
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.plan.plan_file import PLANNED_SCHEMA, WHAT, plan_table, table_of
from meshwright.ir.reader import parsed

DIGITS = 16
"""Characters of a digest."""


@dataclass(frozen=True)
class PlannedFile:
    """The content of a plan file. `stages`, `predicted` and `made_for` are empty if no planner made it."""

    parallel: Parallel
    stages: tuple[Mapping[str, Any], ...] = ()
    predicted: Mapping[str, Any] | None = None
    made_for: Mapping[str, Any] | None = None

    @property
    def device(self) -> str:
        """The device that the prediction is for; empty if the file does not say."""
        profile = (self.made_for or {}).get("profile")
        return str(profile.get("device") or "") if isinstance(profile, Mapping) else ""

    def changes(self, now: Mapping[str, Any]) -> tuple[str, ...]:
        """Describes the inputs that differ from those that the plan was made for, and whether the plan was edited since."""
        made_for = self.made_for or {}
        edited = {"parallel": {**parallel_input(self.parallel), "text": "edited"}} if "parallel" in made_for else {}
        return changed_inputs(made_for, {**now, **edited})

    @classmethod
    def of(cls, data: Any) -> PlannedFile:
        """Returns the checked content of a plan file."""
        table = table_of(data)
        more = {key: data[key] for key in ("predicted", "made_for") if key in data}
        return cls(Parallel.of(table), tuple(data.get("stages", ())), **more)


def plan_file_json(
    parallel: Parallel,
    *,
    stages: Sequence[Mapping[str, Any]] = (),
    predicted: Mapping[str, Any] | None = None,
    made_for: Mapping[str, Any] | None = None,
) -> str:
    """Write a chosen plan as a file for `--plan`.

    Args:
        parallel: What to run. Its `order` is kept.
        stages: For each stage `layers` (first and last), `devices`, `width` and `recompute`.
        predicted: The prediction: `step_s`, `lower_bound_s`, `peak_bytes`, and any other JSON values.
        made_for: The inputs: `profile` and `cluster` with their digests (`digest_of`), `batch`, `precision`, `length`, `model`,
            and the digest of `parallel`.

    Returns:
        JSON text.

    Raises:
        MeshwrightError: A value would not be read back.

    Examples:
        >>> from meshwright import Parallel, plan_file_json, plan_from_json
        >>> text = plan_file_json(Parallel(pp=2, ranks=(3, 1)), predicted={"step_s": 0.5})
        >>> plan_from_json(text).ranks
        (3, 1)
    """
    table = plan_table(parallel)
    found: dict[str, Any] = {"schema": PLANNED_SCHEMA, "kind": "plan", "parallel": table}
    if "order" in table:
        found["order"] = table.pop("order")
    found |= {"stages": [dict(stage) for stage in stages], "predicted": dict(predicted or {}), "made_for": dict(made_for or {})}
    try:
        text = json.dumps(found, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise MeshwrightError(
            f"a value of the plan cannot be written as JSON: {error}", fix="numbers, texts, lists, tables"
        ) from error
    PlannedFile.of(parsed(text, WHAT))
    return text


def planned_file(path: str | Path) -> PlannedFile:
    """Read a plan file with everything that is in it.

    Args:
        path: A JSON file that `plan_file_json` or `plan_to_json` wrote.

    Returns:
        The plan, its prediction, and the inputs of the planner.

    Raises:
        MeshwrightError: The file cannot be read as a plan.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from meshwright import Parallel, plan_file_json, planned_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "plan.json")
        ...     _ = path.write_text(plan_file_json(Parallel(pp=2), predicted={"step_s": 0.5}))
        ...     planned_file(path).predicted["step_s"]
        0.5
    """
    return PlannedFile.of(parsed(file_text(Path(path), "the plan", fix="meshwright plan -o plan.json"), WHAT))


def is_plan_file(text: str) -> bool:
    """Returns whether a text looks like a plan file: an object that says so, or one with a table `parallel`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("kind", "plan" if "parallel" in found else None) == "plan"


def digest_of(value: str | Mapping[str, Any] | Sequence[Any]) -> str:
    """Returns a short digest of an input, for `made_for`. JSON text and the values in it have the same digest."""
    data = parsed(value, "an input of a plan") if isinstance(value, str) else value
    try:
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise MeshwrightError(f"{shown(value)} has no JSON form: {error}") from error
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def cluster_digest(cluster: Cluster) -> str:
    """Returns the digest of a cluster, for `made_for`."""
    return digest_of([cluster_to_toml(cluster)])


def cluster_input(cluster: Cluster) -> dict[str, Any]:
    """Returns what identifies a cluster in `made_for`."""
    kinds = ", ".join(dict.fromkeys(device.kind for device in cluster.devices if device.kind))
    text = f"{cluster.size} device{'s' * (cluster.size != 1)}" + (f" ({kinds})" if kinds else "")
    return {"digest": cluster_digest(cluster), "devices": cluster.size, "text": text}


def model_input(parameter_bytes: Sequence[float]) -> dict[str, str]:
    """Returns what identifies a model in `made_for`, from the bytes of the parameters of its layers."""
    sizes = [int(size) for size in parameter_bytes]
    return {"digest": digest_of(sizes), "text": f"{len(sizes)} layers with {sum(sizes) / 1e6:.4g} MB of parameters"}


def parallel_input(parallel: Parallel) -> dict[str, str]:
    """Returns what identifies a plan itself in `made_for`."""
    return {"digest": digest_of(plan_table(parallel)), "text": "as planned"}


def changed_inputs(made_for: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Describes the inputs that differ from those that a plan was made for. Inputs that only one side has are left out."""
    found = []
    for name in sorted(set(made_for) & set(now)):
        sides = (made_for[name], now[name])
        before, after = (side.get("digest") if isinstance(side, Mapping) else side for side in sides)
        if before == after:
            continue
        words = [side["text"] if isinstance(side, Mapping) and isinstance(side.get("text"), str) else None for side in sides]
        if None not in words and words[0] == words[1]:
            found.append(f"{name} is another one, although both are described as {shown(words[0])}")
            continue
        before, after = (before, after) if None in words else words
        found.append(f"{name} was {shown(before)}, is {shown(after)}")
    return tuple(found)
