"""The arguments of a profile: rows, precision, optimizer, and whether the device is that of this machine."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from meshwright.costs.roofline import refuse_unknown_speed
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster, Device
from meshwright.ir.links.machines import same_kind
from meshwright.runtime import device as devices
from meshwright.runtime.stage.precision import Precision


@dataclass(frozen=True)
class ProfileRequest:
    """The checked arguments of a profile."""

    rows: tuple[int, ...]
    precision: Precision
    states: int
    cluster: Cluster | None
    estimate: bool | None
    repeats: int

    def __post_init__(self) -> None:
        if not self.rows or list(self.rows) != sorted(set(self.rows)) or any(type(n) is not int or n < 1 for n in self.rows):
            raise MeshwrightError(
                f"the rows of a profile must increase from at least 1, got {list(self.rows)}", fix="--rows 1,2,4"
            )
        if type(self.repeats) is not int or self.repeats < 1:
            raise MeshwrightError(f"a layer is timed at least once, got repeats={self.repeats!r}", fix="--repeats 5")
        if self.is_estimate and (self.cluster is None or not self.cluster.devices):
            raise MeshwrightError(
                "an estimate needs a cluster with devices: what one achieves in operations and bytes per second",
                fix="--cluster dgx-a100, or a cluster file with a [device] table",
            )
        if self.is_estimate:
            refuse_unknown_speed(self.target, self.precision.compute)  # before the model is captured

    @property
    def is_estimate(self) -> bool:
        """Whether times are estimated."""
        if self.estimate is not None:
            return self.estimate
        return self.cluster is not None and bool(self.cluster.devices) and not is_here(self.target)

    @property
    def target(self) -> Device:
        """The device to estimate for."""
        assert self.cluster is not None
        return self.cluster.devices[0]

    @property
    def on_gpu(self) -> bool:
        """Whether the kernels of a GPU will run."""
        return not self.target.is_core if self.is_estimate else this_device().type != "cpu"


def is_here(device: Device) -> bool:
    """Returns whether a device of a cluster is one of this machine, by its kind."""
    return same_kind(device.kind, device_name(this_device()))


def this_device() -> torch.device:
    """Returns the device that layers are timed on."""
    return devices.choose()


def device_name(device: torch.device) -> str:
    """Returns the name of a device, as a cluster file calls it."""
    return f"core of {platform.machine()}" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name())
