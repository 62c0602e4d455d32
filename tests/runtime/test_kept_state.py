"""Layers that keep state, change what they are given, or carry hooks: they train as in one process, or are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright import MeshwrightError, Parallel
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.parameters.parameters import Rules
from meshwright.runtime.stage.layers import Layers
from meshwright.train.setup.build_schedule import lists_for
from meshwright.train.verify.verify import momentum
from tests.conftest import Pool


class Counting(nn.Module):
    """Hands on a buffer that it changes in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.add_(1)
        return self.line(x), self.seen


class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        return self.line(x) / (1 + by)


class Late(nn.Module):
    """Its mean starts to move after four microbatches; `wide` is how many numbers it has beside those that count."""

    def __init__(self, wide: int = 0) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4 + wide))

    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x)
        self.seen.add_(1)
        if self.seen > 4:
            self.mean[:4].mul_(0.5).add_(y.detach().mean(0), alpha=0.5)
        return torch.tanh(y - self.mean[:4])


class Clipped(nn.Module):
    """Changes its input in place where that is out of range, and says nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        large = x.abs() > 1
        if large.any():
            x.masked_fill_(large, 0.0)
        return self.line(torch.sin(x))


class Head(nn.Module):
    """The loss in the model; it brings its target into range in place."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        target.div_(255.0)
        return ((self.line(x) - target) ** 2).mean()


class Tabular(nn.Module):
    """Attributes of the user's own that mean nothing to anybody else."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.columns, self.shares = ["age", "height"], 3

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)


class Borrowing(nn.Module):
    """Uses another layer's weight, and keeps it where nobody looks."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.line, self.others = nn.Linear(4, 4), [other]

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) @ self.others[0].weight


def masked(weight: Tensor) -> Tensor:
    return weight.triu()


def layers(kind: str) -> list[nn.Module]:
    def linear() -> nn.Linear:
        return nn.Linear(4, 4)

    match kind:
        case "counting":
            return [Counting(), Divided()]
        case "late":
            return [Late(), Late(), Late(), linear()]
        case "late and large":
            return [Late(wide=20_000), linear(), linear(), linear()]
        case "clipped":
            return [linear(), linear(), Clipped(), linear()]
        case "head":
            return [linear(), nn.Tanh(), linear(), Head()]
        case "tabular":
            return [Tabular(), linear(), Tabular(), linear()]
        case "sparse":
            return [nn.Embedding(8, 4, sparse=True), linear()]
        case "borrowing":
            first = linear()
            return [first, linear(), linear(), Borrowing(first)]
        case "hooked":
            hooked = [linear() for _ in range(4)]
            hooked[0].weight.register_hook(masked)
            return hooked
    return [linear() for _ in range(4)]


def vectors(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    size = 0.01 if step == 0 else 5.0
    return size * torch.randn(16, 4, generator=random), torch.randn(16, 4, generator=random)


def tokens(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randint(0, 8, (8,), generator=random), torch.randn(8, 4, generator=random)


def in_place(output: Tensor, target: Tensor) -> Tensor:
    target.div_(255.0)
    return ((output - target) ** 2).mean()


@pytest.mark.parametrize("transport", ["shared", "torch"])
@pytest.mark.parametrize("recompute", ["none", "inline"])
def test_what_crosses_does_not_change_on_its_way(pool: Pool, transport: str, recompute: str) -> None:
    plan = {"pp": 2, "schedule": "gpipe", "microbatches": 8, "transport": transport, "recompute": recompute}
    found = pool.verify(partial(layers, "counting"), vectors, steps=2, **plan)
    assert found.passed, found.worst


@pytest.mark.parametrize("recompute", ["inline", "early"])
@pytest.mark.parametrize("kind", ["late", "head", "in place"])
def test_what_runs_again_finds_everything_as_it_was(pool: Pool, kind: str, recompute: str) -> None:
    own = {"loss": in_place} if kind == "in place" else {}
    found = pool.verify(partial(layers, kind), vectors, pp=2, microbatches=4, recompute=recompute, steps=3, **own)
    assert found.passed, found.worst


@pytest.mark.parametrize(
    ("kind", "text"),
    [("clipped", "changes its input in place for some data"), ("late and large", "'mean' of a Late did not change")],
)
def test_what_could_not_run_again_is_said(pool: Pool, kind: str, text: str) -> None:
    with pytest.raises(MeshwrightError, match=text):
        pool.verify(partial(layers, kind), vectors, pp=2, microbatches=4, recompute="early", steps=3)


@pytest.mark.parametrize(("kind", "batch"), [("tabular", vectors), ("sparse", tokens)])
def test_layers_with_names_and_gradients_of_their_own(pool: Pool, kind: str, batch: Any) -> None:
    found = pool.verify(partial(layers, kind), batch, pp=2, microbatches=4, steps=2)
    assert found.passed, found.worst


def engine(kind: str, schedule: str = "onef1b", on_rank_1: str = "") -> Tensor:
    """How a step changes the first weight, where rank 1 may have been given something else."""
    other = dist.get_rank() == 1
    torch.manual_seed(0)
    plan = Parallel(
        pp=2,
        schedule="gpipe" if other and on_rank_1 == "schedule" else schedule,
        microbatches=8 if other and on_rank_1 == "microbatches" else 4,
    )
    model = layers(kind)
    settings = Settings(
        optimizer=momentum,
        microbatches=plan.microbatches,
        rules=Rules(clip=0.1 if other and on_rank_1 == "rules" else None),
        transport="torch" if other and on_rank_1 == "transport" else "auto",
    )
    built = Engine(lists_for(plan), Layers.of(model, 2), settings)
    before = model[0].weight.detach().clone()  # type: ignore[operator]
    built.run(vectors)
    built.close()
    return model[0].weight.detach() - before  # type: ignore[operator, no-any-return]


@pytest.mark.parametrize("schedule", ["zero_bubble", "pipedream_2bw"])
def test_gradient_hooks_are_refused_where_nobody_would_call_them(pool: Pool, schedule: str) -> None:
    with pytest.raises(MeshwrightError, match=r"0\.weight has a gradient hook"):
        pool.run(engine, "hooked", schedule, ranks=2)
    pool.close()


def test_gradient_hooks_are_called_in_whole_backwards(pool: Pool) -> None:
    change = pool.run(engine, "hooked", ranks=2)[0]
    assert change.triu().any() and not change.tril(-1).any(), "masked below the diagonal"
    with pytest.raises(MeshwrightError, match="verify the model without its hooks"):
        pool.verify(partial(layers, "hooked"), vectors, pp=2, microbatches=4, steps=1)


def test_a_tie_that_cannot_be_seen_is_refused_by_a_run_too(pool: Pool) -> None:
    with pytest.raises(MeshwrightError, match=r"a layer uses 0\.weight of another layer"):
        pool.run(engine, "borrowing", ranks=2)
    pool.close()


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("schedule", "ranks have different schedules: rank 0 has onef1b .*, rank 1 has gpipe"),
        ("microbatches", "ranks have different schedules"),
        ("rules", r"ranks have different settings, rules: rank 0 has Rules\(clip=None.*rank 1 has Rules\(clip=0.1"),
        ("transport", "ranks have different settings, transport: rank 0 has 'auto', rank 1 has 'torch'"),
    ],
)
def test_ranks_that_were_given_different_things_are_told_at_once(what: str, text: str) -> None:
    with Workers(2, timeout_s=20) as workers, pytest.raises(MeshwrightError, match=text):
        workers.run(engine, "plain", "onef1b", what)


@pytest.mark.parametrize("arguments", [{"count": 0}, {"count": -1}, {"count": 1.5}, {"count": 2, "timeout_s": float("nan")}])
def test_workers_are_a_number_and_have_time(arguments: dict[str, Any]) -> None:
    with pytest.raises(MeshwrightError, match="got"):
        Workers(**arguments)


def shouts() -> None:
    raise ValueError("the real reason " + "x" * 20_000_000)


def test_a_long_error_keeps_its_reason() -> None:
    with Workers(1) as workers, pytest.raises(MeshwrightError, match="ValueError: the real reason x") as caught:
        workers.run(shouts)
    assert len(str(caught.value)) < 100_000
