"""What a walk makes ready once: for every form of the data, and with a policy of the system that is put back."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch

from meshwright.ir.plan import Parallel
from meshwright.runtime import device as devices
from meshwright.runtime.engine import Engine, Settings
from meshwright.runtime.executor import FORMS
from meshwright.runtime.layers import Layers
from meshwright.train import models
from meshwright.train.lists import lists_for
from meshwright.train.verify import momentum
from tests.conftest import Pool
from tests.parity import model
from tests.test_parity_edges import few

CPU = torch.device("cpu")


@pytest.mark.parametrize("transport", ["shared", "torch"])
def test_more_forms_than_are_kept_and_some_that_come_back(pool: Pool, transport: str) -> None:
    rows = (*range(5, 5 + FORMS + 2), 6, 5, FORMS + 6)
    plan = {"pp": 2, "microbatches": 4, "transport": transport}
    found = pool.verify(partial(model, "mlp", 2, 0.0), partial(few, rows), steps=len(rows), **plan)
    assert found.passed, (found.max_relative_error, found.worst, found.problems)


def policies(fails: bool) -> list[int]:
    """The policy before a walk, inside it and after it."""

    class Looks(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(os.sched_getscheduler(0))
            if fails and len(seen) == 2:
                raise ZeroDivisionError
            return super().forward(x)

    seen = [os.sched_getscheduler(0)]
    plan = Parallel(pp=1, microbatches=1)
    engine = Engine(lists_for(plan), Layers.of([Looks(4, 4).double()], 1), Settings(momentum, 1))
    try:
        engine.run(lambda step: models.mlp_batch(step, rows=2, width=4))
    except ZeroDivisionError:
        assert fails
    engine.close()
    return [*seen[:2], os.sched_getscheduler(0)]


@pytest.mark.parametrize("fails", [False, True])
def test_a_walk_is_patient_and_leaves_the_policy_as_it_was(pool: Pool, fails: bool) -> None:
    (seen,) = pool.run(policies, fails, ranks=1)
    assert seen == [os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_OTHER]


def test_patience_is_for_cpus_and_does_without_where_it_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    with devices.patience(torch.device("cuda")):
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    with devices.patience(CPU), devices.patience(CPU):
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER

    def refused(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    with devices.patience(CPU):
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    monkeypatch.delattr(os, "sched_getscheduler")
    with devices.patience(CPU):
        pass
