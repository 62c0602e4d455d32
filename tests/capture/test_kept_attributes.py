"""A model that keeps values in attributes is the same before and after it is captured."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from meshwright import capture
from meshwright.capture.check.restore_model import untouched


class Keeps(nn.Module):
    """A cache by size, a counter, a list of what was seen, and a plain object with a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cache: dict[int, Tensor] = {}
        self.seen: list[Tensor] = []
        self.notes = SimpleNamespace(last=None)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        rows = x.shape[1]
        if rows not in self.cache:
            self.cache[rows] = torch.arange(4.0) + x.detach()[0, 0]
        self.seen.append(x)
        self.notes.last = x * 2
        self.mask = x > 0
        return self.linear(x) + self.notes.last


def test_a_captured_model_keeps_nothing_of_the_trace() -> None:
    model = Keeps()
    capture(model, (torch.ones(2, 4),))
    assert (model.cache, model.seen, model.notes.last, model.calls) == ({}, [], None, 0)
    assert not hasattr(model, "mask")
    x = torch.randn(3, 4)
    again = copy.deepcopy(model)
    assert torch.equal(model(x), again(x)) and model.calls == 1


class Hooked(nn.Module):
    """Registers a hook in its first forward and notes it, as models of transformers do that return hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.found: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "hooked", False):
            self.first.register_forward_hook(lambda _module, _inputs, output: self.found.append(output))
            self.hooked = True
        self.found = []
        y = self.second(self.first(x))
        return y + self.found[-1] * len(self.found)


def test_hooks_go_with_the_attribute_that_notes_them() -> None:
    model, x = Hooked(), torch.randn(3, 4)
    expected = copy.deepcopy(model)(x)
    capture(model, (torch.ones(2, 4),))
    assert not model.first._forward_hooks and not hasattr(model, "hooked")
    with untouched(model, []):
        model(x)
    assert not model.first._forward_hooks and not hasattr(model, "hooked")
    assert torch.equal(model(x), expected) and len(model.first._forward_hooks) == 1
