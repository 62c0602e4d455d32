"""Estimates the time of a layer on another device, from its operations and bytes and the rates that the device achieves.

    t(f, b) = max(f / flops_per_s, b / bytes_per_s)         f operations, b bytes of tensors, w bytes of weights

    work         forward      input half        weight half
    PRODUCT      t(f, b + w)  t(f, b + w)       t(f, b + w) if its weight learns
    MIXING       t(f, b)      2 t(f, b)         -               a product of two activations
    ATTENTION    t(f, b)      t(2.5 f, 2 b)     -               fused: scores are computed again
    LOOKUP       t(0, b)      -                 t(0, b + w)     the gradient of a table is as large as the table
    OTHER        t(f, b + w)  t(f, b + w)       -

Operations and bytes grow with the rows, weights do not. Launch times are not included: a device adds one per call of a stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Device

ESTIMATE_ERROR = 0.5
"""The relative error of an estimate. Published rooflines are 1.5 to 1.9 times too fast on real devices."""


class WorkKind(StrEnum):
    """The kinds of operations."""

    PRODUCT = "product"
    MIXING = "mixing"
    ATTENTION = "attention"
    LOOKUP = "lookup"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class OpWork:
    """The FLOPs and bytes of one operation per row, and the bytes of weights that it reads once for all rows."""

    kind: WorkKind
    flops: float = 0.0
    bytes: float = 0.0
    weight_bytes: float = 0.0
    learns: bool = False


@dataclass(frozen=True, slots=True)
class HalfTimes:
    """Seconds of a forward, of the input half and of the weight half of a backward."""

    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0

    def __add__(self, other: HalfTimes) -> HalfTimes:
        return HalfTimes(self.forward_s + other.forward_s, self.input_s + other.input_s, self.weight_s + other.weight_s)


def refuse_unknown_speed(device: Device, precision: str) -> float:
    """Returns the operations per second of a device. Raises if they are not known in this precision."""
    flops_per_s = device.flops_per_s.get(precision)
    if flops_per_s is None or not flops_per_s > 0:
        known = ", ".join(sorted(device.flops_per_s)) or "none"
        raise MeshwrightError(
            f"the cluster does not tell how many operations {device.kind} achieves in {precision}; it has {known}",
            fix=f'a TOML cluster file with {precision} = "100 TFLOPS" in its table [device.{device.kind}] (JSON has no speeds), '
            "another --precision, or --profile with measured times",
        )
    return flops_per_s


def estimated_times(work: Iterable[OpWork], *, rows: int, device: Device, precision: str) -> HalfTimes:
    """Returns the seconds of a layer for a microbatch with this many rows.

    Raises:
        MeshwrightError: The operations per second of the device are not known in this precision.
    """
    flops_per_s = refuse_unknown_speed(device, precision)
    return sum((_of(one, rows, flops_per_s, device.bytes_per_s) for one in work), HalfTimes())


def _of(one: OpWork, rows: int, flops_per_s: float, bytes_per_s: float) -> HalfTimes:
    def t(flops: float, size: float) -> float:
        return max(flops / flops_per_s, size / bytes_per_s)

    f, b, w = one.flops * rows, one.bytes * rows, one.weight_bytes
    match one.kind:
        case WorkKind.PRODUCT:
            once = t(f, b + w)
            return HalfTimes(once, once, once if one.learns else 0.0)
        case WorkKind.MIXING:
            return HalfTimes(t(f, b), 2 * t(f, b))
        case WorkKind.ATTENTION:
            return HalfTimes(t(f, b), t(2.5 * f, 2 * b))
        case WorkKind.LOOKUP:
            return HalfTimes(t(0, b), 0.0, t(0, b + w) if one.learns else 0.0)
        case WorkKind.OTHER:
            return HalfTimes(t(f, b + w), t(f, b + w))
