"""The commands that a user runs after `meshwright plan`, as they can be copied."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

from meshwright.ir.cluster import Cluster
from meshwright.ir.plan.chosen_plan import Plan
from meshwright.ir.plan.plan import LOCAL_RANKS

FILE = "plan.json"


@dataclass(frozen=True)
class Planned:
    """What was planned, and from which inputs."""

    plan: Plan
    cluster: Cluster
    cluster_name: str
    model: str | None
    batch_function: str | None
    length: int | None
    precision: str
    rows: int | None
    """Rows of a step, if they are known."""
    output: Path | None


def next_commands(context: typer.Context, planned: Planned) -> Iterator[str]:
    """Yields commands: write the plan, simulate it, check it against one process, train."""
    name = shlex.quote(str(planned.output or FILE))
    if planned.output is None:
        yield f"{again(context)} -o {name}"
    yield f"meshwright simulate {name} --cluster {shlex.quote(planned.cluster_name)}"
    if planned.model is None:
        yield f"meshwright verify MODEL --plan {name}   (MODEL: what the profile was made from)"
        return
    model, started = shlex.quote(planned.model), max(planned.plan.ranks) + 1
    length = [f"--length {planned.length}"] if planned.length is not None else []
    if started <= LOCAL_RANKS:
        own = [f"--batch-function {planned.batch_function}"] if planned.batch_function else length
        yield " ".join(["meshwright verify", model, f"--plan {name}", *own])
    yield " ".join(
        [*_launcher(planned.cluster, started), "meshwright train", model, f"--plan {name}", *_training(planned), *length]
    )


def _training(planned: Planned) -> Iterator[str]:
    copies = int(planned.plan.parallel.get("dp", 1))
    if planned.rows is not None and planned.rows % copies == 0:
        yield f"--per-device-train-batch-size {planned.rows // copies}"
    if planned.precision in ("bf16", "fp16"):
        yield f"--{planned.precision}"
    if planned.plan.parallel.get("tp", 1) > 1 and planned.plan.parallel.get("tensor", "line") != "line":
        yield "--dataloader-drop-last"  # the ranks of a box divide rows: the short last step of an epoch may not divide
    yield "--dataset DATASET --max-steps 20" if planned.batch_function else "--max-steps 20"


def _launcher(cluster: Cluster, started: int) -> list[str]:
    """The launcher for several hosts; on one host Meshwright starts its workers itself."""
    hosts = {cluster.host_of[rank] for rank in range(started)} if cluster.hosts else {0}
    if len(hosts) == 1:
        return []
    each = max(host.devices for host in cluster.hosts)
    return [f"torchrun --nnodes {max(hosts) + 1} --node-rank N --nproc-per-node {each} --master-addr MASTER --no-python"]


def again(context: typer.Context) -> str:
    """Returns the command that was given, as a shell reads it."""
    words = ["meshwright", context.info_name or ""]
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        value = context.params.get(parameter.name or "")
        if source is None or source.name != "COMMANDLINE" or value is None or value is False:
            continue
        flag = [] if parameter.param_type_name == "argument" else [parameter.opts[0]]
        words += [*flag, *([] if value is True else [str(value)])]
    return " ".join(map(shlex.quote, words))
