"""What a user's optimizer would lose is refused by name: step hooks, state of steps it took. So is freezing between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwright import MeshwrightError, parallelize

BATCH = (torch.ones(4, 3), torch.zeros(4, 3))


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)]


def opened(optimizer: torch.optim.Optimizer, held: list[nn.Module]) -> Any:
    return parallelize(held, BATCH, {"pp": 1}, optimizer=optimizer, device="cpu")


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_step_hooks_are_refused(register: str) -> None:
    held = layers()
    optimizer = torch.optim.AdamW(nn.ModuleList(held).parameters())
    getattr(optimizer, register)(lambda *_: None)
    with pytest.raises(MeshwrightError, match=r"AdamW has step hooks.*\n.*step\(\) does what the hook does"):
        opened(optimizer, held)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_state_of_earlier_steps_is_refused(kind: Any) -> None:
    held = layers()
    optimizer = kind(nn.ModuleList(held).parameters(), lr=1.0)
    nn.Sequential(*held)(BATCH[0]).sum().backward()
    optimizer.step()
    with pytest.raises(MeshwrightError, match=r"state of 4 parameters from steps that it has taken"):
        opened(optimizer, held)


@pytest.mark.parametrize("start", [0.0, 0.1])
def test_state_that_the_constructor_makes_is_fine(start: float) -> None:
    held = layers()
    with opened(torch.optim.Adagrad(nn.ModuleList(held).parameters(), initial_accumulator_value=start), held) as session:
        assert session.step(BATCH).loss > 0


@pytest.mark.parametrize(("learns", "word"), [(True, "frozen"), (False, "unfrozen")])
def test_freezing_a_layer_of_a_list_between_steps_is_refused(learns: bool, word: str) -> None:
    held = layers()
    held[2].weight.requires_grad_(learns)
    with opened(torch.optim.SGD(nn.ModuleList(held).parameters(), lr=0.1), held) as session:
        session.step(BATCH)
        held[2].weight.requires_grad_(not learns)
        with pytest.raises(MeshwrightError, match=rf"2\.weight was {word} after the session was opened"):
            session.step(BATCH)
