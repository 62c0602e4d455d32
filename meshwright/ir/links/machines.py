"""Devices, and the hosts that hold them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from meshwright.errors import MeshwrightError
from meshwright.ir.links.link import Link


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a cluster.

    Args:
        kind: Its name, such as `a100`.
        memory_bytes: Its memory.
        flops_per_s: Operations per second that it achieves, by precision.
        bytes_per_s: Bytes per second that it reads from its memory.
        launch_s: Seconds that one call of a stage costs before it computes.

    Raises:
        MeshwrightError: A number is negative, or a speed is 0.

    Examples:
        >>> from meshwright import Device
        >>> Device("a100", 80e9, {"bf16": 250e12}).memory_bytes
        80000000000.0
    """

    kind: str = "device"
    memory_bytes: float = float("inf")
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    bytes_per_s: float = float("inf")
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        speeds = {**self.flops_per_s, "bytes_per_s": self.bytes_per_s}
        if slow := {name: speed for name, speed in speeds.items() if not speed > 0.0}:
            raise MeshwrightError(f"the device {self.kind} has speeds that are not above 0: {slow}")
        if not self.memory_bytes >= 0.0 or not 0.0 <= self.launch_s < float("inf"):
            raise MeshwrightError(
                f"the device {self.kind} has {self.memory_bytes} bytes of memory and a launch time of {self.launch_s} s"
            )

    @property
    def is_core(self) -> bool:
        """Whether it is a core of a CPU, by its kind."""
        return _is_core(self.kind)


@lru_cache(maxsize=1024)
def same_kind(one: str, other: str) -> bool:
    """Returns whether two names mean the same kind of device: `a100` and `NVIDIA A100-SXM4-80GB` do, `a10` and `a100` do not."""
    if not one or not other:
        return False
    return (_is_core(one) and _is_core(other)) or _is_in(one, other) or _is_in(other, one)


def _is_core(kind: str) -> bool:
    return kind.lower().startswith(("core", "cpu"))


def _is_in(short: str, long: str) -> bool:
    """Returns whether a name is part of another one as whole words. Spaces and dashes do not matter: `rtx3090`, `RTX 3090`."""
    letters = [re.escape(letter) for letter in short.lower() if letter not in " -_"]
    return bool(letters) and re.search(rf"(?<![a-z0-9]){'[ _-]*'.join(letters)}(?![a-z0-9])", long.lower()) is not None


@dataclass(frozen=True, slots=True)
class Host:
    """A host with several devices.

    Args:
        devices: How many devices it has.
        inside: The link between two of them.
        card: The link to other hosts.
        cards: How many network cards the devices share. Device d of n uses card `d * cards // n`. With 0, every pair of devices
            has the whole rate of the card for itself.
        rack: The number of its rack. It matters if the cluster has a link between racks.

    Raises:
        MeshwrightError: A number is not possible.

    Examples:
        >>> from meshwright import Cluster, Host, Link
        >>> host = Host(8, inside=Link(5e-6, 250e9), card=Link(2e-5, 25e9))
        >>> Cluster(hosts=(host, host)).between(0, 9).bytes_per_s
        25000000000.0
    """

    devices: int
    inside: Link
    card: Link
    cards: int = 0
    rack: int = 0

    def __post_init__(self) -> None:
        if self.devices < 1 or self.cards < 0 or self.rack < 0:
            raise MeshwrightError(
                f"a host needs at least 1 device and no negative numbers, got {self.devices} devices, {self.cards} cards and "
                f"rack {self.rack}"
            )

    def card_of(self, device: int) -> int:
        """Returns the card of a device of this host, by its number in the host."""
        return device * self.cards // self.devices if self.cards else device

    def flow(self, devices: int) -> Link:
        """Returns the share that one of several flows to other hosts gets on the busiest card, each flow from another device."""
        return self.card.divided(-(-devices // self.cards)) if self.cards else self.card
