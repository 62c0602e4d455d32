"""Mixed precision: layers compute in a short format, while weights, their gradients and all sums stay in fp32.

fp16 has so small a range that gradients vanish or overflow; the loss is multiplied by a scale before the backward and the
gradients divided by it afterwards. One scale holds for all ranks: a gradient that overflows anywhere skips the step
everywhere and halves the scale; after enough good steps it grows again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from math import floor, isfinite, log2

import torch

from meshwright.errors import MeshwrightError

FORMATS: Mapping[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What layers may compute in; None is the format of their weights."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """`compute` is fp32 (as the weights are), bf16 or fp16; the rest says how the scale of fp16 begins and moves."""

    compute: str = "fp32"
    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        if self.compute not in FORMATS:
            raise MeshwrightError(f"there is no precision {self.compute!r}", fix=", ".join(FORMATS))
        sound = 0 < self.scale < float("inf") and 1 < self.growth < float("inf") and 0 < self.backoff < 1 <= self.interval
        if not sound:
            raise MeshwrightError(
                f"a loss scale starts above 0, grows by more than 1, backs off by less than 1 and waits at least a step: {self}",
                fix="Precision(compute='fp16', scale=65536.0, growth=2.0, backoff=0.5, interval=2000)",
            )

    @classmethod
    def of(cls, given: Precision | str | None) -> Precision:
        """From a name; None is fp32."""
        return given if isinstance(given, Precision) else cls(compute=given or "fp32")

    @property
    def dtype(self) -> torch.dtype | None:
        """What layers compute in, where it is not the format of their weights."""
        return FORMATS[self.compute]

    @property
    def mixed(self) -> bool:
        """Is the format of computing another than that of the weights?"""
        return self.dtype is not None

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Around each layer alone: casts of weights are remembered inside it and no longer, so cuts make no difference."""
        return nullcontext() if self.dtype is None else torch.autocast(device.type, dtype=self.dtype)

    def scaler(self) -> Scaler | None:
        """A fresh scale, for fp16."""
        return Scaler(self, scale=self.scale) if self.compute == "fp16" else None


@dataclass
class Scaler:
    """The scale of the loss; every rank moves its own, by what all ranks know."""

    rule: Precision
    scale: float
    good: int = 0
    skipped: int = 0
    unit: float = 0.0

    def measure(self, count: float) -> None:
        """Losses are added up over a batch; the first one says how many there are, so that the scale is one of their mean."""
        self.unit = self.unit or 2.0 ** floor(log2(max(count, 1.0)))

    @property
    def factor(self) -> float:
        """What the sum of the losses is multiplied by."""
        return self.scale / (self.unit or 1.0)

    def update(self, norm: float) -> bool:
        """After a step's gradient norm: is the step taken? The scale moves on."""
        if not isfinite(norm):
            self.scale, self.good = max(self.scale * self.rule.backoff, torch.finfo(torch.float32).tiny), 0
            self.skipped += 1
            return False
        self.good += 1
        if self.good == self.rule.interval:
            self.scale, self.good = min(self.scale * self.rule.growth, 2.0**127), 0
        return True

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped, "unit": self.unit}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a checkpoint."""
        self.scale, self.good, self.skipped = float(state["scale"]), int(state["good"]), int(state["skipped"])
        self.unit = float(state["unit"])


def refuse(precision: Precision, dtypes: Mapping[str, torch.dtype], *, norm: bool, name: str) -> None:
    """What cannot be trained like this; `dtypes` are those of the parameters, `norm` whether a step is one for all ranks."""
    if not precision.mixed:
        return
    for parameter, dtype in dtypes.items():
        if dtype.is_floating_point and dtype is not torch.float32:
            raise MeshwrightError(
                f"{parameter} is {str(dtype).removeprefix('torch.')}: precision {precision.compute} keeps weights in fp32",
                fix="a model in float32 (verify: dtype='float32'), or precision fp32 to compute in what the weights are",
            )
    if precision.compute == "fp16" and not norm:
        raise MeshwrightError(
            f"{name} has no flush: no step can be skipped as a whole when fp16 overflows",
            fix="precision bf16, or a schedule with a flush",
        )


def written(precision: Precision) -> dict[str, object]:
    """As it stands in a certificate."""
    return asdict(precision) if precision.compute == "fp16" else {"compute": precision.compute}
