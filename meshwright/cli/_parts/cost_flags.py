"""Reads the costs of verbs: times, links and files from flags."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli._parts import outputs
from meshwright.errors import MeshwrightError
from meshwright.ir.byte_sizes import bytes_in
from meshwright.ir.cluster import Cluster, Duplex, Link
from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost, costs_from_json, even_costs

cost_option = partial(typer.Option, rich_help_panel="Costs")
MISFIT = "rows of costs do not divide"
"""Error text for a cost file whose number of rows does not match the stages of a schedule."""
STAGE_TIMES = ("forward", "backward", "split", "recompute", "sync_cost")
"""The fields of `CostFlags` that are times of stages."""


def _bandwidth(text: str | float) -> float:
    """Returns bytes per second from a number or a size such as 25GB. Raises on 25Gb, which could mean bits."""
    if isinstance(text, str) and text.strip()[-2:] in ("kb", "Kb", "Mb", "Gb", "Tb"):
        raise MeshwrightError(
            f"--bandwidth {text} may mean bits; it is given in bytes per second",
            fix="--bandwidth 25GB, or 3.125GB for 25 gigabits",
        )
    size = bytes_in(text) if isinstance(text, str) else None
    try:
        return float(text) if size is None else size
    except ValueError:
        raise MeshwrightError(f"--bandwidth must be a number or a size, got {text!r}", fix="--bandwidth 25GB") from None


Costs = Annotated[Path | None, cost_option("--costs", help="JSON with one row of costs per stage.")]
ClusterFile = Annotated[
    Path | None,
    cost_option(
        "--cluster",
        metavar="FILE|PRESET",
        help="Devices and their links, JSON or TOML, or a preset: 8xdgx-a100; replaces --send and --bandwidth.",
    ),
]


@dataclass(frozen=True)
class CostFlags:
    """Costs as given on the command line, a group of flags."""

    forward: Annotated[float, cost_option(help="One worker's forward per microbatch.")] = 1.0
    backward: Annotated[float, cost_option(help="One worker's backward per microbatch.")] = 2.0
    split: Annotated[str, cost_option(metavar="I:W", help="How a backward splits into its halves.")] = "1:1"
    recompute: Annotated[
        float, cost_option("--recompute-cost", help="Recompute per microbatch; above 0 every stage recomputes.")
    ] = 0.0
    old_recompute: Annotated[float | None, typer.Option("--recompute", hidden=True)] = None
    send: Annotated[float, cost_option(help="Latency of a message between two workers.")] = 0.0
    sync_cost: Annotated[float, cost_option(help="Gradient sync of one worker's parameters.")] = 0.0
    bandwidth: Annotated[
        float, cost_option(parser=_bandwidth, metavar="SIZE", help="Bytes per second of a link: 25GB; with --costs.")
    ] = float("inf")
    duplex: Annotated[Duplex, cost_option("--duplex", help="Whether both directions of a link share its bandwidth.")] = (
        Duplex.FULL
    )
    overlap: Annotated[float, cost_option(min=0, max=1, help="How much of the shorter action a cell hides.")] = 0.0
    file: Costs = None
    cluster_file: ClusterFile = None

    def __post_init__(self) -> None:
        """Raises if a file and flags that it replaces are both given."""
        if self.old_recompute is not None:
            if self.recompute:
                raise MeshwrightError("--recompute is the old name of --recompute-cost", fix="--recompute-cost alone")
            sys.stderr.write("note: --recompute is now --recompute-cost here\n")
            object.__setattr__(self, "recompute", self.old_recompute)
        self._refuse_replaced("--costs", self.file, STAGE_TIMES)
        self._refuse_replaced("--cluster", self.cluster_file, ("send", "bandwidth", "duplex"))

    def _refuse_replaced(self, flag: str, file: Path | None, names: Sequence[str]) -> None:
        if file is not None and (given := self.given(names)):
            raise MeshwrightError(f"{flag} {file} replaces {', '.join(given)}", fix="give only one of the two")

    def given(self, names: Sequence[str]) -> list[str]:
        """Returns the flags of these fields that have other values than their defaults."""
        return [_flag(name) for name in names if getattr(self, name) != getattr(type(self), name)]

    def stages(self, schedule: Schedule) -> Sequence[StageCost]:
        """Returns one row per stage of this schedule."""
        if self.file is not None:
            return costs_from_json(outputs.read(self.file))
        return self.even(stages=schedule.stages, workers=schedule.workers)

    def spread(self, schedule: Schedule) -> Sequence[StageCost]:
        """Spreads the rows of a file over the stages of this schedule. With v times as many stages, each row is split into v."""
        if self.file is None:
            return self.stages(schedule)
        rows = costs_from_json(outputs.read(self.file))
        parts, left = divmod(schedule.stages, len(rows))
        if left:
            raise MeshwrightError(f"{schedule.name} has {schedule.stages} stages, which {len(rows)} {MISFIT}")
        return tuple(row.scaled(1 / parts) for row in rows for _ in range(parts))

    @property
    def is_profiled(self) -> bool:
        """Whether stages have the costs of a profile."""
        return False

    def links(self, schedule: Schedule) -> Cluster | None:
        """Returns the links between the workers of this schedule."""
        return self.cluster

    def capacities(self, workers: int) -> tuple[float, ...] | None:
        """Returns the bytes that each worker may hold; None if they are not known."""
        return None

    def refuse(self, workers: int) -> None:
        """Raises on costs that no schedule can take."""
        self.even(stages=workers, workers=workers) if self.file is None else costs_from_json(outputs.read(self.file))

    def refuse_ring(self, ring: bool) -> None:
        """Raises if a sync cost is given for a ring, which has no collective: its sums are sent as messages."""
        if ring and self.sync_cost:
            raise MeshwrightError(
                f"--sync-cost {self.sync_cost:g} is the time of a collective, but a ring sends its sums from worker to worker",
                fix="--send, or --costs with parameter_bytes and --bandwidth",
            )

    def even(self, *, stages: int, workers: int) -> Sequence[StageCost]:
        """Returns equal stages from one worker's totals."""
        for name in ("forward", "backward", "recompute", "send", "sync_cost"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise MeshwrightError(f"{_flag(name)} must be zero or more, got {getattr(self, name)}")
        return even_costs(
            stages=stages,
            workers=workers,
            forward_s=self.forward,
            backward_s=self.backward,
            split=self._ratio(),
            recompute_s=self.recompute,
            sync_s=self.sync_cost,
        )

    @property
    def cluster(self) -> Cluster | None:
        """One kind of link between all workers; None if messages are free."""
        if self.cluster_file is not None:
            from meshwright.ir.files.cluster_file import read_cluster  # most answers need no file

            return read_cluster(self.cluster_file)
        if not self.send and self.bandwidth == float("inf"):
            return None
        if self.bandwidth <= 0:
            raise MeshwrightError(f"--bandwidth must be above zero, got {self.bandwidth}")
        return Cluster(Link(self.send, self.bandwidth), duplex=self.duplex)

    def _ratio(self) -> tuple[float, float]:
        try:
            first, second = (float(part) for part in self.split.split(":"))
        except ValueError:
            raise MeshwrightError(f"--split must be a ratio I:W, got {self.split!r}", fix="--split 1:1") from None
        if not (0 <= first < float("inf") and 0 <= second < float("inf") and first + second > 0):
            raise MeshwrightError(f"--split must be a ratio of positive numbers, got {self.split!r}", fix="--split 1:1")
        return first, second


def _flag(field: str) -> str:
    """Returns the flag name of a cost field."""
    return "--recompute-cost" if field == "recompute" else f"--{field.replace('_', '-')}"


def read_costs(path: Path | None) -> tuple[StageCost, ...] | None:
    """Reads the rows of --costs."""
    return None if path is None else costs_from_json(outputs.read(path))
