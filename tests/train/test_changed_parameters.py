"""What a user changes between two steps: parameters that are written or replaced, and a state that is loaded again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.runtime.parameters.absent import AbsentParameter, hide, show

ALONE: list[dict[str, Any]] = [
    {"dp": 1, "dp_mode": mode} for mode in ("replicated", "zero-1", "zero-2", "cyclic", "cyclic-zero", "cyclic-pp")
]
"""Plans of one rank. With one copy, no gradient is late."""


class Scaled(nn.Module):
    """Layers with a parameter of one element between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gain, self.last = nn.Linear(4, 4), nn.Parameter(torch.ones(())), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.gain)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Scaled().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(6, 4, generator=random, dtype=torch.float64), torch.randint(0, 3, (6,), generator=random)


def opened(trained: nn.Module, plan: dict[str, Any], optimizer: Any = torch.optim.AdamW) -> mw.Session:
    how = {"loss": nn.functional.cross_entropy, "device": "cpu", "check_capture": False}
    return mw.parallelize(trained, batch(0), plan, optimizer=optimizer(trained.parameters(), lr=0.1), **how)


def replace(trained: nn.Module) -> None:
    for p in trained.parameters():
        p.data = p.data * 0.5


def write(trained: nn.Module) -> None:
    with torch.no_grad():
        for p in trained.parameters():
            p.mul_(0.5)


@pytest.mark.parametrize("change", [replace, write])
@pytest.mark.parametrize("plan", ALONE, ids=lambda plan: plan["dp_mode"])
def test_training_follows_what_is_written_into_parameters(plan: dict[str, Any], change: Any) -> None:
    alone, trained = model(), model()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    with opened(trained, plan) as session:
        for step in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(alone(batch(step)[0]), batch(step)[1]).backward()
            optimizer.step()
            session.step(batch(step))
            change(alone)
            change(trained)
    for one, other in zip(trained.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("change", [replace, write, lambda trained: trained.gain.data.fill_(2.0)])
def test_a_write_to_divided_parameters_is_refused(change: Any) -> None:
    trained = model()
    with opened(trained, {"dp": 1, "dp_mode": "zero-3", "options": {"chunks": 2}}) as session:
        session.step(batch(0))
        with pytest.raises(MeshwrightError, match="values are on other ranks") as error:
            change(trained)
        assert "load_state_dict" in str(error.value)
        assert session.evaluate(batch(0)).loss > 0
        state = session.state_dict()
        state["tensors"]["model/gain"] *= 2
        session.load_state_dict(state)
        session.step(batch(1))


WRITES = [
    lambda p: p.zero_(),
    lambda p: p.data.zero_(),
    lambda p: p.detach().add_(1),
    lambda p: p.data.view(-1)[:1].fill_(1.0),
    lambda p: p.__setitem__(..., 0.0),
    lambda p: nn.init.ones_(p),
    lambda p: torch.add(p, 1, out=p),
    lambda p: torch._foreach_mul_([p], 2.0),
    lambda p: setattr(p, "data", torch.ones_like(p)),
]


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
@pytest.mark.parametrize("number", range(len(WRITES)))
def test_every_kind_of_write_is_seen(number: int, shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.ones(shape))
    hide(parameter)
    with torch.no_grad(), pytest.raises(MeshwrightError, match="write would be lost"):
        WRITES[number](parameter)
    assert parameter.isnan().all() and parameter.shape == shape and isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad_().untyped_storage().nbytes() == 4
    show(parameter)
    parameter.data = torch.zeros(shape)
    assert type(parameter) is nn.Parameter and not parameter.any()


def test_moving_a_module_to_its_own_device_is_no_write() -> None:
    layer = nn.Linear(2, 2)
    hide(layer.weight)
    assert layer.to("cpu").weight.isnan().all() and type(layer.weight) is AbsentParameter


def test_reading_and_gradients_are_free() -> None:
    parameter, other = nn.Parameter(torch.ones(2)), torch.zeros(2)
    hide(parameter)
    parameter.grad = torch.ones(2)
    parameter.grad = None
    other.copy_(parameter.detach())
    assert other.isnan().all() and type(parameter + 1) is Tensor and parameter.data.clone().fill_(3.0).sum() == 6


@pytest.mark.parametrize("plan", [*ALONE, {"dp": 1, "dp_mode": "zero-3", "options": {"chunks": 2}}], ids=lambda p: p["dp_mode"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad])
def test_a_state_of_the_start_forgets_the_steps_since(plan: dict[str, Any], optimizer: Any) -> None:
    with opened(model(), plan, optimizer) as session:
        start = session.state_dict()
        first = [session.step(batch(step)).loss for step in range(3)]
        session.load_state_dict(start)
        assert [session.step(batch(step)).loss for step in range(3)] == first


def test_a_state_of_another_optimizer_is_refused() -> None:
    with opened(model(), {"dp": 1}, torch.optim.SGD) as session:
        session.step(batch(0))
        state = session.state_dict()
    words = "trained with SGD, but the optimizer now is AdamW"
    with opened(model(), {"dp": 1}) as session, pytest.raises(MeshwrightError, match=words):
        session.load_state_dict(state)


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Rprop])
def test_parameters_in_no_group_are_not_given_to_the_optimizer(kind: Any) -> None:
    """Muon takes matrices only, and Rprop moves parameters by its own step sizes, also with a learning rate of 0."""
    alone, trained = model(), model()
    made = kind([alone.first.weight, alone.last.weight], lr=0.1)
    how = {"loss": nn.functional.cross_entropy, "device": "cpu", "check_capture": False}
    optimizer = kind([trained.first.weight, trained.last.weight], lr=0.1)
    with mw.parallelize(trained, batch(0), {"dp": 1}, optimizer=optimizer, **how) as session:
        for step in range(3):
            made.zero_grad()
            nn.functional.cross_entropy(alone(batch(step)[0]), batch(step)[1]).backward()
            made.step()
            session.step(batch(step))
    for one, other in zip(trained.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


READS: dict[str, Any] = {
    "forward": lambda trained: trained(batch(0)[0]),
    "state_dict": lambda trained: trained.state_dict(),
    "data": lambda trained: trained.gain.data,
    "transposed": lambda trained: trained.first.weight.T,
    "moved": lambda trained: trained.float(),
    "a second session": lambda trained: opened(trained, {"dp": 1}),
}


def after_closing(fails: bool) -> nn.Module:
    trained = model()
    try:
        with opened(trained, {"dp": 1, "dp_mode": "zero-3", "options": {"chunks": 2}}) as session:
            session.step(batch(0))
            if fails:
                raise InterruptedError
    except InterruptedError:
        pass
    return trained


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("read", READS)
def test_divided_parameters_are_not_read_after_their_session(read: str, fails: bool) -> None:
    """They would be NaN. What needs no values still works."""
    trained = after_closing(fails)
    with pytest.raises(MeshwrightError, match="the session that trained it is closed") as error:
        READS[read](trained)
    assert error.value.fix and "session.broadcast_weights()" in error.value.fix
    trained.zero_grad()
    assert sum(p.numel() for p in trained.parameters()) == 36 and "nan" in repr(trained.gain)
    assert trained.first.weight.shape == (4, 4) and trained.gain.is_leaf and trained.gain.dtype == torch.float64
    if read == "forward":
        trained.load_state_dict(model().state_dict(), assign=True)
    else:
        replace_by_ones(trained)
    assert trained(batch(0)[0]).isfinite().all()


def replace_by_ones(trained: nn.Module) -> None:
    for p in trained.parameters():
        p.data = torch.ones(p.shape, dtype=p.dtype)


def test_whole_parameters_are_read_after_their_session() -> None:
    trained = model()
    with opened(trained, {"dp": 1, "dp_mode": "zero-3", "options": {"chunks": 2}}) as session:
        loss = session.evaluate(batch(0)).loss
        session.broadcast_weights()
    assert nn.functional.cross_entropy(trained(batch(0)[0]), batch(0)[1]).item() == pytest.approx(loss, rel=1e-12)


class TwoFormats(nn.Module):
    """Parameters of one unit in float32 and float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x.float()).double().tanh()).float())


def loaded_again(mode: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    trained = TwoFormats()
    with opened(trained, {"dp": 1, "dp_mode": mode, "options": {"chunks": 1} if mode == "zero-3" else {}}) as session:
        session.step(batch(0))
        session.load_state_dict(session.state_dict())
        session.step(batch(1))
        return session.state_dict()["tensors"]


@pytest.mark.parametrize("mode", ["zero-1", "zero-3"])
def test_a_divided_state_keeps_the_dtype_of_its_parameter(mode: str) -> None:
    whole, divided = loaded_again("replicated"), loaded_again(mode)
    assert {name: t.dtype for name, t in whole.items()} == {name: t.dtype for name, t in divided.items()}
    assert all(torch.equal(t, divided[name]) for name, t in whole.items())
