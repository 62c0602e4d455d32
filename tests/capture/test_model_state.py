"""Models with state of their own: buffers that stages share, parts that stay in evaluation, branches on recording gradients."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.capture.trace.export import flatten
from meshwright.train.session.model_changes import ModelChanges
from tests.support import hard_models as hard
from tests.support.layers_of_models import layers_for

RATE = 0.1


class Feedback(hard.Base):
    """A buffer that the beginning reads and the end writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(8))

    def body(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.centre
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.centre.add_(x.detach().mean(0))
        return x


class FrozenNorm(hard.Base):
    """A norm that `train()` leaves in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def body(self, x: Tensor) -> Tensor:
        return self.norm(super().body(x))


class Recording(hard.Base):
    """Something else where no gradients are recorded."""

    def body(self, x: Tensor) -> Tensor:
        found = super().body(x)
        return found * 2 if torch.is_grad_enabled() else found


class OwnGenerator(hard.Base):
    def __init__(self) -> None:
        super().__init__()
        self.drawn = torch.Generator().manual_seed(0)

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) * torch.rand((), generator=self.drawn)


class Reassigned(hard.Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))

    def body(self, x: Tensor) -> Tensor:
        found = super().body(x)
        self.average = 0.9 * self.average + 0.1 * found.detach().mean(0)
        return found - self.average


def test_a_buffer_that_two_stages_use_is_refused() -> None:
    model, batch = Feedback(), hard.features(4)
    assert layers_for(model, batch, 1).stages == 1
    with pytest.raises(MeshwrightError, match=r"changes the buffer 'centre', and stages 0 and 1 both use it"):
        layers_for(model, batch, 2)


@pytest.mark.parametrize("kind", [FrozenNorm, Recording, Feedback])
def test_state_and_modes_are_the_models(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, batches = kind(), [hard.features(8, step=step) for step in range(3)]
    plain = copy.deepcopy(model).train()
    optimizer, wanted = torch.optim.SGD(plain.parameters(), lr=RATE), []
    for batch in batches:
        optimizer.zero_grad()
        loss = plain(**batch)[0]
        loss.backward()
        optimizer.step()
        wanted.append(float(loss.detach()))
    plan = {"pp": 1, "microbatches": 1}
    with mw.parallelize(model, batches[0], plan, optimizer=torch.optim.SGD(model.parameters(), lr=RATE)) as session:
        assert [session.step(batch).loss for batch in batches] == pytest.approx(wanted, rel=1e-5)
        found = session.evaluate(batches[0]).loss
    with torch.no_grad():
        assert found == pytest.approx(float(plain.eval()(**batches[0])[0]), rel=1e-5)


def test_a_generator_of_the_model_is_refused() -> None:
    with pytest.raises(MeshwrightError, match="Generator, which a captured graph cannot hold"):
        flatten(OwnGenerator(), hard.features(4))


def test_a_new_tensor_for_a_buffer_is_refused() -> None:
    model = Reassigned()
    with pytest.raises(MeshwrightError, match=r"assigns a new tensor to the buffer average(.|\n)*self\.average\.copy_"):
        mw.parallelize(model, hard.features(4), {"pp": 1}, optimizer=torch.optim.SGD(model.parameters(), lr=RATE))


class Pictures(nn.Module):
    """Bytes are scaled, numbers are taken as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        x = x.float() / 255 if x.dtype == torch.uint8 else x
        return (((self.last(torch.tanh(self.first(x))).squeeze(-1) - labels) ** 2).mean(),)


def _still(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def test_columns_of_another_dtype_are_captured_again() -> None:
    torch.manual_seed(0)
    model, labels = Pictures(), torch.randn(8)
    raw = {"x": torch.randint(0, 255, (8, 8), dtype=torch.uint8), "labels": labels}
    scaled = {"x": torch.randn(8, 8), "labels": labels}
    with mw.parallelize(model, raw, {"pp": 1, "microbatches": 2}, optimizer=_still) as session:
        for batch in (raw, scaled, raw):
            wanted = pytest.approx(float(model(**batch)[0].detach()), rel=1e-5)
            assert session.step(batch).loss == wanted and session.evaluate(batch).loss == wanted


def test_a_step_takes_lists_and_arrays_and_refuses_what_is_no_number() -> None:
    model, batch = Pictures(), {"x": torch.randn(4, 8), "labels": torch.randn(4)}
    with mw.parallelize(model, batch, {"pp": 1}, optimizer=_still) as session:
        wanted = session.step(batch).loss
        given = {"x": batch["x"].numpy(), "labels": batch["labels"].tolist(), "unused": None}
        assert session.step(given).loss == pytest.approx(wanted) == session.evaluate(given).loss  # type: ignore[arg-type]
        for wrong in ({**batch, "x": ["a", "b", "c", "d"]}, "text", None):
            with pytest.raises(MeshwrightError, match=r"'x' of the batch is not a tensor|a batch must be a tuple or a mapping"):
                session.step(wrong)  # type: ignore[arg-type]


def test_what_is_changed_between_steps_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = hard.Base(), hard.features(4)
    model.alpha = 1.0
    with mw.parallelize(model, batch, {"pp": 1}, optimizer=_still) as session:
        session.step(batch)
        model.alpha = 0.3
        session.step(batch)
        assert "Base.alpha was 1.0 when the model was captured and is 0.3 now" in caplog.text
        model.first.weight.requires_grad_(False)
        with pytest.raises(MeshwrightError, match=r"first\.weight was frozen after the model was captured"):
            session.step(batch)


@dataclass
class Weights:
    kl: float = 0.1
    parts: list[float] = field(default_factory=lambda: [1.0, 2.0])


@dataclass(slots=True)
class Slots:
    kl: float = 0.1


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "namespace": (lambda m: setattr(m.cfg, "beta", 0.5), "Base.cfg.beta was 0.0 when the model was captured and is 0.5 now"),
    "deeper": (lambda m: setattr(m.cfg.inner, "kl", 0.2), "Base.cfg.inner.kl was 0.1 .* and is 0.2 now"),
    "dict": (lambda m: m.table.update(beta=0.5), r"Base.table\['beta'\] was 0.0 .* and is 0.5 now"),
    "private": (lambda m: m._table.update(beta=0.5), r"Base._table\['beta'\] was 0.0 .* and is 0.5 now"),
    "new key": (lambda m: m.table.update(gamma=0.5), "Base.table was a dict of 3 .* and is a dict of 4 now"),
    "list": (lambda m: m.cfg.inner.parts.__setitem__(1, 3.0), r"Base.cfg.inner.parts\[1\] was 2.0 .* and is 3.0 now"),
    "longer": (lambda m: m.cfg.inner.parts.append(3.0), "Base.cfg.inner.parts was a list of 2 .* and is a list of 3 now"),
    "object": (lambda m: setattr(m, "cfg", SimpleNamespace(beta=1.0)), "Base.cfg.beta was 0.0 .* and is 1.0 now"),
    "tuple": (lambda m: setattr(m, "sizes", (1, 3)), r"Base.sizes was \(1, 2\) .* and is \(1, 3\) now"),
    "in a tuple": (lambda m: setattr(m.pair[0], "kl", 0.2), r"Base.pair\[0\].kl was 0.1 .* and is 0.2 now"),
    "slots": (lambda m: setattr(m.slots, "kl", 0.2), "Base.slots.kl was 0.1 .* and is 0.2 now"),
    "config": (lambda m: setattr(m.config, "vocab_size", 7), "Base.config.vocab_size was 50257 .* and is 7 now"),
    "buffer": (lambda m: setattr(m, "scale", torch.ones(1)), "Base.scale was a tensor .* and is another tensor now"),
    "tensor": (lambda m: setattr(m, "mask", torch.ones(1)), "Base.mask was a tensor .* and is another tensor now"),
    "number to tensor": (lambda m: setattr(m.cfg, "beta", torch.ones(1)), "Base.cfg.beta was 0.0 .* and is a tensor now"),
}


def _with_values() -> Any:
    model: Any = hard.Base()
    model.cfg = SimpleNamespace(beta=0.0, inner=Weights(), model=model, nan=float("nan"))
    model.table = {"beta": 0.0, "again": model.cfg, "far": list(range(5000))}
    model._table = {"beta": 0.0}
    model.sizes, model.pair, model.config = (1, 2), (Weights(), 1), GPT2Config()
    model.mask, model.slots = torch.zeros(1), Slots()
    model.register_buffer("scale", torch.zeros(1))
    return model


@pytest.mark.parametrize("kind", CHANGES)
def test_values_inside_containers_are_watched(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = _with_values()
    changes, (change, words) = ModelChanges(model), CHANGES[kind]
    for module in (model, model.eval(), model.train()):
        module.scale.add_(1)  # in place: followed, as all modes are
        changes.check()
    assert not caplog.text
    change(model)
    changes.check()
    changes.check()
    assert len(caplog.messages) == 1 and re.search(words, caplog.text)


def test_a_value_that_changes_at_every_step_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    model = _with_values()
    changes = ModelChanges(model)
    for step in range(40):
        model.cfg.beta = step + 0.5
        if step == 5:
            model.cfg.inner.kl = 0.7
        changes.check()
    assert [message.split()[0] for message in caplog.messages] == ["Base.cfg.beta", "Base.cfg.inner.kl"]
    model.first.weight.requires_grad_(False)
    model.cfg.beta = 0.0
    with pytest.raises(MeshwrightError, match=r"first\.weight was frozen"):
        changes.check()


def test_an_annealed_config_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = hard.Base(), hard.features(4)
    model.cfg = given = SimpleNamespace(beta=0.0)  # type: ignore[assignment]
    with mw.parallelize(model, batch, {"pp": 1}, optimizer=_still) as session:
        session.step(batch)
        given.beta = 0.5
        session.step(batch)
    assert "Base.cfg.beta was 0.0 when the model was captured and is 0.5 now" in caplog.text


class _Warms(hard.Base):
    """Scales by a tensor that is no buffer, which a loop raises from step to step."""

    def __init__(self, *, is_buffer: bool) -> None:
        super().__init__()
        if is_buffer:
            self.register_buffer("warmth", torch.ones(()))
        else:
            self.warmth = torch.ones(())

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) * self.warmth


@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_tensor_that_is_changed_in_place_is_followed_or_named(is_buffer: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = _Warms(is_buffer=is_buffer), hard.features(4)
    with mw.parallelize(model, batch, {"pp": 1}, optimizer=_still) as session:
        session.step(batch)
        assert not caplog.text
        model.warmth.add_(2)
        found = session.step(batch).loss
        session.step(batch)
    follows = found == pytest.approx(float(model(**batch)[0].detach()), rel=1e-5)
    assert follows == is_buffer
    told = "_Warms.warmth is a tensor that was changed in place after the model was captured"
    assert [told in message for message in caplog.messages] == ([] if is_buffer else [True])


def test_buffers_that_forward_changes_are_known() -> None:
    assert layers_for(FrozenNorm(), hard.features(4), 1).moved == ()
    assert layers_for(Feedback(), hard.features(4), 1).moved == ("centre",)


class _Weighted(hard.Base):
    """Takes weights of rows where there are some."""

    def forward(self, x: Tensor, labels: Tensor, weights: Tensor | None = None) -> tuple[Tensor]:  # type: ignore[override]
        losses = torch.nn.functional.cross_entropy(self.head(self.body(x)), labels, reduction="none")
        return ((losses if weights is None else losses * weights).mean(),)


def test_a_column_that_comes_later_is_refused() -> None:
    batch = hard.features(4)
    with mw.parallelize(_Weighted(), batch, {"pp": 1}, optimizer=_still) as session:
        session.step(batch)
        for run in (session.step, session.evaluate):
            with pytest.raises(MeshwrightError, match="a column 'weights' that the model was captured without"):
                run({**batch, "weights": torch.arange(4.0)})
        with pytest.raises(MeshwrightError, match="the batch has 4 tensors, but the model was captured with 2"):
            session.step((*batch.values(), torch.ones(4), torch.ones(4)))
