"""What planners share: the layers of a profile as arrays, devices with their speeds and memory, and links.

A step is `batch` rows (then a plan chooses the rows of a microbatch), or a fixed number of microbatches. In the second case
devices that share a stage, or data-parallel copies, divide the rows of each microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.costs.gradient_sums import ties_of
from meshwright.costs.memory.memory_classes import optimizer_state, stage_parameters
from meshwright.costs.stages import Charge, device_slowness, sent_share, stage_costs
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.plan.chosen_plan import PlanStage
from meshwright.ir.profile import ChainCost, Profile
from meshwright.ir.stage_cost import StageCost
from meshwright.planners._device_order import device_order
from meshwright.planners._limits import MOST_MICROBATCHES, PlanLimits
from meshwright.planners._search.device_links import DeviceLinks
from meshwright.planners._search.interchangeable import interchangeable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class LayerArrays:
    """Costs of the layers for the rows of one device. `work_sums[b] - work_sums[a]` is the work of layers a to b - 1."""

    forward: Floats
    input: Floats
    weight: Floats
    output: Floats
    saved: Floats
    transient: Floats
    work_sums: Floats


def _sums(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])


class Problem:
    """One profile on one cluster for one batch."""

    def __init__(
        self, profile: Profile, cluster: Cluster, limits: PlanLimits, *, microbatches: int | None, batch: int | None
    ) -> None:
        if (microbatches is None) == (batch is None):
            raise MeshwrightError(
                "a plan needs either a number of microbatches or a batch", fix="--microbatches 16, or --batch 64"
            )
        if batch is not None and not profile.rows:
            raise MeshwrightError(
                f"a batch of {batch} is in rows, but this profile does not know its rows", fix="--microbatches 16 without --batch"
            )
        self.profile, self.cluster, self.limits = profile, cluster, limits
        self.microbatches, self.batch = microbatches, batch
        self.layers = len(profile.layers)
        self.devices = cluster.size
        self.links = DeviceLinks(cluster)
        self.parameters = np.array([layer.parameter_bytes for layer in profile.layers])
        self.parameter_sums = _sums(self.parameters)
        self.slowness = np.array(device_slowness(profile, cluster))
        kinds = cluster.devices
        caps = [device.memory_bytes for device in kinds] or [float("inf")] * self.devices
        self.memory = np.full(self.devices, np.inf) if limits.memory_free else np.array(caps, dtype=np.float64)
        self.on_cores = bool(kinds) and all(device.is_core for device in kinds)
        self.launch = np.array([device.launch_s for device in kinds] or [0.0] * self.devices)
        self.memory_rate = np.array([device.bytes_per_s for device in kinds] or [np.inf] * self.devices)
        self.ties = ties_of(profile)
        self.tied = sum(layer.parameter_bytes for layer in profile.layers if layer.ties)
        self._chains: dict[tuple[int | None, int], ChainCost] = {}
        self.slowness_of: list[float] = self.slowness.tolist()
        self._work_sums: dict[tuple[int | None, int], list[float]] = {}
        self._arrays: dict[tuple[int | None, int], LayerArrays] = {}

    @cached_property
    def order(self) -> list[int]:
        """Devices in an order in which neighbours have fast links, and are of one kind where links do not say otherwise."""
        links = self.links
        if links.by_host and len(set(np.bincount(links.seat))) == 1 and links.inside.min() >= links.card.max() and self.uniform:
            hosts = device_order(links.rate)  # devices of a host are neighbours
            return [device for host in hosts for device in np.flatnonzero(links.seat == host).tolist()]
        return device_order(links.rates(), kinds=self.slowness.tolist())

    @property
    def step_rows(self) -> int | None:
        """The rows of a step; None if the profile does not know its rows."""
        if not self.profile.rows:
            return None
        return self.batch or (self.microbatches or 0) * (self.limits.rows or 0)

    @cached_property
    def kinds(self) -> list[int]:
        """For each device the first one that is alike (`interchangeable.py`); for clusters that are not large."""
        return interchangeable(self)

    @cached_property
    def is_limited(self) -> bool:
        """Whether the memory of some device is known and must be kept."""
        return bool(np.isfinite(self.memory).any())

    @cached_property
    def uniform(self) -> bool:
        """Whether all devices are equally fast and have equally much memory."""
        return bool((self.slowness == self.slowness[0]).all() and (self.memory == self.memory[0]).all())

    def arrays(self, rows: int | None, share: int = 1) -> LayerArrays:
        """Returns the layers for a microbatch of `rows` rows that `share` devices divide among them."""
        key = (rows, share)
        if key not in self._arrays:
            chain = self.chain(rows, share)
            forward, input_s, weight = (np.array(x) for x in (chain.forward_s, chain.input_s, chain.weight_s))
            output = np.array(chain.output_bytes) * sent_share(share, share, rows if self.profile.rows else None, Charge.ROWS)
            saved, transient = np.array(chain.saved_bytes), np.array(chain.transient_bytes)
            self._arrays[key] = LayerArrays(
                forward,
                input_s,
                weight,
                output,
                saved,
                transient,
                _sums(forward + input_s + weight),
            )
        return self._arrays[key]

    def work_sums(self, rows: int | None, share: int) -> list[float]:
        """Returns the time of the first n layers for one microbatch that `share` devices divide, for n = 0, 1, ..."""
        key = (rows, share)
        if key not in self._work_sums:
            self._work_sums[key] = self.arrays(rows, share).work_sums.tolist()
        return self._work_sums[key]

    def chain(self, rows: int | None, share: int) -> ChainCost:
        """Returns the layers on one of `share` devices that divide the rows of a microbatch."""
        key = (rows, share)
        if key not in self._chains:
            self._chains[key] = self.profile.shared(rows, share)
        return self._chains[key]

    def stage_costs(self, stages: Sequence[PlanStage], rows: int | None) -> tuple[StageCost, ...]:
        """Returns what each stage of a plan costs on one of its devices."""
        chains = {stage.width: self.chain(rows, stage.width) for stage in stages}
        return stage_costs(
            self.profile,
            stages,
            self.cluster,
            rows=rows,
            groups=self.links,
            chains=chains,
            slowness=self.slowness_of,
            ties=self.ties,
        )

    def differ(self, devices: Sequence[int]) -> bool:
        """Whether these devices run at different speeds."""
        return len({(self.slowness_of[device], float(self.launch[device])) for device in devices}) > 1

    def paces(self, stages: Sequence[PlanStage], costs: Sequence[StageCost]) -> list[float]:
        """Returns the time of a forward on each device of these stages, relative to the slowest device of its stage."""
        found: list[float] = []
        for stage, cost in zip(stages, costs, strict=True):
            slowest = max(self.slowness_of[device] for device in stage.devices)
            work = (cost.forward_s - float(self.launch[list(stage.devices)].max())) / slowest
            times = [work * self.slowness_of[device] + float(self.launch[device]) for device in stage.devices]
            found += [time / cost.forward_s if cost.forward_s else 1.0 for time in times]
        return found

    def stage_parameters(self, first: Ints, end: Ints) -> Floats:
        """Returns the bytes of the parameters of stages; tied ones inside a stage count once."""
        if not self.tied:
            found: Floats = self.parameter_sums[end] - self.parameter_sums[first]
            return found
        return np.array([stage_parameters(self.profile, range(a, b)) for a, b in zip(first, end, strict=True)])

    def splits(self, copies: int) -> list[tuple[int | None, int, int]]:
        """The ways to divide a step among `copies`: (rows of a microbatch, devices that share them, microbatches)."""
        if self.batch is None:
            assert self.microbatches is not None
            return [(self.limits.rows, copies, self.microbatches)] if self.limits.allows(copies, self.limits.rows) else []
        if self.batch % copies:
            return []
        each = self.batch // copies
        return [(rows, 1, each // rows) for rows in self.row_choices if each % rows == 0 and each // rows <= MOST_MICROBATCHES]

    @cached_property
    def row_choices(self) -> list[int]:
        """Rows of a microbatch that are tried: those of the profile, and powers of two up to the largest.

        Times for more rows would be extrapolated, and a device cannot be as fast as that for ever.
        """
        assert self.batch is not None
        if self.limits.rows is not None:
            return [self.limits.rows]
        most = max(self.profile.rows)
        powers = [2**k for k in range(most.bit_length()) if 2**k <= most]
        return sorted({rows for rows in (*self.profile.rows, *powers) if rows <= self.batch and self.batch % rows == 0})

    @cached_property
    def memory_rates(self) -> tuple[float, float]:
        """The lowest and the highest bandwidth of the memory of a device."""
        return float(self.memory_rate.min()), float(self.memory_rate.max())

    def optimizer(self, parameter_bytes: float) -> float:
        """Returns what the optimizer holds for these parameters."""
        return optimizer_state(self.profile, parameter_bytes)

    def update_s(self, parameter_bytes: Floats, devices: Ints | Sequence[Sequence[int]]) -> float:
        """Returns the longest update of a worker: gradients are read, parameters and state are read and written.

        `devices[w]` are those of worker w; the slowest of them decides.
        """
        fastest = self.memory_rates[1]
        if fastest == np.inf == self.memory_rates[0]:
            return 0.0
        moved = (3 + 2 * self.optimizer(1.0)) * parameter_bytes
        if fastest == self.memory_rates[0]:
            return float(moved.max()) / fastest
        rates = [self.memory_rate[np.asarray(of_worker)].min() for of_worker in devices]
        return float((moved / np.array(rates)).max())
