"""Do something on all ranks, and let all of them know what came out: a failure on one is an error on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from meshwright.errors import MeshwrightError

T = TypeVar("T")


def agree(work: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> list[T]:
    """What `work()` returned on each rank; where it failed on any, all raise the first failure, so none goes on alone."""
    answer: tuple[T | None, tuple[str, str | None] | None]
    try:
        answer = (work(), None)
    except MeshwrightError as error:
        answer = (None, (error.what, error.fix))
    except Exception as error:  # told to all, whatever it is
        answer = (None, (f"{type(error).__name__}: {error}", None))
    answers: list[tuple[T, tuple[str, str | None] | None]] = [None] * dist.get_world_size(group)  # type: ignore[list-item]
    dist.all_gather_object(answers, answer, group=group)
    failed = [(rank, failure) for rank, (_, failure) in enumerate(answers) if failure is not None]
    if failed:
        rank, (what, fix) = failed[0]
        whole = len(failed) == len(answers)  # all of them found the same: a rank would say nothing
        raise MeshwrightError(what if whole or len(answers) == 1 else f"rank {rank}: {what}", fix=fix)
    return [value for value, _ in answers]
