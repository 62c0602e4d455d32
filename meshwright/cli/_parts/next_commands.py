"""The commands that a user runs after `meshwright plan`, as they can be copied."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import typer

from meshwright.ir.cluster import Cluster
from meshwright.ir.plan.chosen_plan import Plan
from meshwright.ir.plan.plan import LOCAL_RANKS

FILE = "plan.json"
PLACEHOLDER = "DATASET"
"""Stands for a data set that only the user knows."""
_ROWS = "rows for this model, for example package.module:function"


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
    dataset: str | None = None
    """The data set that `train` has to be told; None if the model has its own."""
    draws: Callable[[], bool] = lambda: True  # as of an unknown model
    """Whether the model draws random numbers."""

    @property
    def is_comparable(self) -> bool:
        """Whether `verify` can compare the plan with one process: devices that share rows draw their own random numbers."""
        return max(self.plan.parallel.get("width", (1,))) == 1 or not self.draws()


def next_commands(context: typer.Context, planned: Planned) -> Iterator[str]:
    """Yields commands: write the plan, simulate it, check it against one process, train."""
    name = shlex.quote(str(planned.output or FILE))
    if planned.output is None:
        yield f"{again(context)} -o {name}"
    yield f"meshwright simulate {name} --cluster {shlex.quote(planned.cluster_name)}"
    condition = "" if planned.is_comparable else "without dropout, because devices that share rows draw their own numbers"
    if planned.model is None:
        where = "; ".join(filter(None, ["MODEL: what the profile was made from", condition]))
        yield f"meshwright verify MODEL --plan {name}   ({where})"
        return
    model, started = shlex.quote(planned.model), max(planned.plan.ranks) + 1
    length = [f"--length {planned.length}"] if planned.length is not None else []
    if started <= LOCAL_RANKS:
        own = [f"--batch-function {planned.batch_function}"] if planned.batch_function else length
        yield " ".join(["meshwright verify", model, f"--plan {name}", *own, *([f"  # {condition}"] if condition else [])])
    train = " ".join(["meshwright train", model, f"--plan {name}", *_training(planned), *length])
    unknown = [f"DATASET: {_ROWS}"] if planned.dataset == PLACEHOLDER else []
    for launcher, notes in _launchers(planned.cluster, started):
        notes = [*notes, *unknown]
        yield " ".join([*launcher, train, *([f"  # {'; '.join(notes)}"] if notes else [])])


def _training(planned: Planned) -> Iterator[str]:
    copies = int(planned.plan.parallel.get("dp", 1))
    if planned.rows is not None and planned.rows % copies == 0:
        yield f"--per-device-train-batch-size {planned.rows // copies}"
    if planned.precision in ("bf16", "fp16"):
        yield f"--{planned.precision}"
    if planned.plan.parallel.get("tp", 1) > 1 and planned.plan.parallel.get("tensor", "line") != "line":
        yield "--dataloader-drop-last"  # the ranks of a box divide rows: the short last step of an epoch may not divide
    yield f"--dataset {shlex.quote(planned.dataset)} --max-steps 20" if planned.dataset else "--max-steps 20"


def _launchers(cluster: Cluster, started: int) -> Iterator[tuple[list[str], list[str]]]:
    """Yields a launcher for each run of hosts with equally many devices, and notes about it.

    On one host Meshwright starts its workers itself. torchrun numbers ranks host by host, so that rank r is device r of the
    cluster only if each host starts as many processes as it has devices.
    """
    last = cluster.host_of[started - 1] if cluster.hosts else 0
    if last == 0:
        yield [], []
        return
    first = 0
    for count, group in groupby(host.devices for host in cluster.hosts[: last + 1]):
        end = first + len(list(group)) - 1
        host, where = (str(first), []) if first == end else ("N", [f"N: {first} to {end}, the number of the host"])
        command = f"torchrun --nnodes {last + 1} --node-rank {host} --nproc-per-node {count} --master-addr MASTER --no-python"
        yield [command], [*where, "MASTER: the address of host 0"]
        first = end + 1


def again(context: typer.Context) -> str:
    """Returns the command that was given, as a shell reads it."""
    words = ["meshwright", context.info_name or ""]
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        value = context.params.get(parameter.name or "")
        given = source is not None and source.name == "COMMANDLINE" and value is not None
        names = [*parameter.secondary_opts, ""] if value is False else parameter.opts
        if not given or not names[0]:
            continue
        flag = [] if parameter.param_type_name == "argument" else [names[0]]
        words += [*flag, *([] if isinstance(value, bool) else [str(value)])]
    return " ".join(map(shlex.quote, words))
