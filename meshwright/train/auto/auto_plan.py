"""Choose the plan of a run: measure the cluster, profile the model, search, on one rank for all.

    local run    this process measures its machine with workers, profiles the model and searches
    torchrun     all ranks measure links and devices together; rank 0 profiles and searches, and sends its plan to the others

The plan travels as the text of a plan file. If rank 0 finds no plan, all ranks raise its error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from meshwright import planners
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster, Device
from meshwright.ir.files.cluster_file import read_cluster
from meshwright.ir.plan.plan_file import auto_cluster
from meshwright.ir.plan.planned_file import PlannedFile
from meshwright.ir.reader import parsed
from meshwright.planners._planned_text import planned_text
from meshwright.report.prediction_log import with_earlier_errors
from meshwright.runtime import device as devices
from meshwright.runtime.discover.device_speed import device_facts
from meshwright.runtime.discover.discover import discover, measure_ranks
from meshwright.runtime.json_exchange import all_gather_json, broadcast_json
from meshwright.runtime.launch.workers import attach
from meshwright.runtime.stage.batch import Given
from meshwright.runtime.transport.choose import host_identity
from meshwright.train.arguments import TrainingArguments
from meshwright.train.auto.found_devices import differences
from meshwright.train.auto.plan_refusal import PlanRefusal
from meshwright.train.optimizer.elementwise import is_elementwise
from meshwright.train.profiling.profile_model import profile_model
from meshwright.train.profiling.profile_rows import rows_to_profile
from meshwright.train.setup.where import launched

_log = logging.getLogger(__name__)

SECONDS = 10.0
"""The time limit of a search in seconds."""


@dataclass(frozen=True)
class AutoRequest:
    """The model, batch and options that a plan is chosen for."""

    model: nn.Module
    """The model; on `meta` it needs no memory."""
    example: Given
    rows_per_device: int
    """Rows of a step for each device of the cluster; the batch of a step is this times the devices."""
    precision: str = "fp32"
    optimizer: str = "adamw"
    cluster: str | None = None
    """A cluster file or preset; None measures the machine or the job."""
    epoch_rows: int = 0
    """The rows of an epoch, if its last step may be short."""
    divisible: bool = True
    """Whether the optimizer may step on parts of parameters: plans with ZeRO or tensor ranks need that."""


def auto_request(
    args: TrainingArguments, model: Any, example: Given, epoch_rows: int | None = None, own_optimizer: object = None
) -> AutoRequest:
    """Returns what a Trainer with these arguments asks for.

    `epoch_rows` is the size of the data set, if that is known; `own_optimizer` the class that is used instead of `args.optim`.
    """
    if not isinstance(model, nn.Module):
        raise MeshwrightError(
            f'parallel="auto" needs one module, got {type(model).__name__}: the cost of a list of layers is not known',
            fix="nn.Sequential(*layers), or parallel=dict(pp=2)",
        )
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    state = "sgd-momentum" if str(args.optim).startswith("sgd") else "adamw"
    cluster = auto_cluster(str(args.auto))
    last = 0 if args.dataloader_drop_last else epoch_rows or 0
    divisible = is_elementwise(str(args.optim) if own_optimizer is None else own_optimizer)
    return AutoRequest(model, example, rows, args.precision.compute, state, cluster, last, divisible)


def batch_of(planned: PlannedFile) -> int:
    """Returns the rows of a step that a plan was chosen for."""
    return int((planned.made_for or {})["batch"])


def chosen_plan(request: AutoRequest) -> PlannedFile:
    """Returns the plan for this run. All ranks of a torchrun job call this together and get the same plan."""
    if dist.is_initialized():
        text = _agreed(request)
    elif launched():
        with attach():
            text = _agreed(request)
    else:
        cluster = _local_cluster(request.cluster)
        text = plan_text(request, cluster)
        if request.cluster is not None:
            here = devices.choose()
            _compare(request.cluster, cluster, text, [device_facts(here, cluster.size)] * cluster.size)
    return PlannedFile.of(parsed(text, "the chosen plan"))


def plan_text(request: AutoRequest, cluster: Cluster) -> str:
    """Returns the plan for a cluster as the text of a plan file."""
    batch = request.rows_per_device * cluster.size
    profile = profile_model(
        request.model,
        request.example,
        rows=rows_to_profile(cluster, batch=batch, rows=None),
        cluster=cluster,
        precision=request.precision,
        optimizer=request.optimizer,
    )
    refusal = PlanRefusal(request.model, request.example, request.epoch_rows % batch)
    found = planners.plan(
        profile,
        cluster,
        batch=batch,
        planner="search",
        tensor=request.divisible,
        zero=request.divisible,
        seconds=SECONDS,
        refusal=refusal,
    )
    return planned_text(with_earlier_errors(found, profile.device), profile, cluster, batch=batch)


def _agreed(request: AutoRequest) -> str:
    """Returns the plan of rank 0, on all ranks of the process group."""
    name = request.cluster
    if name is None:
        cluster, facts = _measured(), []
    else:
        cluster, facts = None, _facts()

    def planned() -> str:
        """Called on rank 0, which alone needs the file of a named cluster."""
        here = cluster or _named(str(name))
        return _compare(name or "", here, plan_text(request, here), facts)

    answer = _attempt(planned) if dist.get_rank() == 0 else {}
    found: dict[str, Any] = broadcast_json(answer)
    if "text" not in found:
        raise MeshwrightError(found["what"], fix=found["fix"])
    return str(found["text"])


def _attempt(work: Callable[[], str]) -> dict[str, Any]:
    """Returns the text of a plan, or the error that all ranks raise."""
    try:
        return {"text": work()}
    except MeshwrightError as error:
        return {"what": error.what, "fix": error.fix}


def _measured() -> Cluster | None:
    """Measures the cluster of the job, on all ranks together. Returns it on rank 0, None on the others."""
    found = measure_ranks(devices.choose(dist.get_rank()))
    return None if found is None else found.cluster


def _named(name: str) -> Cluster:
    """Returns the cluster of this name, which must not have more devices than the job has ranks."""
    cluster, world = read_cluster(Path(name)), dist.get_world_size()
    if cluster.size > world:
        raise MeshwrightError(
            f"the cluster {name} has {cluster.size} devices, but the job has {world} ranks",
            fix=f"torchrun with {cluster.size} ranks, or a cluster of {world} devices",
        )
    return cluster


def _facts() -> list[dict[str, Any]]:
    """Returns kind and memory of the device of each rank, on all ranks."""
    homes: list[str] = all_gather_json(host_identity() or f"rank {dist.get_rank()}")
    rank = dist.get_rank()
    found: list[dict[str, Any]] = all_gather_json(device_facts(devices.choose(rank), homes.count(homes[rank])))
    return found


def _compare(name: str, cluster: Cluster, text: str, facts: Sequence[dict[str, Any]]) -> str:
    """Returns the text of a plan. Warns if devices are of another kind than the cluster says; raises if they are too small."""
    planned = PlannedFile.of(parsed(text, "the chosen plan"))
    for note in differences(name, cluster, planned, [Device(**fact) for fact in facts]):
        _log.warning(note)
    return text


def _local_cluster(name: str | None) -> Cluster:
    if name is not None:
        return read_cluster(Path(name))
    found = discover()
    assert found is not None, "a local run sees what was measured"
    return found.cluster
