"""Layers, losses and optimizers that fail on purpose, and a small job to put them in; workers import all of it by name."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Kind
from meshwright.ir.plan.plan import Parallel
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.transport.base import Channel
from meshwright.runtime.transport.choose import open_transport
from meshwright.runtime.transport.torch_distributed import TorchTransport
from meshwright.train.models.small_models import mlp, mlp_batch
from meshwright.train.setup.build_schedule import lists_for

Trouble = Callable[[], None]


def nothing() -> None:
    """All is well."""


def raises() -> None:
    """An error of the user's own."""
    raise ValueError("bad weights")


def killed() -> None:
    """As the out-of-memory killer does it."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def exits() -> None:
    """A process that leaves without a word."""
    os._exit(5)


def quits() -> None:
    """A script that thinks it is done."""
    sys.exit(0)


def segfaults() -> None:
    """A bad pointer."""
    ctypes.string_at(0)


def stopped() -> None:
    """As by Ctrl-Z."""
    os.kill(os.getpid(), signal.SIGSTOP)


def sleeps() -> None:
    """A call that does not come back."""
    time.sleep(600)


def spins() -> None:
    """A loop that does not end."""
    while True:
        pass


def pauses() -> None:
    """Slow, and in its right."""
    time.sleep(4)


class Once(torch.autograd.Function):
    """Identity whose backward gets into trouble."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trouble: Trouble) -> Tensor:
        ctx.trouble = trouble
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.trouble()
        return grads[0], None


class Troubled(nn.Module):
    """A layer that gets into trouble at its nth call, forward or backward."""

    def __init__(self, trouble: Trouble, place: str, call: int) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.trouble, self.place, self.left = trouble, place, call

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0 and self.place == "forward":
            self.trouble()
        x = self.inner(x)
        return Once.apply(x, self.trouble) if self.left == 0 and self.place == "backward" else x


class TroubledSGD(torch.optim.SGD):
    """An optimizer that gets into trouble."""

    trouble: Trouble

    def step(self, closure: Any = None) -> Any:
        self.trouble()
        return super().step(closure)


def train(
    trouble: Trouble = nothing,
    place: str = "forward",
    *,
    rank: int = 1,
    call: int = 3,
    transport: str = "auto",
    steps: int = 2,
    ranks: tuple[int, ...] = (),
) -> list[float]:
    """1F1B on all ranks; the trouble is in the first layer, the loss or the optimizer of one rank, or of all (-1)."""
    world = dist.get_world_size()
    schedule = lists_for(Parallel.of({"pp": world, "schedule": "onef1b", "microbatches": 4}))
    torch.manual_seed(0)
    modules: list[nn.Module] = [m.double() for m in mlp(layers=2 * world)]
    mine = rank in (dist.get_rank(), -1)
    if place in ("forward", "backward"):  # the same layers on all ranks, the trouble on one
        for stage in range(world):
            here = mine and stage == Mesh(world, 1, dist.get_rank(), 1, ranks).worker
            modules[2 * stage] = Troubled(trouble if here else nothing, place, call).double()

    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = TroubledSGD(params, lr=0.05)
        made.trouble = trouble if mine and place == "optimizer" else nothing
        return made

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if mine and place == "loss":
            trouble()
        return nn.functional.mse_loss(output, target)

    engine = Engine(
        schedule,
        Layers.of(modules, world),
        Settings(optimizer=optimizer, microbatches=4, loss=loss, transport=transport, ranks=ranks),
    )
    losses = []
    for step in range(steps):
        tallies = engine.run(mlp_batch, step)
        losses += [float(tally.loss) for tally in tallies.values() if tally.weight]
    engine.close()
    return losses


def refuses() -> None:
    """A mistake that every rank finds before it talks to others."""
    raise MeshwrightError("7 microbatches are one too many", fix="6")


def dead_edge() -> None:
    """All ranks make their channels, but rank 1 does not come to test them."""
    rank = dist.get_rank()
    channels = [Channel(0, 1, Kind.ACT), Channel(1, 0, Kind.GRAD)]
    if rank == 1:
        TorchTransport(channels, rank)
        time.sleep(600)
    open_transport("torch", channels, rank, start_timeout_s=1)


def absent_from_a_collective() -> None:
    """One rank never comes to a barrier, outside any schedule."""
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


def waits_with_pid(path: str) -> None:
    """Stay inside a collective that rank 0 never joins; every rank writes its process number."""
    Path(path, str(dist.get_rank())).write_text(str(os.getpid()))
    if dist.get_rank() == 0:
        time.sleep(600)
    dist.barrier()


def own_cost_s(span_s: float) -> float:
    """The CPU time that a rank uses while it sleeps."""
    before = time.process_time()
    time.sleep(span_s)
    return time.process_time() - before


def unsendable() -> object:
    """A result that no pipe carries."""
    return lambda: None


def nested() -> None:
    """Workers inside a worker."""
    Workers(1)


def pid() -> int:
    """Which process this is."""
    return os.getpid()
