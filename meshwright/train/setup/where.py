"""Where training runs: in this process, on local workers, or on the ranks that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import Parallel, refuse_crowd
from meshwright.runtime import device as devices
from meshwright.runtime.launch.torchrun import hosts_store
from meshwright.runtime.launch.worker_main import MARK
from meshwright.runtime.launch.workers import Workers, attach, process_group
from meshwright.runtime.started_ranks import started


def launched() -> bool:
    """Returns whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def refuse_world(parallel: Parallel) -> None:
    """Raises if the degrees of a plan do not fit the job, before any process is started or any group is joined."""
    if launched() or dist.is_initialized():
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
        if parallel.ranks:
            _refuse_ranks(parallel, world)
        elif world != parallel.processes:
            raise MeshwrightError(
                f"the plan needs {' x '.join(parallel.degrees)} = {parallel.processes} ranks, but the job has {world}",
                fix=f"torchrun --nproc-per-node {parallel.processes}, other degrees, or ranks=... to leave some idle",
            )
    else:
        refuse_crowd(parallel.started)


def _refuse_ranks(parallel: Parallel, world: int) -> None:
    """Raises if the job lacks a rank that the plan names, or if ranks are idle in a process group of the user."""
    if world < parallel.started:
        raise MeshwrightError(
            f"the plan runs on rank {max(parallel.ranks)}, but the job has {world} ranks",
            fix=f"torchrun --nproc-per-node {parallel.started}, or other ranks",
        )
    if not dist.is_initialized() and 0 not in parallel.ranks and hosts_store(0):
        raise MeshwrightError(
            "rank 0 is idle, but the other ranks need its process: no launcher hosts the store of this job",
            fix="torchrun, or ranks that contain 0",
        )
    if dist.is_initialized() and world != parallel.processes:
        raise MeshwrightError(
            f"the plan runs on {parallel.processes} ranks, but the process group of this script has {world}: idle ranks cannot "
            "leave it",
            fix=f"leave out init_process_group, or torchrun --nproc-per-node {parallel.processes} with ranks below that",
        )


def run_on_ranks(work: Callable[..., Any], *args: Any, parallel: Parallel, workers: Callable[[], Workers]) -> list[Any]:
    """Calls `work(*args)` on every rank of a plan.

    Returns the results of all ranks, lowest rank first, if this process started them. Otherwise it returns only its own result.
    An idle rank of torchrun waits for the others and ends its process.
    """
    refuse_world(parallel)
    if dist.is_initialized():
        return [work(*args)]
    if launched():
        with attach(members=parallel.members):
            return [work(*args)]
    if parallel.started == 1:
        with one_process():
            return [work(*args)]
    return workers().run(work, *args, ranks=parallel.members)


@contextmanager
def one_process() -> Iterator[None]:
    """Opens a process group with only this process. It is closed after an error too, because no other rank waits."""
    try:
        with process_group(0, 1, HashStore()):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def device_for(use_cpu: bool) -> Any:
    """Returns the device of this rank."""
    rank = int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else started(dist.get_rank())
    return devices.choose(rank, device="cpu" if use_cpu else None)


def keeps_own_objects() -> bool:
    """Returns whether each rank runs the user's script and keeps its own objects.

    Otherwise they belong to a parent process, and the ranks send their results to it.
    """
    return launched() or (dist.get_world_size() == 1 and MARK not in os.environ)
