"""What a walk makes ready: messages for every form of the data, microbatches, and a policy of the system that is put back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright import MeshwrightError
from meshwright.ir.placement import Rows
from meshwright.ir.plan.plan import Parallel
from meshwright.runtime.cpu_scheduling import batch_policy
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.evaluate import Forward
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.executor.executor import FORMS
from meshwright.runtime.stage.batch import Batch, Own
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.stage.objective import Objective
from meshwright.train.models import small_models as models
from meshwright.train.setup.build_schedule import lists_for
from meshwright.train.verify.verify import momentum
from tests.conftest import Pool
from tests.runtime.test_parity_edges import few
from tests.support.layers_of_models import layers_for
from tests.support.parity import model

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
    with batch_policy(torch.device("cuda")):
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    with batch_policy(CPU), batch_policy(CPU):
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER

    def refused(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    with batch_policy(CPU):
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    monkeypatch.delattr(os, "sched_getscheduler")
    with batch_policy(CPU):
        pass


def whole_and_own() -> list[float]:
    """As many rows once for all copies and once for each: their microbatches are not alike."""
    plan, data = Parallel(pp=2, dp=2, microbatches=2), tuple(t.double() for t in models.mlp_batch(0, rows=8, width=6))
    layers = layers_for([layer.double() for layer in model("mlp", 2, 0.0)], data, 2)
    engine = Engine(lists_for(plan, ties=layers.ties), layers, Settings(momentum, plan.microbatches, copies=plan.dp))
    forward = Forward(engine)
    weights = []
    for step, given in enumerate([data, Own(data), data]):
        weights.append(forward(given).weight)
        weights += [tally.weight for tally in engine.run(lambda _, given=given: given, step).values()]  # type: ignore[misc]
    engine.close()
    return weights


def test_a_batch_for_all_copies_and_one_for_each_may_follow_each_other(pool: Pool) -> None:
    first, last = pool.run(whole_and_own, ranks=4)[:2]
    assert first == [8.0, 16.0, 8.0]
    assert last == [8.0, 4.0, 16.0, 8.0, 8.0, 4.0]


class Filled:
    """Weighs rows, and cannot do without."""

    columns = ("labels",)

    def __call__(self, columns: Mapping[str, Tensor]) -> float:
        """How many labels there are."""
        return float(columns["labels"].view(1, 5).numel())


def test_microbatches_without_rows_are_not_weighed() -> None:
    given = {"labels": torch.zeros(2, 5)}
    batch = Batch(given, microbatches=4, names=("labels",))
    found = batch.make_ready(Objective(weigh=Filled()), 0, 0)
    assert sorted(cut.items for cut in found) == [0.0, 0.0, 5.0, 5.0]
    assert all(cut.items == 5.0 * (cut.rows.stop - cut.rows.start) for cut in found)


def test_a_loss_function_returns_one_number() -> None:
    output, target = torch.ones(4, 3), torch.zeros(4, 3)
    loss, times = Objective(lambda o, t: (o - t).sum().reshape(1)).mean(output, target, 4.0)
    assert (loss.shape, loss.item(), times) == ((), 12.0, 4.0)
    with pytest.raises(MeshwrightError, match=r"the loss function returned \(4,\), not one number"):
        Objective(lambda o, t: (o - t).sum(-1)).mean(output, target, 4.0)
    with pytest.raises(MeshwrightError, match="the loss function returned float, not a tensor"):
        Objective(lambda o, t: (o - t).sum().item()).mean(output, target, 4.0)  # type: ignore[arg-type, return-value]


def test_forms_tell_cuts_apart() -> None:
    given = torch.zeros(8, 3), torch.zeros(8)
    whole, own = (Batch(g, microbatches=2, copies=2) for g in (given, Own(given)))
    assert whole.cuts == [Rows(0, 2), Rows(2, 4)] and own.cuts == [Rows(0, 4), Rows(4, 8)]
    assert whole.form != own.form and whole.form[1:] == own.form[1:]


def asked_for(transport: str) -> list[int]:
    """The steps whose batches a walk of eight steps asks for."""
    plan, seen = Parallel(pp=2, microbatches=1, schedule="pipedream", transport=transport), list[int]()

    def data(step: int) -> tuple[Tensor, Tensor]:
        seen.append(step)
        return models.mlp_batch(step, rows=4, width=6)

    layers = Layers.of([layer.double() for layer in model("mlp", 2, 0.0)], 2)
    engine = Engine(lists_for(plan, steps=8), layers, Settings(momentum, 1, transport=transport))
    engine.run(data)
    engine.close()
    return seen


@pytest.mark.parametrize("transport", ["shared", "torch"])
def test_a_walk_asks_for_each_batch_once(pool: Pool, transport: str) -> None:
    assert pool.run(asked_for, transport, ranks=2) == [list(range(8))] * 2
