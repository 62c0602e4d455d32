"""Do something on all ranks, and let all of them know what came out: a failure on one is an error on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import MeshwrightError
from meshwright.runtime.device import peak_bytes
from meshwright.runtime.json_exchange import all_gather_json

_PLAIN = (int, float, str, type(None))


def agree(work: Callable[[], Any], *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What `work()` returned on each rank; where it failed on any, all raise the first failure, so none goes on alone.

    What it returns goes to the others as JSON.
    """
    answer: list[Any]
    try:
        answer = [work(), None]
    except MeshwrightError as error:
        answer = [None, [error.what, error.fix]]
    except Exception as error:  # told to all, whatever it is
        answer = [None, [f"{type(error).__name__}: {error}", None]]
    answers = all_gather_json(answer, group=group)
    failed = [(rank, failure) for rank, (_, failure) in enumerate(answers) if failure is not None]
    if failed:
        rank, (what, fix) = failed[0]
        whole = len(failed) == len(answers)  # all of them found the same: a rank would say nothing
        raise MeshwrightError(what if whole or len(answers) == 1 else f"rank {rank}: {what}", fix=fix)
    return [value for value, _ in answers]


def refuse_differences(facts: Mapping[str, Any]) -> None:
    """Ranks that were given different things would wait for each other for ever; all of them are told what differs."""
    found = agree(lambda: {name: value if isinstance(value, _PLAIN) else str(value) for name, value in facts.items()})
    for rank, theirs in enumerate(found):
        for name, value in found[0].items():
            if (other := theirs.get(name)) != value:
                raise MeshwrightError(
                    f"ranks differ: {name} is {value} on rank 0 and {other} on rank {rank}",
                    fix="the same script, arguments and data on every rank",
                )


def peaks(device: torch.device) -> tuple[int, ...]:
    """The most memory that each rank has had; all ranks ask together."""
    return tuple(all_gather_json(peak_bytes(device)))
