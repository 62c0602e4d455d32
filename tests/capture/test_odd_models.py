"""Ordinary models with odd habits: they train like in one process, or are refused with what to do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import MeshwrightError, Parallel
from meshwright.ir.placement import Rows
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.stage.objective import Objective
from meshwright.train.setup.build_schedule import lists_for
from tests.conftest import Pool
from tests.support.layers_of_models import layers_for
from tests.support.training import Recipe, agree

VOCABULARY = 11


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens %= VOCABULARY  # in place, on what it was given
        return self.table(tokens)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(self.line(x))


class Real(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x.abs())


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.line(x), x


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.line(x + other)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x).transpose(0, 1)


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return mean_of_tokens(self.out(x), labels)


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.line(x).repeat(self.calls, 1)


class Quiet(nn.Module):
    """Changes its input in place and has no word for it."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x += 1.0
        return self.line(x)


class Sometimes(nn.Module):
    """Whether its output takes a gradient depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) if x.sum() > 0 else x


class Borrowing(nn.Module):
    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own, self.kept = nn.Linear(8, 8), [other]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.own(x), self.kept[0].weight)


def mean_of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=-100)


def words() -> list[nn.Module]:
    return [Embedded(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, VOCABULARY)]


def losing() -> list[nn.Module]:
    return [Embedded(), nn.Linear(8, 8), nn.Tanh(), OwnLoss()]


def layers(kind: str) -> list[nn.Module]:
    line = nn.Linear(8, 8)
    return {
        "complex": [nn.Linear(8, 8), Complex(), Real(), nn.Linear(8, 8)],
        "in place": [line, nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)],
        "quiet": [nn.Tanh(), nn.Linear(8, 8), Quiet(), Quiet()],
        "sometimes": [Sometimes(), nn.Linear(8, 8)],
        "two": [nn.Linear(8, 8), nn.Tanh(), Two(), Sum()],
        "turned": [nn.Linear(8, 8), Turned(), nn.Tanh(), Turned()],
        "changing": [nn.Linear(8, 8), Changing(), nn.Tanh(), nn.Linear(8, 8)],
        "borrowing": [line, nn.Tanh(), nn.Tanh(), Borrowing(line)],
    }[kind]


def tokens(step: int, *, all_ignored: bool = False) -> tuple[Tensor, Tensor]:
    """Uneven numbers of labels that count; on request none at all in the first microbatch."""
    random = torch.Generator().manual_seed(step)
    x = torch.randint(0, 1000, (8, 5), generator=random)
    y = torch.randint(0, VOCABULARY, (8, 5), generator=random)
    y[torch.rand(8, 5, generator=random) < 0.5] = -100
    y[:2, 1:] = -100
    if all_ignored:
        y[:2] = -100
    return x, y


def vectors(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, generator=random, dtype=torch.float64), torch.randn(8, 8, generator=random, dtype=torch.float64)


@pytest.mark.parametrize("recompute", ["none", "early"])
@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_an_own_loss_over_tokens_is_the_same_for_any_number_of_microbatches(
    pool: Pool, microbatches: int, recompute: str
) -> None:
    agree(pool, Recipe(words, tokens, loss=mean_of_tokens), pp=2, microbatches=microbatches, dp=1, recompute=recompute)


def test_a_microbatch_in_which_nothing_counts(pool: Pool) -> None:
    agree(pool, Recipe(words, partial(tokens, all_ignored=True), loss=mean_of_tokens), pp=2, microbatches=4)
    found = pool.verify(losing, partial(tokens, all_ignored=True), pp=2, microbatches=4, steps=2)
    assert found.passed and all(loss == loss for loss in found.losses)


def ignored(step: int) -> tuple[Tensor, Tensor]:
    x, y = tokens(step)
    return x, y if step != 1 else torch.full_like(y, -100)


@pytest.mark.parametrize("schedule", ["onef1b", "pipedream"])
def test_a_step_in_which_nothing_counts(pool: Pool, schedule: str) -> None:
    found = pool.verify(words, ignored, pp=2, microbatches=4, schedule=schedule, steps=3)
    assert found.passed and found.losses[0] > found.losses[1] == 0.0


@pytest.mark.parametrize("recompute", ["none", "inline", "early"])
@pytest.mark.parametrize("kind", ["complex", "in place", "quiet", "two"])
def test_odd_layers_train_as_in_one_process(pool: Pool, kind: str, recompute: str) -> None:
    found = pool.verify(partial(layers, kind), vectors, pp=2, microbatches=4, recompute=recompute, steps=2)
    assert found.passed, found.worst


def test_a_layer_that_changes_its_input_unasked_is_recomputed_in_part(pool: Pool) -> None:
    found = pool.verify(partial(layers, "quiet"), vectors, pp=2, microbatches=4, recompute=[0.5, 0.5], steps=2)
    assert found.passed, found.worst


def test_whether_a_gradient_crosses_follows_from_the_batch_alone(pool: Pool) -> None:
    with pytest.raises(MeshwrightError, match="takes a gradient in one microbatch and none in another"):
        pool.verify(partial(layers, "sometimes"), vectors, pp=2, microbatches=8, steps=1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_labels_of_any_integer_type(dtype: torch.dtype) -> None:
    output, target = torch.randn(4, 5), torch.tensor([0, 3, 1, 4])
    assert torch.equal(Objective()(output, target.to(dtype), 4.0), Objective()(output, target, 4.0))


class Holds(nn.Module):
    """A model that holds another module."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.first, self.held = nn.Linear(8, 8), held

    def forward(self, x: Tensor) -> Tensor:
        return self.held(self.first(x))


def scripted() -> nn.Module:
    return torch.jit.script(nn.Linear(8, 8))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    ("make", "text"),
    [(partial(nn.LazyLinear, 8), "LazyLinear{} does not know its shapes yet"), (scripted, "{} is compiled by torch.jit")],
)
def test_what_cannot_be_cut_is_named(make: Any, text: str) -> None:
    with pytest.raises(MeshwrightError, match=text.format("")):
        layers_for([nn.Linear(8, 8), make()], vectors(0), 2)
    with pytest.raises(MeshwrightError, match=text.format(" held")):
        layers_for(Holds(make()), (torch.zeros(2, 8),), 2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.bool])
def test_only_labels_with_a_sign_can_be_ignored(dtype: torch.dtype) -> None:
    """156 is what -100 would be in a byte."""
    target = torch.tensor([1, 156, -100]).to(dtype)
    counts = {torch.uint8: 3, torch.int8: 1, torch.int64: 2, torch.bool: 3}
    assert Objective().weight(target, Rows(0, 3)).items == counts[dtype]


def test_half_precision_does_not_lose_the_loss(pool: Pool) -> None:
    found = pool.verify(words, tokens, pp=2, microbatches=8, dtype="bfloat16", steps=1)
    assert found.loss_error < 1e-2 and found.losses[0] < 100


def test_what_has_no_rows_cannot_be_cut_by_rows(pool: Pool) -> None:
    with pytest.raises(MeshwrightError, match="rows first"):
        pool.verify(partial(layers, "turned"), tokens_of_vectors, pp=2, microbatches=2, width=(1, 2), steps=1)
    halving = {"schedule": "chimera", "options": {"mode": "halving"}}
    with pytest.raises(MeshwrightError, match="rows first"):
        pool.verify(partial(layers, "turned"), tokens_of_vectors, pp=2, microbatches=4, steps=1, **halving)


def tokens_of_vectors(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x, x


def test_shapes_follow_from_the_batch_alone(pool: Pool) -> None:
    with pytest.raises(MeshwrightError, match="other shapes than before"):
        pool.run(train, "changing", ranks=2)


def train(kind: str) -> None:
    from meshwright.runtime.stage.layers import Layers
    from meshwright.train.verify.verify import momentum

    plan = Parallel(pp=2, microbatches=4, transport="torch")
    engine = Engine(
        lists_for(plan), Layers.of([m.double() for m in layers(kind)], 2), Settings(optimizer=momentum, microbatches=4)
    )
    engine.run(vectors)


def test_a_tie_that_cannot_be_seen_is_refused(pool: Pool) -> None:
    with pytest.raises(MeshwrightError, match="without registering it"):
        pool.verify(partial(layers, "borrowing"), vectors, pp=2, microbatches=4, steps=1)


def normed(kind: str) -> list[nn.Module]:
    pairs = nn.Sequential(nn.Unflatten(1, (4, 2)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten())
    return [nn.Linear(8, 8), nn.BatchNorm1d(8) if kind == "batch" else pairs, nn.Tanh(), nn.Linear(8, 8)]


def statistics(kind: str, recompute: str) -> dict[str, Any]:
    from meshwright.runtime.stage.layers import Layers
    from meshwright.train.verify.verify import momentum

    torch.manual_seed(0)
    model = Layers.of([m.double() for m in normed(kind)], 2)
    plan = Parallel(pp=2, microbatches=4, recompute=recompute)
    engine = Engine(lists_for(plan), model, Settings(optimizer=momentum, microbatches=4))
    engine.run(vectors)
    engine.close()
    return {name.rpartition(".")[2]: tensor for name, tensor in model.modules[1].state_dict().items()}


class Codebook(nn.Module):
    """What it returns depends on a buffer that follows the data, by a new tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        found = x * (1 + self.mean)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return found


def following(kind: str) -> list[nn.Module]:
    torch.manual_seed(0)
    linear = nn.Linear(8, 8)
    moves = nn.utils.parametrizations.spectral_norm(linear) if kind == "spectral" else Codebook()
    return [nn.Linear(8, 8), moves, nn.Tanh(), nn.Linear(8, 8)]


@pytest.mark.parametrize("kind", ["spectral", "codebook"])
@pytest.mark.parametrize("recompute", ["inline", "early", [0.6, 0.0]])
def test_a_layer_runs_again_on_the_buffers_that_it_ran_on(pool: Pool, recompute: Any, kind: str) -> None:
    """One process takes microbatch after microbatch, so its buffers move as those of the first stage do."""
    found = pool.verify(partial(following, kind), vectors, pp=2, microbatches=4, recompute=recompute, steps=2)
    assert found.passed, found.worst


@pytest.mark.parametrize("kind", ["batch", "instance"])
@pytest.mark.parametrize("recompute", ["inline", "early"])
def test_statistics_are_counted_once_under_recompute(pool: Pool, recompute: str, kind: str) -> None:
    kept, again = pool.run(statistics, kind, "none", ranks=2)[0], pool.run(statistics, kind, recompute, ranks=2)[0]
    assert kept["num_batches_tracked"] == again["num_batches_tracked"] == (4 if kind == "batch" else 0)
    assert kept["running_mean"].any()
    assert torch.equal(kept["running_mean"], again["running_mean"])
