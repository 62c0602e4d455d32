"""The file form of a plan (`Parallel`): JSON or TOML, with a schema number.

schema = 1
[parallel]
pp = 4
schedule = "chimera"
microbatches = 8

A plan that contains its own schedule has it next to the table, as `order`, in the form of a schedule file. A plan that a
planner chose has schema 2 and more keys (`planned_file.py`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.files.schedule_json import schedule_to_json
from meshwright.ir.input_limits import file_text, shown, toml
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.plan.plan_order import order_of
from meshwright.ir.plan.plan_stages import refuse_other_stages
from meshwright.ir.plan.plan_tensor import TENSOR_FIELDS
from meshwright.ir.reader import Reader, count, number, parsed, positive, rows
from meshwright.ir.reader import table as as_table

SCHEMA = 1
PLANNED_SCHEMA = 2
KEYS = frozenset({"schema", "parallel", "order"})
PLANNED_KEYS = KEYS | {"kind", "stages", "predicted", "made_for"}
WHAT = "a plan file"
AUTO = "auto"
"""The value of `parallel=` that chooses a plan at the start of a run."""

_log = logging.getLogger(__name__)


def plan_to_json(parallel: Parallel) -> str:
    """Write a plan as a file for `--plan`.

    Args:
        parallel: The plan.

    Returns:
        JSON text.

    Examples:
        >>> from meshwright import Parallel, plan_from_json, plan_to_json
        >>> plan = Parallel(pp=2, schedule="gpipe", microbatches=4)
        >>> plan_from_json(plan_to_json(plan)) == plan
        True
    """
    table = plan_table(parallel)
    order = {"order": table.pop("order")} if "order" in table else {}
    return json.dumps({"schema": SCHEMA, "parallel": table, **order}, indent=1)


def plan_table(given: Parallel | Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plan as JSON values; leaves out fields that are not used."""
    found = given.given() if isinstance(given, Parallel) else dict(given)
    order, costs, ranks = found.pop("order", None), found.pop("costs", ()), found.pop("ranks", ())
    if found.get("tp", 1) == 1 and not found.get("box"):
        found = {name: value for name, value in found.items() if name not in TENSOR_FIELDS}
    if order is not None:
        found["order"] = order if isinstance(order, Mapping) else json.loads(schedule_to_json(order))
    if ranks:
        found["ranks"] = ranks
    if costs:
        found["costs"] = [row if isinstance(row, Mapping) else asdict(row) for row in costs]
    return found


def plan_from_json(text: str) -> Parallel:
    """Read a plan from its file form.

    Args:
        text: The JSON text.

    Returns:
        The plan.

    Raises:
        MeshwrightError: The text is not a plan file, or asks for something that does not exist.

    Examples:
        >>> from meshwright import plan_from_json
        >>> plan_from_json('{"schema": 1, "parallel": {"pp": 4, "schedule": "chimera"}}').pp
        4
    """
    return Parallel.of(table_of(parsed(text, WHAT)))


def read_plan(path: str | Path) -> dict[str, Any]:
    """Reads a plan file and returns its keys as written."""
    path = Path(path)
    text = file_text(path, "the plan", fix="parallel=dict(pp=2), or a JSON or TOML file")
    found = table_of(toml(text, f"the plan {path}") if path.suffix == ".toml" else parsed(text, WHAT))
    Parallel.of(found)
    say_code(path, found.get("schedule"))
    return found


def say_code(path: Path, *names: object) -> None:
    """Warns on rank 0 that a file names functions which will run. The file may come from someone else."""
    named = [name for name in names if isinstance(name, str) and ":" in name]
    if named and os.environ.get("RANK", "0") == "0":
        _log.warning("%s names %s: training imports and runs this code with your rights", path, " and ".join(named))


def asked(given: Parallel | Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """Returns the keys of `parallel=`: a Parallel, a mapping, JSON text or a plan file. None means one process."""
    if given is None:
        return {}
    if isinstance(given, Parallel):
        return given.given()
    if is_auto(given):
        raise MeshwrightError(
            f"parallel={given!r} is chosen by a Trainer, which knows its data and batch size",
            fix="meshwright plan MODEL -o plan.json, then this file",
        )
    if isinstance(given, str) and given.lstrip().startswith("{"):
        data = parsed(given, "a plan")
        given = table_of(data) if isinstance(data, dict) and "parallel" in data else data
    if isinstance(given, str | Path):
        return read_plan(given)
    Parallel.of(given)
    return dict(given)


def table_of(data: Any) -> dict[str, Any]:
    """Returns the `parallel` table of the file, together with the `order` next to it. Raises if anything else is wrong."""
    planned = isinstance(data, Mapping) and (data.get("schema") == PLANNED_SCHEMA or "kind" in data)
    keys, kind = (PLANNED_KEYS, "plan") if planned else (KEYS, None)
    read = Reader(data, WHAT, kind=kind, schema=PLANNED_SCHEMA, keys=keys)
    stages = read("stages", lambda value: [checked_stage(stage) for stage in rows(value)], [])
    read("predicted", checked_prediction, {})
    read("made_for", as_table, {})
    found = dict(read("parallel", as_table))
    if "schema" not in data:
        raise MeshwrightError(f"{WHAT} has no 'schema'", fix=f'"schema": {SCHEMA}')
    if "order" in data:
        if found.get("order") is not None:
            raise MeshwrightError(f"{WHAT} has an order in 'parallel' and another one next to it", fix="give only one of them")
        found["order"] = read("order", order_of)
    if stages:
        refuse_other_stages(stages, Parallel.of(found))
    return found


def checked_stage(value: Any) -> Mapping[str, Any]:
    """Returns a stage of a chosen plan: its layers, the devices that run it, and how much of it is recomputed."""
    stage = as_table(value)
    if unknown := sorted(set(stage) - {"layers", "devices", "width", "recompute"}):
        raise MeshwrightError(f"a stage has no {', '.join(map(repr, unknown))[:200]}", fix="layers, devices, width, recompute")
    first, last = (count(layer) for layer in rows(stage["layers"]))
    devices = [count(device) for device in rows(stage["devices"])]
    if first > last:
        raise MeshwrightError(f"a stage begins with layer {first} and ends with layer {last}", fix="[first, last]")
    if not devices or len(set(devices)) < len(devices):
        raise MeshwrightError(f"a stage runs on the devices {shown(devices)}", fix="at least one device, each of them once")
    if not 1 <= positive(stage.get("width", 1)) <= len(devices):
        raise MeshwrightError(f"a stage of {len(devices)} devices has the width {stage['width']}", fix=f"at most {len(devices)}")
    if number(stage.get("recompute", 0.0)) > 1:
        raise MeshwrightError(f"a stage recomputes a share of {shown(stage['recompute'])}", fix="between 0 and 1")
    return stage


def checked_prediction(value: Any) -> Mapping[str, Any]:
    """Returns what was predicted for a plan. Its times and bytes are numbers; it may have more keys."""
    found = as_table(value)
    for name in ("step_s", "lower_bound_s", "update_s", "error"):
        number(found.get(name, 0.0))
    for name in ("peak_bytes", "needed_bytes"):
        for size in rows(found.get(name, [])):
            number(size)
    return found


def is_plan_path(given: object) -> bool:
    """Returns whether `parallel=` names a plan file in JSON, which may have a prediction. TOML files have none."""
    return isinstance(given, str | Path) and str(given).endswith(".json") and not str(given).lstrip().startswith("{")


def is_auto(given: object) -> bool:
    """Returns whether `parallel=` asks for a chosen plan: `auto`, or `auto:CLUSTER` with a cluster file or preset."""
    return isinstance(given, str) and given.partition(":")[0] == AUTO


def auto_cluster(given: str) -> str | None:
    """Returns the cluster of `auto:CLUSTER`; None if it is to be measured."""
    name = given.partition(":")[2].strip()
    if not name and given != AUTO:
        raise MeshwrightError(f"parallel={given!r} names no cluster", fix='parallel="auto", or "auto:cluster.toml"')
    return name or None
