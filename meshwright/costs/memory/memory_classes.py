"""The memory of a plan: the bytes that a device holds at its peak, by class.

A simulation counts the values of a schedule. Temporary memory of layers and the reserve are added to it.

    parameters, gradients, optimizer    by stage and by how data-parallel copies divide them (ZeRO)
    activations                         from the simulated order: the most that are alive at the same time
    messages                            data that waits to be sent, data that has arrived, and buffers (`comm_buffers.py`)
    transients                          temporary memory of the largest layer (logits, workspaces), and recomputed activations
    reserve                             a share of the device for the allocator and the driver

`static_bytes` does not depend on the order of actions. A search uses it to reject a plan before it simulates it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.ir.plan.chosen_plan import MemoryUse
from meshwright.ir.profile import Profile

RESERVE = 0.03
"""The share of a device that plans leave free, for fragmentation and for buffers of the driver and of libraries."""

CLASS_OF = {
    "param": "parameters",
    "shard": "parameters",
    "wgrad": "gradients",
    "sum": "gradients",
    "partial": "gradients",
    "opt": "optimizer",
    "saved": "activations",
    "kept": "activations",
    "rest": "activations",
    "act": "messages",
    "grad": "messages",
    "working": "transients",
}
"""The class of each kind of value."""


@dataclass(frozen=True, slots=True)
class AddedBytes:
    """The bytes of a worker that a simulation does not count.

    Args:
        transient: Temporary memory of its largest layer.
        buffers: Buffers of communication.
        copied: Copies that collectives make after the last backward, when no activations are alive.
    """

    transient: float = 0.0
    buffers: float = 0.0
    copied: float = 0.0

    def peak(self, static: float, computing: float) -> float:
        """Returns the peak: while layers run, with `computing` bytes besides the static ones, or while state is gathered."""
        return static + self.buffers + max(computing + self.transient, self.copied)


def memory_use(kinds: Mapping[str, float], *, more: AddedBytes | None = None, capacity: float = float("inf")) -> MemoryUse:
    """Returns the peak of a worker by class, from its bytes by kind of value and what is added to them."""
    more = more or AddedBytes()
    sums = dict.fromkeys(CLASS_OF.values(), 0.0)
    for kind, size in kinds.items():
        sums[CLASS_OF[kind]] += max(0.0, size)
    sums["transients"] += more.transient
    sums["messages"] += more.buffers
    computing = MemoryUse(**sums)
    gathering = replace(computing, activations=0.0, transients=0.0, messages=more.buffers + more.copied)
    return replace(max(computing, gathering, key=lambda use: use.total), reserve=reserve_bytes(capacity))


def reserve_bytes(capacity: float) -> float:
    """Returns the bytes of a device that plans leave free. It is 0 if the memory of the device is not known."""
    return RESERVE * capacity if capacity < float("inf") else 0.0


def static_bytes(parameter_bytes: float, optimizer_bytes: float, *, zero: str, shares: int) -> float:
    """Returns the bytes of parameters, gradients and optimizer state of a worker, divided over `shares` ranks as `zero` says."""
    parts = max(1, shares)
    parameters = parameter_bytes / (parts if zero == "zero-3" else 1)  # whole ones of a stage count only while it runs
    optimizer = optimizer_bytes / (1 if zero == "replicated" else parts)
    return parameters + gradient_bytes(parameter_bytes, zero=zero, shares=shares) + optimizer


def gradient_bytes(parameter_bytes: float, *, zero: str, shares: int) -> float:
    """Returns the part of `static_bytes` that exists from the first backward on."""
    whole = parameter_bytes if zero in ("replicated", "zero-1") else 0.0
    return whole + (0.0 if zero == "replicated" else parameter_bytes / max(1, shares))


def stage_parameters(profile: Profile, layers: range) -> float:
    """Returns the bytes of a stage's parameters. Tied parameters of several of its layers count once.

    A profile has the names of tied parameters but not their sizes, so the smallest layer with the name is used as a bound.
    """
    total = sum(profile.layers[n].parameter_bytes for n in layers)
    seen: dict[str, float] = {}
    for n in layers:
        for name in profile.layers[n].ties:
            size = profile.layers[n].parameter_bytes
            if name in seen:
                total -= min(seen[name], size)
                seen[name] = min(seen[name], size)
            else:
                seen[name] = size
    return total


def optimizer_state(profile: Profile, parameter_bytes: float) -> float:
    """Returns the bytes of optimizer state for this many bytes of parameters."""
    return parameter_bytes / profile.parameter_itemsize * profile.optimizer_bytes_per_parameter
