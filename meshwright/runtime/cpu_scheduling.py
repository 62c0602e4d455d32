"""The scheduling policy of CPU workers: a thread that wakes up does not interrupt a thread that computes.

Every message wakes a peer and, with gloo, also the threads that carry it. An interrupted worker continues with cold caches.
So a CPU worker walks its list under the Linux policy SCHED_BATCH. GPUs do not need this.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch


@contextmanager
def batch_policy(device: torch.device) -> Iterator[None]:
    """Runs this thread, and threads that it starts inside, under SCHED_BATCH.

    Does nothing for a GPU, on a system without this policy, or without permission.
    """
    before = None
    with suppress(OSError, AttributeError):  # not permitted, or not available on this system
        policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
        if device.type == "cpu" and policy == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, parameter)
            before = policy, parameter
    try:
        yield
    finally:
        if before is not None:
            os.sched_setscheduler(0, *before)
