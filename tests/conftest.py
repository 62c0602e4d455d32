"""One pool of local workers per test process, started when a test first asks for it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.long_tests import is_long

if TYPE_CHECKING:
    from meshwright import Certificate
    from meshwright.runtime.launch.workers import Workers

RANKS = 8
PURE = ("schedules", "simulate", "passes", "ir", "costs", "report", "test_layers.py")
"""Folders and files of tests that start no workers."""
PRELOADED = ["meshwright.runtime.preload", "meshwright.train.loop.on_rank"]
"""What the ranks of a Trainer import. It takes seconds, so the server from which all workers are forked imports it once."""
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched here, and nothing waits for a network that is not there


class Pool:
    """Workers that are started once; a failed piece of work ends them, and the next starts new ones."""

    def __init__(self) -> None:
        self.workers: Workers | None = None

    def run(self, function: Callable[..., Any], *args: Any, ranks: int | Sequence[int]) -> list[Any]:
        """What each rank returned."""
        try:
            return self.started().run(function, *args, ranks=ranks)
        except BaseException:
            self.close()
            raise

    def verify(self, build: Callable[[], Any], batch: Callable[[int], Any], **more: Any) -> Certificate:
        """`meshwright.verify` on these workers; degrees and names of the plan are keywords beside its own."""
        from meshwright import Parallel, verify

        names = ("steps", "dtype", "seed", "loss", "optimizer", "scheduler", "clip", "precision", "loss_kind")
        own = {key: more.pop(key) for key in names if key in more}
        try:
            return verify(build, batch, Parallel.of(more), workers=self.started(), **own)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers."""
        if self.workers is not None:
            self.workers.close()
            self.workers = None

    def started(self) -> Workers:
        """The workers, alive."""
        from meshwright.runtime.launch.workers import Workers

        self.workers = self.workers or Workers(RANKS)
        return self.workers


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The one pool."""
    found = Pool()
    yield found
    found.close()


@pytest.fixture
def workers(pool: Pool) -> Workers:
    """The pool's workers themselves, for what takes them as an argument."""
    return pool.started()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that take long are slow ones."""
    for item in items:
        if is_long(item.nodeid):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts the fork server if workers may be needed."""
    here = Path(__file__).parent
    if any(item.path.relative_to(here).parts[0] not in PURE for item in session.items):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
