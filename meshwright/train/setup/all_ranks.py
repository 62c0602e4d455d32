"""Run a function on all ranks and share the results. If one rank fails, all ranks raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import MeshwrightError
from meshwright.runtime.device import peak_bytes
from meshwright.runtime.json_exchange import all_gather_json
from meshwright.runtime.started_ranks import started

_PLAIN = (int, float, str, type(None))


def agree(work: Callable[[], Any], *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the results of `work()` from all ranks. If it fails on any rank, all ranks raise the first failure.

    The results are exchanged as JSON.
    """
    answer: list[Any]
    try:
        answer = [work(), None]
    except MeshwrightError as error:
        answer = [None, [error.what, error.fix]]
    except Exception as error:  # any error is sent to all ranks
        answer = [None, [f"{type(error).__name__}: {error}", None]]
    answers = all_gather_json(answer, group=group)
    failed = [(rank, failure) for rank, (_, failure) in enumerate(answers) if failure is not None]
    if failed:
        rank, (what, fix) = failed[0]
        whole = len(failed) == len(answers)  # all ranks failed: the number of one rank would not help
        raise MeshwrightError(what if whole or len(answers) == 1 else f"rank {started(rank)}: {what}", fix=fix)
    return [value for value, _ in answers]


def refuse_differences(facts: Mapping[str, Any]) -> None:
    """Raises on all ranks if a fact differs between ranks. Ranks with different inputs could wait for each other forever."""
    found = agree(lambda: {name: value if isinstance(value, _PLAIN) else str(value) for name, value in facts.items()})
    for rank, theirs in enumerate(found):
        for name, value in found[0].items():
            if (other := theirs.get(name)) != value:
                raise MeshwrightError(
                    f"ranks differ: {name} is {value} on rank {started(0)} and {other} on rank {started(rank)}",
                    fix="the same script, arguments and data on every rank",
                )


def peaks(device: torch.device) -> tuple[int, ...]:
    """Returns the peak memory of each rank, in bytes. A collective call: all ranks must call it."""
    return tuple(all_gather_json(peak_bytes(device)))
