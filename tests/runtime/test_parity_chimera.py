"""Chimera's acceptance: every mode, pairs, copies and sync policy equals one process, and replicas never drift apart."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from meshwright import Parallel
from meshwright.runtime.parameters.unit import Unit
from meshwright.train.prepared import PreparedRun
from meshwright.train.verify.certificate import certify
from meshwright.train.verify.rank_differences import RankTrace, digest
from meshwright.train.verify.verify import momentum, rank_trace, serial_trace
from meshwright.train.verify.verify_case import Case, prepare_case
from tests.conftest import Pool
from tests.runtime.test_parity_edges import same_bits, traces
from tests.support.parity import batch, built, model
from tests.support.thin import thinned

MODES: list[dict[str, object]] = [
    {},
    {"mode": "doubling"},
    {"mode": "halving"},
    {"mode": "halving", "half_forward": True},
    {"mode": "steady"},
    {"split": True},
    {"pairs": 2},
    {"pairs": 2, "mode": "doubling"},
    {"pairs": 2, "split": True},
]


def shown(options: dict[str, object]) -> str:
    return "-".join(f"{k}={v}" for k, v in options.items()) or "direct"


@pytest.mark.parametrize("options", MODES, ids=shown)
@pytest.mark.parametrize("policy", thinned(["eager", "eager-opt", "lazy", "ring"], 3))
def test_modes_and_policies(pool: Pool, options: dict[str, object], policy: str) -> None:
    plan: dict[str, Any] = {"pp": 4, "microbatches": 8, "schedule": "chimera", "options": options, "sync": policy}
    found = pool.verify(partial(model, "tied", 4, 0.0), partial(batch, "tied", 17), steps=3, **plan)
    assert found.passed, (found.max_relative_error, found.worst, found.problems)
    assert found.replicas_equal


@pytest.mark.parametrize("options", [{}, {"pairs": 2}, {"mode": "halving"}, {"split": True}], ids=shown)
def test_when_gradients_are_added_up_changes_no_bit(pool: Pool, options: dict[str, object]) -> None:
    build, data = partial(model, "tied", 4, 0.0), partial(batch, "tied", 17)
    plan: dict[str, Any] = {"pp": 4, "microbatches": 8, "schedule": "chimera", "options": options}
    lazy, *others = (traces(pool, build, data, sync=policy, **plan) for policy in ("lazy", "eager", "eager-opt"))
    assert all(same_bits(lazy, other) for other in others)


@pytest.mark.parametrize("options", [{}, {"pairs": 2}, {"pairs": 4}, {"mode": "doubling"}, {"mode": "halving"}], ids=shown)
@pytest.mark.parametrize("count", [8, 16])
def test_eight_workers(pool: Pool, options: dict[str, object], count: int) -> None:
    if built(("chimera", tuple(sorted(options.items()))), 8, count) is None:
        assert count == 8 and options
        return
    plan: dict[str, Any] = {"pp": 8, "microbatches": count, "schedule": "chimera", "options": options}
    found = pool.verify(partial(model, "tied", 8, 0.0), partial(batch, "tied", 2 * count + 1), steps=2, **plan)
    assert found.passed, (found.max_relative_error, found.worst, found.problems)


@pytest.mark.slow
@pytest.mark.parametrize("options", MODES, ids=shown)
@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (2, 2), (4, 1), (4, 2), (6, 1), (8, 1)])
@pytest.mark.parametrize("times", [0.5, 1, 2, 4])
def test_twenty_steps(pool: Pool, options: dict[str, object], pp: int, dp: int, times: float) -> None:
    count = int(pp * times)
    if not count or built(("chimera", tuple(sorted(options.items()))), pp, count) is None:
        return
    plan: dict[str, Any] = {"pp": pp, "dp": dp, "microbatches": count, "schedule": "chimera", "options": options}
    found = pool.verify(partial(model, "tied", pp, 0.0), partial(batch, "tied", 2 * count * dp + 1), steps=20, **plan)
    assert found.passed, (found.max_relative_error, found.worst, found.problems)


def perturbed(case: Case, run: PreparedRun, rank: int, update: int, bit: float, back: bool) -> RankTrace:
    """A run in which one rank's copy is changed by the smallest step there is, before one of its updates."""
    plain, seen = Unit.update, [0]

    def update_with_fault(self: Unit, *args: Any, **kwargs: Any) -> None:
        hit = torch.distributed.get_rank() == rank and self.params and not back
        if hit and seen[0] == update:
            flat = self.params[0].data.view(-1)
            flat[0] = torch.nextafter(flat[0], flat[0] + bit)
        seen[0] += bool(self.params)
        plain(self, *args, **kwargs)

    Unit.update = update_with_fault  # type: ignore[method-assign]
    try:
        return rank_trace(case, run)
    finally:
        Unit.update = plain  # type: ignore[method-assign]


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("update", [0, 2])
def test_one_bit_on_one_replica_is_found(pool: Pool, rank: int, update: int) -> None:
    plan = Parallel(pp=4, microbatches=4, schedule="chimera")
    case = Case(partial(model, "mlp", 4, 0.0), partial(batch, "mlp", 9), plan, 3, "float64", 0, None, momentum)
    _, layers, run = prepare_case(case)
    (reference,) = pool.run(serial_trace, case, run, ranks=1)
    sound = pool.run(perturbed, case, run, rank, update, 1.0, True, ranks=4)
    assert certify(case, layers, run.schedule, reference, sound).passed
    found = certify(case, layers, run.schedule, reference, pool.run(perturbed, case, run, rank, update, 1.0, False, ranks=4))
    assert found.max_relative_error < 1e-9, "so small that only bits tell"
    assert not found.replicas_equal and not found.passed
    assert any(f"version {update // 2}" in problem for problem in found.problems), found.problems


def test_a_digest_sees_bits_and_places() -> None:
    a = torch.arange(6, dtype=torch.float64)
    swapped, zero = a.flip(0), torch.zeros(4, dtype=torch.float32)
    assert digest(a) == digest(a.clone()) != digest(swapped)
    assert digest(zero) != digest(-zero), "minus zero has another bit"
    for dtype in (torch.float16, torch.bfloat16, torch.complex64, torch.complex128):
        values = torch.randn(5, dtype=dtype)
        assert digest(values) == digest(values.clone()) != digest(values + 1)
