"""The scheduling class of CPU workers: a thread that wakes up does not interrupt one that computes.

Every message wakes a peer, and with gloo also the threads that carry it. A worker that they interrupt finds its caches cold,
so the walk of a CPU worker runs under the batch policy of Linux. GPUs do not need it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch


@contextmanager
def batch_policy(device: torch.device) -> Iterator[None]:
    """Run this thread, and threads that it starts in here, under SCHED_BATCH; elsewhere, and without permission, do nothing."""
    before = None
    with suppress(OSError, AttributeError):  # not permitted, not on this system
        policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
        if device.type == "cpu" and policy == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, parameter)
            before = policy, parameter
    try:
        yield
    finally:
        if before is not None:
            os.sched_setscheduler(0, *before)
