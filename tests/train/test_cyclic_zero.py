"""`dp_mode="cyclic-zero"`: the bits of the delayed rule; parameters in memory only while they are used, one owner per stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.ir.action import COMPUTE, Kind, Op
from meshwright.runtime.executor.executor import Executor, Walk
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.transport.send_receive import Pending
from tests.conftest import Pool
from tests.support.delayed_rule import Delayed, labelled
from tests.support.thin import slow
from tests.train.test_cyclic_training import (
    STEPS,
    Chain,
    Wide,
    batch,
    counted,
    cuts_of,
    equal,
    expected,
    mlp,
    resumed,
    tools,
    trained,
)

CASES = [
    slow(("mlp", 2, 2, "auto"), several=True),
    slow(("mlp", 3, 3, "torch"), several=True),
    ("mlp", 3, 3, "auto"),
    slow(("mlp", 3, 3, "strict"), several=True),
    slow(("mlp", 4, 4, "auto"), several=True),
    slow(("mlp", 4, 4, "torch"), several=True),
    slow(("convolutions", 3, 3, "auto"), several=True),
    slow(("convolutions", 4, 4, "torch"), several=True),
    slow(("gpt2", 2, 2, "auto"), several=True),
    slow(("gpt2", 3, 3, "torch"), several=True),
    slow(("gpt2", 4, 4, "auto"), several=True),
]


def plan(dp: int, name: str = "mlp", stages: int = 0, **more: Any) -> dict[str, Any]:
    return {"dp": dp, "dp_mode": "cyclic-zero", "stages": cuts_of(name, stages or dp), **more}


@pytest.mark.parametrize(("name", "dp", "stages", "transport"), CASES)
def test_training_equals_the_delayed_rule(name: str, dp: int, stages: int, transport: str, pool: Pool) -> None:
    rows = 4 * dp
    how = plan(dp, name, stages, transport=transport, options={"chunks": stages})
    wanted, losses = expected(name, dp, stages, 0, rows, None)
    whole = pool.run(trained, name, how, [STEPS], rows, None, ranks=dp)
    for weights, found, rates, _ in whole:
        equal(weights, wanted)
        assert found == pytest.approx(losses, rel=1e-6)
        assert rates == pytest.approx([0.05] * 2 + [0.015] * 3 + [0.0045] * 3)
    again = pool.run(trained, name, how, [3, 1, 4], rows, None, ranks=dp)
    equal(again[0][0], wanted)
    assert again[0][1] == whole[0][1]


@pytest.mark.slow
def test_clipping_is_by_unit_and_the_norm_is_that_of_all_units(pool: Pool) -> None:
    wanted, _ = expected("mlp", 2, 2, 0, 8, 0.3)
    owned = pool.run(trained, "mlp", plan(2), [5, 3], 8, 0.3, ranks=2)
    replicated = pool.run(trained, "mlp", {**plan(2), "dp_mode": "cyclic"}, [5, 3], 8, 0.3, ranks=2)
    for weights, _, _, norms in owned:
        equal(weights, wanted)
        assert norms == replicated[0][3] and max(norms) > 0.3


@pytest.mark.slow
def test_a_run_moves_between_modes_and_resumes_exactly(pool: Pool) -> None:
    zero, cyclic = plan(2), {**plan(2), "dp_mode": "cyclic"}
    wanted, _ = expected("mlp", 2, 2, 0, 8, None)
    for before, after in ((zero, zero), (zero, cyclic), (cyclic, zero)):
        for weights, previous in pool.run(resumed, before, after, ranks=2):
            equal(weights, wanted)
            assert previous == ["previous/blocks.0.linear.bias", "previous/blocks.0.linear.weight"]
    for before, after in ((zero, {"dp": 2}), ({"dp": 2}, zero), ({"dp": 2, "dp_mode": "zero-1"}, zero)):
        first, second = pool.run(resumed, before, after, ranks=2)
        equal(first[0], second[0])


@pytest.mark.slow
def test_a_segment_has_no_collective(pool: Pool) -> None:
    assert pool.run(counted, {"dp": 2, "dp_mode": "cyclic-zero"}, ranks=2) == [(0, [3] * 6)] * 2


def even() -> nn.Module:
    """Four stages with equal parameters."""
    torch.manual_seed(5)
    return Chain(*[Wide(128, 128) for _ in range(4)])


def even_batch(step: int, rows: int) -> Any:
    random = torch.Generator().manual_seed(step)
    return torch.randn((rows, 128), generator=random), torch.randint(0, 128, (rows,), generator=random)


STAGE = 4 * (128 * 128 + 128)
"""The bytes of one stage: more than small messages have, which are received far ahead."""


def resident(executor: Executor) -> int:
    """The bytes of parameters on this rank: its own versions, those in use, and messages that have arrived or will."""
    actions: Any = executor.actions
    found: dict[int, int] = {}
    tensors: list[Tensor] = []
    for unit in actions.parameters.units.values():
        tensors += [leaf for leaves in unit.versions.leaves.values() for leaf in leaves] if unit.versions is not None else []
        tensors += [flat for flats in unit.borrowed._flats.values() for flat in flats] if unit.borrowed is not None else []
    for slot, value in enumerate(executor.program.values):
        if value.kind is Kind.PARAM and (kept := actions.store.slots[slot]) is not None:
            tensors += (kept[2] if type(kept) is Pending else kept).tensors
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def audited(how: dict[str, Any], rows: int) -> dict[str, Any]:
    """On a rank: what every action of training leaves in memory, and what the rank holds at the end."""
    after: list[tuple[str, int, bool, int]] = []
    peaks: list[int] = []
    compile_plain = Executor._compile

    def compile_watched(self: Executor) -> Walk:
        walk = compile_plain(self)
        units = self.actions.parameters.units  # type: ignore[attr-defined]

        def watched(instruction: Any, do: Any) -> Any:
            def run() -> None:
                do()
                peaks.append(resident(self))
                if instruction.channel is None and instruction.action.op in COMPUTE:
                    unit = units[instruction.action.stage]
                    kept = 0 if unit.borrowed is None else unit.borrowed.nbytes()
                    after.append((instruction.action.op.value, instruction.action.stage, unit.borrowed is None, kept))

            return run

        pairs = zip(walk.instructions, walk.functions, strict=True)
        return walk._replace(functions=[watched(instruction, do) for instruction, do in pairs])

    Executor._compile = compile_watched  # type: ignore[method-assign]
    model = even()
    optimizer, scheduler = tools(model)
    options: Any = {"optimizer": optimizer, "scheduler": scheduler, "loss": nn.functional.cross_entropy, "device": "cpu"}
    try:
        with mw.parallelize(model, even_batch(0, rows), how, check_capture=False, **options) as session:
            session.train([even_batch(step, rows) for step in range(6)])
            session.train([even_batch(step, rows) for step in range(6, STEPS)])
            trained_peak, trained_after = max(peaks), list(after)
            loss = session.evaluate(even_batch(50, rows)).loss
            engine = session.engine
            state = [v for u in engine.used_units.values() if u.optimizer for s in u.optimizer.state.values() for v in s.values()]
            hidden = all(
                p.isnan().all() and p.untyped_storage().nbytes() <= 4 for u in engine.borrowed.values() for p in u.params
            )
            buffers = sum(len(u.buffers) + len(u.spare) for u in engine.borrowed.values())
            session.broadcast_weights()
    finally:
        Executor._compile = compile_plain  # type: ignore[method-assign]
    return {
        "after": trained_after,
        "peak": trained_peak / STAGE,
        "loss": loss,
        "state": sum(v.nbytes for v in state if isinstance(v, Tensor)),
        "hidden": hidden,
        "buffers": buffers,
        "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
    }


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "torch"])
def test_memory_of_a_rank(transport: str, pool: Pool) -> None:
    rows = 8
    model = even()
    optimizer, scheduler = tools(model)
    rule = Delayed(model, 4, 4, lambda name: int(name.split(".")[1]), labelled)
    rule.train([even_batch(step, rows) for step in range(STEPS)], optimizer, scheduler)
    inputs, target = even_batch(50, rows)
    wanted = float(nn.functional.cross_entropy(model(inputs), target).detach())
    for found in pool.run(audited, plan(4, transport=transport), rows, ranks=4):
        equal(found["weights"], dict(model.named_parameters()))
        assert found["loss"] == pytest.approx(wanted, rel=1e-6)
        assert found["state"] == STAGE, "momentum of one stage"
        assert found["hidden"] and found["buffers"] == 0
        assert len(found["after"]) == 2 * 4 * STEPS
        for op, stage, owned, kept in found["after"]:
            assert kept == (STAGE if op == Op.F and stage == 3 and not owned else 0), (op, stage)
        assert found["peak"] <= 5, "its own stage in up to two versions, and one in use, one arriving, one leaving"


def test_verify(workers: Workers) -> None:
    how = {"dp": 3, "dp_mode": "cyclic-zero", "stages": cuts_of("mlp", 3)}
    found = mw.verify(mlp, verify_batch, how, steps=4, loss=nn.functional.cross_entropy, workers=workers)
    assert found.passed and found.max_relative_error == 0.0


@pytest.mark.parametrize("mode", ["cyclic", "cyclic-zero", "cyclic-mp", "cyclic-pp"])
def test_bf16(mode: str, workers: Workers) -> None:
    how = {"dp": 2, "dp_mode": mode}
    found = mw.verify(
        mlp, single_batch, how, steps=3, loss=nn.functional.cross_entropy, dtype="float32", precision="bf16", workers=workers
    )
    assert found.passed and found.max_relative_error == 0.0


def single_batch(step: int) -> Any:
    return batch("mlp", step, 4)


def verify_batch(step: int) -> Any:
    inputs, target = batch("mlp", step, 6)
    return inputs.double(), target


@pytest.mark.parametrize(("options", "what"), [({"rule": "v1"}, "rule=v1"), ({"margin": 1}, "margin=1")])
def test_other_rules_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(MeshwrightError, match=f"under rule v2 only, got {what}"):
        mw.verify(mlp, verify_batch, plan(3, options=options), loss=nn.functional.cross_entropy)
