"""What a device holds at its peak, by class: what the simulation of a plan says, and what a simulation does not see.

    parameters, gradients, optimizer    by stage and by how data-parallel copies divide them (ZeRO)
    activations                         over time, from the simulated order: the most that is alive at once
    messages                            what waits to be sent, and what has arrived
    transients                          the largest layer while it runs (logits, scratch), and what is recomputed in a backward
    reserve                             a share of the device for the allocator and the driver

`static_bytes` is the part that no order changes. A search rejects a plan by it before anything is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright.ir.layer_costs import Profile
from meshwright.ir.plan.chosen_plan import MemoryUse

RESERVE = 0.03
"""The share of a device that is not planned: fragments of the allocator, buffers of the driver and of libraries."""

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


def memory_use(kinds: Mapping[str, float], *, transient: float = 0.0, capacity: float = float("inf")) -> MemoryUse:
    """Returns the peak of a worker by class: bytes by kind of value, the scratch of its largest layer, and the reserve."""
    sums = dict.fromkeys(CLASS_OF.values(), 0.0)
    for kind, size in kinds.items():
        sums[CLASS_OF[kind]] += max(0.0, size)
    sums["transients"] += transient
    return replace(MemoryUse(**sums), reserve=reserve_bytes(capacity))


def reserve_bytes(capacity: float) -> float:
    """Returns what of a device is kept free; nothing if its memory is not known."""
    return RESERVE * capacity if capacity < float("inf") else 0.0


def static_bytes(parameter_bytes: float, optimizer_bytes: float, *, zero: str, shares: int) -> float:
    """Returns parameters, gradients and optimizer state of a worker. `shares` is how many ranks divide what `zero` names."""
    parts = max(1, shares)
    if zero == "zero-3":  # the slices of all, and one whole stage with its gradient while it is used
        return (2 * parameter_bytes + optimizer_bytes) / parts
    if zero == "zero-2":
        return parameter_bytes + (parameter_bytes + optimizer_bytes) / parts
    if zero == "zero-1":
        return 2 * parameter_bytes + (parameter_bytes + optimizer_bytes) / parts
    return 2 * parameter_bytes + optimizer_bytes


def stage_parameters(profile: Profile, layers: range) -> float:
    """Returns the bytes of a stage's parameters. Tied parameters of several of its layers count once.

    A profile says which names are tied, not how large they are: the smallest layer with the name bounds their size.
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
    """Returns what the optimizer holds for so many bytes of parameters."""
    return parameter_bytes / profile.parameter_itemsize * profile.optimizer_bytes_per_parameter


def largest_transient(transients: Sequence[float], layers: range) -> float:
    """Returns the scratch of a stage: layers run one after the other, so the largest decides."""
    return max((transients[n] for n in layers), default=0.0)
