"""Random models whose forward takes views and writes into them in place: inputs for tests of capture.

`program(seed)` is the source of a module; `made(seed)` builds it with a batch. Values that depend on parameters, values that
do not, buffers, writes under no_grad, `out=` and `_foreach_` writes are mixed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8

_VIEWS = (
    *("{0}.view(-1, 8)", "{0}[:, :4]", "{0}[:, 2:6]", "{0}.transpose(0, 1)", "{0}.unsqueeze(0)", "torch.ravel({0})"),
    *("torch.atleast_3d({0})", "{0}.tensor_split(2, dim=1)[1]", "{0}.chunk(2, dim=1)[0]", "{0}.unbind(1)[3]"),
    *("{0}.reshape(-1, 2, 4)", "{0}.contiguous()", "{0}.to(torch.float32)", "{0}.swapdims(0, 1)", "{0}.expand_as({0})"),
    *("torch.view_as_real(torch.view_as_complex({0}.reshape(-1, 4, 2)))", "{0}.narrow(1, 1, 3)", "{0}.select(1, 2)"),
    *("{0}.broadcast_to({0}.shape)", "{0}.movedim(0, 1)", "{0}.detach()", "F.dropout({0}, 0.0)", "torch.positive({0})"),
    *("{0}.T", "{0}.type_as({0})", "{0}.float()", "torch.squeeze({0})", "{0}.unfold(1, 4, 4)", "{0}.flatten()", "{0}.data"),
)
_WRITES = (
    *("{0}.mul_(1.5)", "{0}.add_(0.3)", "{0}.neg_()", "{0}[0] = 0.7", "{0}.copy_(torch.full_like({0}, 0.2))", "{0} += 1"),
    *("{0}.fill_(0.4)", "{0}.zero_()", "{0}[..., 0] *= 2", "torch._foreach_mul_([{0}], 1.25)"),
    *("{0}.masked_fill_(torch.ones_like({0}, dtype=torch.bool), 0.1)", "{0}.index_fill_(0, torch.tensor([0]), 0.9)"),
)
_FREE = ("x * 2", "x.clone()", "torch.cos(x)", "x + 1", "torch.zeros_like(x)", "s.buf + x")
_OUT = ("torch.mul(x, 1.5, out={0})", "torch.add(x, 1, out={0})")


class _Program:
    """Lines of a forward; `bound` are names that depend on parameters, `free` those that do not."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines, self.bound, self.free = ["h = s.first(x)"], ["h"], list[str]()
        self.names = self.layers = 0

    def new(self, text: str) -> str:
        self.names += 1
        self.lines.append(f"t{self.names} = {text}")
        return f"t{self.names}"

    def layer(self) -> None:
        taken, choose = self.random.choice(self.bound), self.random.choice
        more = choose(["", f" + {taken}", f" + {choose(self.bound)}"])
        self.bound.append(self.new(f"{choose(['torch.tanh', 'torch.sin', '1.0 *'])} (s.l[{self.layers}]({taken})){more}"))
        self.layers += 1

    def write(self) -> None:
        choose, chance = self.random.choice, self.random.random
        pool = list(self.free if self.free and chance() < 0.6 else self.bound) + (["s.buf"] if chance() < 0.15 else [])
        view = self.new(choose(_VIEWS).format(choose(pool)))
        if chance() < 0.3:
            self.lines.append(f"{view} = {choose(['{0}.view_as({0})', '{0}[...]', '{0}.detach()', '{0}[1:]']).format(view)}")
        if chance() < 0.85:
            line = choose(_WRITES).format(view)
            self.lines.append(f"with torch.no_grad(): {line}" if chance() < 0.35 else line)
        if chance() < 0.5:
            self.lines.append(f"q = q + {view}.float().mean()")

    def grow(self) -> None:
        choose, chance = self.random.choice, self.random.random()
        if chance < 0.28 and self.layers < 6:
            self.layer()
        elif chance < 0.40:
            self.free.append(self.new(choose(_FREE)))
        elif chance < 0.52 and self.free:
            self.bound.append(self.new(f"{choose(self.bound)} + 0.1 * {choose(self.free)}"))
        elif chance < 0.60 and self.free:
            self.free.append(self.new(f"{choose(self.free)} * 1.1"))
        elif chance < 0.64 and self.free:
            self.lines.append(choose(_OUT).format(choose(self.free)))
        else:
            self.write()


def program(seed: int) -> str:
    """The source of a random module `M`."""
    text = _Program(seed)
    for _ in range(text.random.randint(8, 16)):
        text.grow()
    choose = text.random.choice
    end = [f"y = s.last({choose(text.bound)} + {choose(text.bound)})"]
    end += [f"return (F.mse_loss(y, labels) + 0.01 * q + ({choose(text.free or ['x'])} * y).mean(),)"]
    body = "\n".join("        " + line for line in ["q = torch.zeros(())", *text.lines, *end])
    return f"class M(Base):\n    def forward(s, x, labels):\n{body}\n"


class Base(nn.Module):
    """What every program has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.l = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.register_buffer("buf", torch.ones(WIDTH))


def made(seed: int) -> tuple[nn.Module, Callable[[], dict[str, Tensor]]]:
    """A module, and what makes its batch anew."""
    space: dict[str, Any] = {"torch": torch, "F": F, "Base": Base}
    exec(program(seed), space)
    torch.manual_seed(seed)
    model = space["M"]()
    batch = {"x": torch.randn(4, WIDTH), "labels": torch.randn(4, WIDTH)}
    return model, lambda: {name: t.clone() for name, t in batch.items()}
