"""Mixed precision: layers compute in bf16 or fp16, while weights, their gradients and all sums stay in fp32.

fp16 has such a small range that gradients underflow or overflow. So the loss is multiplied by a scale before the backward,
and the gradients are divided by it afterwards. All ranks use the same scale. If a gradient overflows on any rank, all ranks
skip the step and the scale is halved. After enough good steps it grows again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from math import floor, isfinite, log2

import torch

from meshwright.errors import MeshwrightError

FORMATS: Mapping[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The formats that layers can compute in. None is the format of their weights."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """`compute` is fp32 (the format of the weights), bf16 or fp16. The other fields control the loss scale of fp16."""

    compute: str = "fp32"
    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        if self.compute not in FORMATS:
            raise MeshwrightError(f"there is no precision {self.compute!r}", fix=f"use one of {', '.join(FORMATS)}")
        sound = 0 < self.scale < float("inf") and 1 < self.growth < float("inf") and 0 < self.backoff < 1 <= self.interval
        if not sound:
            raise MeshwrightError(
                f"a loss scale needs a finite scale > 0, a finite growth > 1, 0 < backoff < 1 and interval >= 1, got {self}",
                fix="Precision(compute='fp16', scale=65536.0, growth=2.0, backoff=0.5, interval=2000)",
            )

    @classmethod
    def of(cls, given: Precision | str | None) -> Precision:
        """Returns the precision of a name; None is fp32."""
        return given if isinstance(given, Precision) else cls(compute=given or "fp32")

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that layers compute in, or None if it is that of their weights."""
        return FORMATS[self.compute]

    @property
    def mixed(self) -> bool:
        """True if layers compute in another format than that of their weights."""
        return self.dtype is not None

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Returns the autocast context for one layer. It caches weight casts only within a layer, so cuts change no results."""
        return nullcontext() if self.dtype is None else torch.autocast(device.type, dtype=self.dtype)

    def scaler(self) -> Scaler | None:
        """Returns a new loss scaler for fp16, else None."""
        return Scaler(self, scale=self.scale) if self.compute == "fp16" else None


@dataclass
class Scaler:
    """The scale of the loss. Every rank updates its own from values that all ranks know, so they stay equal."""

    rule: Precision
    scale: float
    good: int = 0
    skipped: int = 0
    unit: float = 0.0

    def measure(self, count: float) -> None:
        """Sets the unit from the number of losses in the first batch: losses are summed, but the scale is for their mean."""
        self.unit = self.unit or 2.0 ** floor(log2(max(count, 1.0)))

    @property
    def factor(self) -> float:
        """The factor for the sum of the losses."""
        return self.scale / (self.unit or 1.0)

    def update(self, norm: float) -> bool:
        """Updates the scale after the gradient norm of a step is known. Returns whether the step is taken."""
        if not isfinite(norm):
            self.scale, self.good = max(self.scale * self.rule.backoff, torch.finfo(torch.float32).tiny), 0
            self.skipped += 1
            return False
        self.good += 1
        if self.good == self.rule.interval:
            self.scale, self.good = min(self.scale * self.rule.growth, 2.0**127), 0
        return True

    def state_dict(self) -> dict[str, float]:
        """Returns the state for a checkpoint."""
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped, "unit": self.unit}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores the state from a checkpoint."""
        self.scale, self.good, self.skipped = float(state["scale"]), int(state["good"]), int(state["skipped"])
        self.unit = float(state["unit"])


def refuse(precision: Precision, dtypes: Mapping[str, torch.dtype], *, norm: bool, name: str) -> None:
    """Raises if a model cannot be trained in this precision.

    `dtypes` are the dtypes of the parameters. `norm`: whether all ranks take or skip a step together.
    """
    if not precision.mixed:
        return
    for parameter, dtype in dtypes.items():
        if dtype.is_floating_point and dtype is not torch.float32:
            raise MeshwrightError(
                f"{parameter} is {str(dtype).removeprefix('torch.')}: precision {precision.compute} keeps weights in fp32",
                fix="use a model in float32 (verify: dtype='float32'), or precision fp32 to compute in the format of the weights",
            )
    if precision.compute == "fp16" and not norm:
        raise MeshwrightError(
            f"{name} has no flush, so a step cannot be skipped as a whole when fp16 overflows",
            fix="use precision bf16, or a schedule with a flush",
        )


def written(precision: Precision) -> dict[str, object]:
    """Returns the precision as it is written to a certificate."""
    return asdict(precision) if precision.compute == "fp16" else {"compute": precision.compute}
