"""`Settings`: optimizer, loss, clipping, precision, device and other options of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from meshwright.runtime.parameters.parameters import Options, Rules
from meshwright.runtime.parameters.unit import Pieces, Scheduler, UnitOptimizer
from meshwright.runtime.stage.objective import Count, Loss, LossKind
from meshwright.runtime.stage.precision import Precision


@dataclass(frozen=True)
class Settings:
    """How to run a schedule. `microbatches` is per step and data-parallel copy."""

    optimizer: UnitOptimizer
    microbatches: int
    copies: int = 1
    box: int = 1
    """Ranks that share the tensors of a worker."""
    ranks: tuple[int, ...] = ()
    """The rank of each place, as processes were started; empty if rank i runs place i."""
    scheduler: Scheduler | None = None
    options: Options | None = None
    loss: Loss | None = None
    count: Count | None = None
    loss_kind: LossKind = LossKind.MEAN
    rules: Rules = field(default_factory=Rules)
    transport: str = "auto"
    seed: int = 0
    precision: Precision = field(default_factory=Precision)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    pieces: Pieces | None = None
    """Called with each piece and its parameter, if the holders of a unit divide it among them."""
