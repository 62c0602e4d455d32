"""Mixed precision: any plan equals one process under the same autocast, weights stay fp32, and fp16 has one scale for all."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import MeshwrightError, Parallel, verify
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.parameters.parameters import Rules
from meshwright.runtime.stage import cpu_formats as probe
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.stage.precision import Precision
from meshwright.train.models import small_models as models
from meshwright.train.setup.build_schedule import lists_for
from meshwright.train.verify.verify import momentum
from tests.conftest import Pool

BUILD = partial(models.gpt, blocks=6, dropout=0.1)
DATA = partial(models.text_batch, rows=8)
PLANS: list[dict[str, Any]] = [
    {"pp": 2, "schedule": "onef1b", "microbatches": 4, "recompute": "inline"},
    {"pp": 2, "schedule": "zero_bubble", "microbatches": 4},
    {"pp": 2, "schedule": "chimera", "microbatches": 4},
    {"pp": 4, "schedule": "shifted", "microbatches": 4},
    {"pp": 2, "dp": 2, "schedule": "interleaved", "microbatches": 4},
    {"pp": 2, "schedule": "zbv", "microbatches": 4},
    {"pp": 2, "schedule": "gpipe", "microbatches": 3, "width": (2, 1)},
    {"pp": 2, "schedule": "dualpipev", "microbatches": 4},
]
EVERY = list(product(PLANS, ("bf16", "fp16")))
FIRST = {"zero_bubble": "fp16", "shifted": "bf16", "interleaved": "fp16", "onef1b": "bf16"}
"""What the short run takes of them."""


def agrees(pool: Pool, plan: dict[str, Any], compute: str) -> None:
    chosen = Precision(compute=compute, scale=2.0**12)
    build = partial(models.gpt, blocks=6) if "width" in plan else BUILD  # a team draws dropout row by row of its own
    found = pool.verify(build, DATA, **plan, steps=3, dtype="float32", precision=chosen)
    assert found.passed, (found.worst, found.problems)
    assert found.tolerance == {"bf16": 3e-2, "fp16": 3e-3}[compute] and found.precision["compute"] == compute
    exact = pool.verify(build, DATA, **plan, steps=1, dtype="float32")
    assert exact.losses[0] != found.losses[0], "it was computed in another format"
    assert abs(exact.losses[0] - found.losses[0]) < 0.05


@pytest.mark.parametrize(("plan", "compute"), [c for c in EVERY if FIRST.get(c[0]["schedule"]) == c[1]], ids=str)
def test_a_plan_equals_one_process_under_the_same_autocast(pool: Pool, plan: dict[str, Any], compute: str) -> None:
    agrees(pool, plan, compute)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "compute"), [c for c in EVERY if FIRST.get(c[0]["schedule"]) != c[1]], ids=str)
def test_every_plan_equals_one_process_under_the_same_autocast(pool: Pool, plan: dict[str, Any], compute: str) -> None:
    agrees(pool, plan, compute)


@pytest.mark.parametrize("schedule", ["pipedream", "cyclic"])
def test_bf16_needs_no_flush_and_fp16_does(pool: Pool, schedule: str) -> None:
    plan = {"pp": 2, "schedule": schedule, "microbatches": 2}
    with pytest.raises(MeshwrightError, match="no flush, so a step cannot be skipped"):
        verify(BUILD, DATA, plan, dtype="float32", precision="fp16")
    if schedule == "pipedream":
        assert pool.verify(BUILD, DATA, **plan, steps=3, dtype="float32", precision="bf16").passed


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] * weight, (grads[0] * x).sum(0) * (float("inf") if x.max() > 100 else 1.0)


class Spike(nn.Module):
    """A layer whose own gradient overflows where its input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return _Spike.apply(x, self.weight)


def spiky() -> list[nn.Module]:
    return [Spike(), *models.mlp(layers=3)]


def spiky_batch(step: int) -> tuple[Tensor, Tensor]:
    x, y = models.mlp_batch(step, rows=8)
    if step in (1, 3):
        x[5, 0] = 101.0
    return x, y


@pytest.mark.parametrize("plan", [{"pp": 4, "microbatches": 4}, {"pp": 2, "dp": 2, "schedule": "zero_bubble", "microbatches": 2}])
def test_an_overflow_on_one_stage_skips_the_step_on_all(pool: Pool, plan: dict[str, Any]) -> None:
    found = pool.verify(spiky, spiky_batch, **plan, steps=5, dtype="float32", precision="fp16")
    assert found.passed, (found.worst, found.problems)
    assert found.skipped == (1, 3) and found.precision["scale"] == 2.0**16


def test_a_scale_that_is_too_large_comes_down_by_itself(pool: Pool) -> None:
    precision = Precision(compute="fp16", scale=2.0**30, backoff=2.0**-6)
    found = pool.verify(BUILD, DATA, pp=2, microbatches=2, steps=5, dtype="float32", precision=precision)
    assert found.passed and 0 < len(found.skipped) < 4, (found.skipped, found.problems)


def scaled_run(scale: float, clip: float | None, schedule: str) -> Any:
    """Norms, skipped steps, the last scale and weights of this rank."""
    torch.manual_seed(0)
    lists = lists_for(Parallel(pp=2, schedule=schedule, microbatches=4))
    layers = Layers.of(models.mlp(layers=4), lists.stages)
    precision = Precision(compute="fp16", scale=scale, interval=2)
    engine = Engine(lists, layers, Settings(momentum, 4, rules=Rules(clip=clip), precision=precision))
    for step in range(5):
        engine.run(lambda step: tuple(t.float() for t in models.mlp_batch(step, rows=8)), step)
    own = [p for unit in engine.units.values() for p in unit.params]
    assert all(p.dtype == torch.float32 and p.grad is not None and p.grad.dtype == torch.float32 for p in own)
    weights = {layers.names[p]: p.detach().clone() for p in own}
    assert engine.scaler is not None
    engine.close()
    return engine.parameters.norms, engine.parameters.skipped, engine.scaler.state_dict(), weights


@pytest.mark.parametrize("schedule", ["onef1b", "zero_bubble"])
def test_clipping_sees_gradients_without_their_scale(pool: Pool, schedule: str) -> None:
    small, large = (pool.run(scaled_run, 2.0**power, 0.05, schedule, ranks=2) for power in (6, 12))
    free = pool.run(scaled_run, 2.0**12, None, schedule, ranks=2)
    for (norms, skipped, state, weights), (others, _, other_state, same) in zip(small, large, strict=True):
        assert not skipped and len(norms) == 5 and min(norms.values()) > 0.05, "clipping had work to do"
        assert norms == pytest.approx(others, rel=1e-2)
        assert (state["scale"], other_state["scale"]) == (2.0**8, 2.0**14), "two good steps double it"
        for name, tensor in weights.items():
            assert torch.allclose(tensor, same[name], rtol=1e-2, atol=1e-4)
    assert any(not torch.allclose(t, free[0][3][n], atol=1e-3) for n, t in large[0][3].items())


def test_a_scale_backs_off_grows_and_is_kept() -> None:
    scaler = Precision(compute="fp16", scale=8.0, interval=2).scaler()
    assert scaler is not None and Precision(compute="bf16").scaler() is None
    scaler.measure(100)
    scaler.measure(3)
    assert scaler.unit == 64 and scaler.factor == 0.125
    assert [scaler.update(norm) for norm in (1.0, float("inf"), 1.0, float("nan"), 1.0, 2.0)] == [1, 0, 1, 0, 1, 1]
    assert scaler.scale == 4.0 and scaler.skipped == 2 and scaler.good == 0
    other = Precision(compute="fp16").scaler()
    assert other is not None
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()


@pytest.mark.parametrize(
    "wrong", [{"scale": 0.0}, {"scale": float("inf")}, {"growth": 1.0}, {"backoff": 1.0}, {"backoff": 0.0}, {"interval": 0}]
)
def test_a_scale_that_cannot_move_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(MeshwrightError, match="a loss scale needs a finite scale > 0"):
        Precision(compute="fp16", **wrong)


def halves() -> list[nn.Module]:
    return [nn.Linear(16, 16).bfloat16(), nn.Linear(16, 16)]


def test_what_cannot_be_mixed_is_refused() -> None:
    with pytest.raises(MeshwrightError, match="no precision 'int8'"):
        Precision.of("int8")
    with pytest.raises(MeshwrightError, match=r"0.weight is bfloat16: precision bf16 keeps weights in fp32"):
        verify(halves, models.mlp_batch, {"pp": 2}, dtype="bfloat16", precision="bf16")
    with pytest.raises(MeshwrightError, match=r"0.weight is float64: precision bf16 keeps weights in fp32"):
        verify(halves, models.mlp_batch, {"pp": 2}, precision="bf16")


def test_a_process_that_dies_of_a_product_is_told_what_helps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dies = "import os, signal; os.environ.get('ONEDNN_MAX_CPU_ISA') or os.kill(os.getpid(), signal.SIGILL)"
    always = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    assert not probe.survives("bfloat16", program=dies) and probe.survives("bfloat16", program=dies, remedy=True)
    cpu, short = torch.device("cpu"), torch.bfloat16
    monkeypatch.delenv(probe.VARIABLE, raising=False)
    monkeypatch.setattr(probe, "_claims", lambda _: True)
    monkeypatch.setattr(probe, "survives", partial(probe.survives, program=dies))
    assert probe.require(None, cpu) is None and probe.VARIABLE not in probe.os.environ
    assert probe.require(short, cpu) == "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
    assert probe.os.environ[probe.VARIABLE] == probe.VALUE, "workers that start from now on have it"
    assert probe.require(short, cpu) is None, "it is set"
    monkeypatch.delenv(probe.VARIABLE)
    monkeypatch.setattr(probe, "survives", partial(probe.survives.func, program=always))
    with pytest.raises(MeshwrightError, match="a product of bfloat16 matrices crashes the process"):
        probe.require(short, cpu)


def test_only_a_cpu_that_claims_the_units_is_tried(tmp_path: Path) -> None:
    (tmp_path / "with").write_text("flags : avx512f amx_tile amx_bf16")
    (tmp_path / "without").write_text("flags : avx512f")
    assert [probe._claims(tmp_path / name) for name in ("with", "without", "absent")] == [True, False, False]
