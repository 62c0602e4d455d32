"""Where a script's training runs: in this process, on local workers, or on the ranks that torchrun has started."""

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
from meshwright.runtime.launch.workers import Workers, attach, process_group


def launched() -> bool:
    """Has torchrun started this process?"""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def refuse_world(parallel: Parallel) -> None:
    """Degrees that do not fit the job, said before anything is started or joined."""
    if launched() or dist.is_initialized():
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
        if world != parallel.processes:
            degrees = f"width {'+'.join(map(str, parallel.width))}" if parallel.width else f"pp {parallel.pp}"
            raise MeshwrightError(
                f"the plan needs {degrees} x dp {parallel.dp} = {parallel.processes} ranks, the job has {world}",
                fix=f"torchrun --nproc-per-node {parallel.processes}, or other degrees",
            )
    else:
        refuse_crowd(parallel.processes)


def everywhere(work: Callable[..., Any], *args: Any, parallel: Parallel, workers: Callable[[], Workers]) -> list[Any]:
    """Call `work(*args)` on every rank of a plan; what those ranks returned that this process can see, rank 0 first."""
    refuse_world(parallel)
    if dist.is_initialized():
        return [work(*args)]
    if launched():
        with attach():
            return [work(*args)]
    if parallel.processes == 1:
        with one_process():
            return [work(*args)]
    return workers().run(work, *args, ranks=parallel.processes)


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone; nobody else could be left waiting, so an error takes it down too."""
    try:
        with process_group(0, 1, HashStore()):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def device_for(use_cpu: bool) -> Any:
    """The device of this rank."""
    rank = int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else dist.get_rank()
    return devices.choose(rank, device="cpu" if use_cpu else None)


def keeps_own_objects() -> bool:
    """Does each rank keep its own copy of a script's objects? Else they are a parent's, and results are sent to it."""
    return launched() or dist.get_world_size() == 1
