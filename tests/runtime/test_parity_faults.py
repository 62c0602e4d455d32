"""What is broken on purpose inside the workers is found: a verdict that cannot fail is none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright import Certificate, MeshwrightError, Parallel
from meshwright.ir.placement import Rows
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.parameters import unit as units
from meshwright.runtime.parameters.parameters import Parameters
from meshwright.runtime.stage.batch import Batch
from meshwright.runtime.stage.stage import Bundle, Stage
from meshwright.runtime.transport.send_receive import Outgoing
from meshwright.train.prepared import PreparedRun
from meshwright.train.verify.certificate import certify
from meshwright.train.verify.rank_differences import RankTrace
from meshwright.train.verify.verify import momentum, rank_trace, serial_trace
from meshwright.train.verify.verify_case import Case, prepare_case
from tests.conftest import Pool
from tests.support.parity import batch, model

Patch = Callable[[pytest.MonkeyPatch], None]


def nothing(patch: pytest.MonkeyPatch) -> None:
    """All is well."""


def swapped_sends(patch: pytest.MonkeyPatch) -> None:
    """Two activations leave in the wrong order."""
    plain, held = Outgoing.send_from, list[Bundle]()

    def send_from(self: Outgoing, slots: list[Any], slot: int) -> Callable[[], None]:
        def send() -> None:
            if self._channel.kind.value == "act" and len(held) < 2 and self._contract is not None:
                held.append(slots[slot])
                if len(held) == 2:
                    plain(self, held, 1)()
                    plain(self, held, 0)()
                return
            plain(self, slots, slot)()

        return send

    patch.setattr(Outgoing, "send_from", send_from)


def dropped_gradient(patch: pytest.MonkeyPatch) -> None:
    """One backward on rank 1 gives nothing to the stage before it."""
    plain, seen = Stage.backward, [0]

    def backward(self: Stage, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        found = plain(self, *args, **kwargs)
        seen[0] += 1
        return tuple(map(torch.zeros_like, found)) if dist.get_rank() == 1 and seen[0] == 3 else found

    patch.setattr(Stage, "backward", backward)


def wrong_rows(patch: pytest.MonkeyPatch) -> None:
    """A microbatch is cut one row too early."""
    plain = Engine._cut

    def cut(self: Engine, step: int) -> Batch:
        found = plain(self, step)
        found.cuts[2] = Rows(found.cuts[2].start - 1, found.cuts[2].stop - 1)
        return found

    patch.setattr(Engine, "_cut", cut)


def no_division(patch: pytest.MonkeyPatch) -> None:
    """Sums are taken for means."""

    def finish(self: units.Buffer, factor: float = 1.0) -> None:
        for one in self.sums:
            one.wait()
        self.sums.clear()

    patch.setattr(units.Buffer, "finish", finish)


def lost_sync(patch: pytest.MonkeyPatch) -> None:
    """Gradients stay where they are; nobody adds them up."""
    patch.setattr(units.Buffer, "start", lambda self, adder: self.seal())


def stale_version(patch: pytest.MonkeyPatch) -> None:
    """Forwards read a version older than theirs where there is one."""
    plain = Parameters.versions

    def versions(self: Parameters, step: Any) -> Any:
        held = [unit.versions for unit in self.units.values() if unit.versions is not None]
        kept = [dict(of.leaves) for of in held]
        for of in held:
            of.leaves = {version: of.leaves[min(of.leaves)] for version in of.leaves}
        found = plain(self, step)
        for of, before in zip(held, kept, strict=True):
            of.leaves = before
        return found

    patch.setattr(Parameters, "versions", versions)


def skipped_update(patch: pytest.MonkeyPatch) -> None:
    """One rank forgets one optimizer step, after its gradients were seen."""
    plain, seen = units.Unit.update, [0]

    def update(self: units.Unit, *args: Any, **kwargs: Any) -> None:
        seen[0] += 1
        plain(self, *args, **{**kwargs, "scale": None} if dist.get_rank() == 1 and seen[0] == 2 else kwargs)

    patch.setattr(units.Unit, "update", update)


def unwatched(patch: pytest.MonkeyPatch) -> None:
    """A rank does its updates where nobody sees them."""
    plain = units.Unit.update

    def update(self: units.Unit, *args: Any, **kwargs: Any) -> None:
        watch, self.watch = self.watch, None if dist.get_rank() == 1 else self.watch
        plain(self, *args, **kwargs)
        self.watch = watch

    patch.setattr(units.Unit, "update", update)


def unequal_start(patch: pytest.MonkeyPatch) -> None:
    """A rank begins elsewhere, and nobody broadcasts."""

    def start(self: Engine) -> None:
        if dist.get_rank() == 1:
            with torch.no_grad():
                next(iter(self.layers.of_stage(self.program.stages[0])[0].parameters())).mul_(1 + 1e-15)

    patch.setattr(Engine, "_start_equal", start)


def broken(case: Case, run: PreparedRun, fault: Patch) -> RankTrace:
    """A rank's run with a fault in it."""
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        return rank_trace(case, run)


def judged(pool: Pool, fault: Patch, **plan: Any) -> Certificate:
    """The verdict on a run with a fault."""
    chosen = Parallel.of({"pp": 2, "microbatches": 4, **plan})
    case = Case(partial(model, "mlp", 2, 0.0), partial(batch, "mlp", 17), chosen, 4, "float64", 0, None, momentum)
    _, layers, run = prepare_case(case)
    (reference,) = pool.run(serial_trace, case, run, ranks=1)
    traces = pool.run(broken, case, run, fault, ranks=chosen.processes)
    return certify(case, layers, run.schedule, reference, traces)


FAULTS: list[tuple[Patch, dict[str, Any]]] = [
    (swapped_sends, {"schedule": "gpipe", "microbatches": 8}),
    (dropped_gradient, {}),
    (wrong_rows, {}),
    (no_division, {}),
    (lost_sync, {"schedule": "chimera"}),
    (lost_sync, {"dp": 2}),
    (stale_version, {"schedule": "pipedream"}),
    (stale_version, {"schedule": "pipedream_2bw"}),
    (skipped_update, {}),
    (unwatched, {}),
    (unequal_start, {"dp": 2}),
]


@pytest.mark.parametrize(("fault", "plan"), FAULTS, ids=lambda x: x.__name__ if callable(x) else "-".join(map(str, x.values())))
def test_a_fault_is_found(pool: Pool, fault: Patch, plan: dict[str, Any]) -> None:
    assert judged(pool, nothing, **plan).passed, "without the fault all is well"
    found = judged(pool, fault, **plan)
    assert not found.passed
    assert found.max_relative_error > found.tolerance or found.problems


def test_what_is_wrong_is_named(pool: Pool) -> None:
    assert any("gradients of update 0 on rank 1" in problem for problem in judged(pool, unwatched).problems)
    assert "differs between ranks" in judged(pool, unequal_start, dp=2).problems[0]
    assert judged(pool, skipped_update).worst.startswith(("gradient", "weight"))


def test_a_worker_that_fails_is_an_error(pool: Pool) -> None:
    with pytest.raises(MeshwrightError, match="rank"):
        judged(pool, failing)


def failing(patch: pytest.MonkeyPatch) -> None:
    """Every backward raises."""

    def backward(self: Stage, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a fault")

    patch.setattr(Stage, "backward", backward)
