"""`Parallel`, what a user asks for: degrees, a schedule and its options. The API, plan files and CLI flags share this type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.input_limits import shown
from meshwright.ir.plan.plan_dp import ZERO_3_STAGES, DpMode, parse_dp_mode, refuse_beside_cyclic
from meshwright.ir.plan.plan_fields import checked_options, checked_recompute, checked_stages, checked_width
from meshwright.ir.plan.plan_order import Follows, followed, order_of, refers
from meshwright.ir.plan.plan_ranks import checked_ranks, refuse_count
from meshwright.ir.plan.plan_tensor import TENSOR_FIELDS, checked_tensor
from meshwright.ir.plan.unset_values import Unset, UnsetName
from meshwright.ir.reader import LARGEST
from meshwright.ir.schedule import Schedule
from meshwright.ir.stage_cost import StageCost, costs_from

LOCAL_RANKS = 256
"""The most processes that are started on one host."""


class TransportName(StrEnum):
    """The transport that carries messages."""

    AUTO = "auto"  # shared memory if possible, otherwise torch
    TORCH = "torch"  # torch.distributed
    SHARED = "shared"  # shared memory of one host
    STRICT = "strict"  # every send and receive blocks; for testing schedules


def parse_name(name: str) -> TransportName:
    """Returns the transport of this name."""
    try:
        return TransportName(name)
    except ValueError:
        raise MeshwrightError(f"'{name}' is not a transport", fix=f"one of {', '.join(TransportName)}") from None


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """A plan: how many workers, which schedule, and how it runs. All arguments are keywords.

    Every `parallel=` takes one, or a mapping with the same keys, or a plan file.

    Args:
        pp: Workers of one pipeline.
        dp: Data-parallel copies, each with its own rows of the batch.
        dp_mode: What the copies hold and exchange: `replicated`, `zero-1`, `zero-2`, `zero-3`, `cyclic`, `cyclic-zero`,
            `cyclic-mp` or `cyclic-pp`.
        schedule: A name, a `Schedule`, a schedule file, or `package.module:function`.
        microbatches: Microbatches of one step; 0 means as many as workers.
        options: Options of the schedule, such as `{"mode": "halving"}`.
        sync: When gradients are added up: `lazy`, `eager`, `eager-opt` or `ring`.
        recompute: `none`, `inline`, `early`, a share for each stage, or a budget in bytes such as `"2GB"`.
        width: For each stage how many workers share its rows; empty is one each.
        transport: `auto`, `torch`, `shared` or `strict`.
        stages: Where the stages after the first begin: modules by name, or numbers of layers. Empty: cut evenly.
        order: The lists themselves, instead of a schedule by name.
        costs: What each stage costs, so that the schedule is shaped by it.
        ranks: The rank that runs each place: worker by worker, the ranks of a tensor-parallel worker together, then the next
            data-parallel copy. Empty: rank i runs place i. Ranks that are not named are idle.
        tp: Ranks that share the tensors of one worker.
        tensor: How they share them: `line` (1-D), `grid` (2-D), `tesseract` (2.5-D) or `box` (3-D).
        box: The three sides (w, a, b) of a `box`; its product is `tp`.
        depth: The depth of a `tesseract`.
        sequence: With `line`: the residual stream is cut along the sequence between products.
        save: What a product keeps for backward: its `shards`, or its `gathered` input and weight.
        overlap: Run a microbatch as two halves, so that the collectives of one overlap the compute of the other.
        replicate: Modules whose parameters stay whole on every rank of a box.

    Raises:
        MeshwrightError: A value is not possible, or two of them contradict each other.

    Examples:
        >>> from meshwright import Parallel
        >>> plan = Parallel(pp=4, dp=2, schedule="chimera", microbatches=8)
        >>> plan.processes
        8
    """

    pp: int = Unset(1)
    dp: int = 1
    schedule: str = UnsetName("onef1b")
    microbatches: int = 0
    options: Mapping[str, object] = field(default_factory=dict)
    sync: str = "eager"
    recompute: str | float | Sequence[float] | None = None
    width: tuple[int, ...] = ()
    transport: str = "auto"
    stages: tuple[str | int, ...] = ()
    """Where the stages after the first begin: module names or layer numbers. Empty: Meshwright chooses the cuts."""
    order: Schedule | None = None
    """The schedule itself, if it is not built by name; `pp` and other fields are taken from it."""
    costs: tuple[StageCost, ...] = ()
    """Measured cost of each stage; builders and lowering use it to choose the order."""
    tp: int = Unset(1)
    tensor: str = UnsetName("line")
    box: tuple[int, ...] = ()
    depth: int = 1
    sequence: bool = False
    save: str = "shards"
    overlap: bool = False
    replicate: tuple[str, ...] = ()
    dp_mode: str = "replicated"
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._take_own()
        for name, least in (("pp", 1), ("dp", 1), ("microbatches", 0)):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or not least <= count < LARGEST:
                raise MeshwrightError(
                    f"{name} must be a whole number of at least {max(least, 1)} and below {LARGEST}, got {shown(count)}",
                    fix=f"{name}=4",
                )
        for name, example in (("schedule", "onef1b"), ("sync", "eager"), ("transport", "auto")):
            if not isinstance(word := getattr(self, name), str):
                raise MeshwrightError(f"{name} must be a name, got {shown(word)}", fix=f'{name}="{example}"')
        parse_name(self.transport)
        self._set(options=checked_options(self.options), recompute=checked_recompute(self.recompute))
        self._set(width=checked_width(self.width), stages=checked_stages(self.stages))
        self._set(costs=() if self.costs in (None, (), []) else costs_from(self.costs, "the costs of a plan"))
        mode = parse_dp_mode(self.dp_mode)
        if mode.is_cyclic:
            refuse_beside_cyclic(mode, {f.name: getattr(self, f.name) for f in fields(self)})
            self._set(pp=1, schedule=UnsetName("cyclic"), microbatches=self.dp)
        elif mode is DpMode.ZERO_3 and isinstance(self.schedule, UnsetName) and self.order is None and self.pp == 1:
            self._set(pp=1, schedule=UnsetName("interleaved"), microbatches=int(self.microbatches) or 1)
            self._set(options={"chunks": ZERO_3_STAGES, **self.options})
        elif self.order is not None:
            self._follow(self.order)
        elif refers(self.schedule):
            self._set(microbatches=self.microbatches or Unset(self.pp))
        else:
            self._set(pp=int(self.pp), schedule=str(self.schedule), microbatches=int(self.microbatches) or int(self.pp))
        if self.width and len(self.width) != self.pp and not isinstance(self.pp, Unset):
            raise MeshwrightError(f"width has {len(self.width)} stages, pp is {self.pp}", fix=f"pp={len(self.width)}")
        self._set(**vars(checked_tensor({name: getattr(self, name) for name in TENSOR_FIELDS}, self.width)))
        self._set(ranks=checked_ranks(self.ranks))
        if not isinstance(self.pp, Unset):
            refuse_count(self.ranks, self.processes, self.degrees)

    def _take_own(self) -> None:
        """Turns a `Schedule` given as `schedule` into `order`, and a path into a file name."""
        given: object = self.schedule
        if isinstance(given, Schedule):
            if self.order is not None:
                raise MeshwrightError("schedule and order are both a schedule", fix="give only one of them")
            self._set(schedule=given.name, order=given)
        elif isinstance(given, Path):
            self._set(schedule=str(given))
        self._set(order=order_of(self.order))

    def _follow(self, order: Schedule) -> None:
        """Takes counts from the order; values that the user gave must agree with it."""
        given = Follows(
            pp=None if isinstance(self.pp, Unset) else self.pp,
            microbatches=None if isinstance(self.microbatches, Unset) else self.microbatches or None,
            width=self.width,
            schedule=None if isinstance(self.schedule, UnsetName) else self.schedule,
            options=self.options or None,
        )
        found = followed(order, given)
        self._set(pp=found.pp, microbatches=found.microbatches, width=found.width, schedule=found.schedule)
        self._set(options=checked_options(found.options))

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def given(self) -> dict[str, Any]:
        """Returns all fields by name, without counts and names that the user did not set."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if not isinstance(value, Unset | UnsetName)}

    @classmethod
    def of(cls, given: Parallel | Mapping[str, Any]) -> Parallel:
        """Builds a plan from a mapping. Raises on unknown keys and lists the known ones."""
        if isinstance(given, Parallel):
            return given
        if not isinstance(given, Mapping):
            raise MeshwrightError(f"parallel must be a Parallel or a mapping, got {shown(given)}", fix="parallel=dict(pp=2)")
        known = [f.name for f in fields(cls)]
        if unknown := sorted(map(str, set(given) - set(known))):
            raise MeshwrightError(f"parallel has no {', '.join(map(repr, unknown))[:400]}", fix=", ".join(known))
        return cls(**given)

    @property
    def budget_bytes(self) -> float | None:
        """Bytes that a worker may hold between forwards and backwards, if `recompute` is a budget; otherwise None."""
        return self.recompute if isinstance(self.recompute, float) else None

    @property
    def mode(self) -> DpMode:
        """How the data-parallel copies work together."""
        return DpMode(self.dp_mode)

    @property
    def copies(self) -> int:
        """How many times the schedule runs side by side. The copies of a cyclic mode are the workers of one schedule."""
        return 1 if self.mode.is_cyclic else self.dp

    @property
    def workers(self) -> int:
        """The number of workers of the schedule."""
        if self.mode.is_cyclic:
            stages = str(self.options.get("chunks", ""))
            return self.mode.workers(self.dp, int(stages) if stages.isdecimal() else None)
        return sum(self.width) if self.width else int(self.pp)

    @property
    def processes(self) -> int:
        """The total number of processes."""
        return self.workers * self.copies * self.tp

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part, in ascending order. All others are idle."""
        return tuple(sorted(self.ranks)) or tuple(range(self.processes))

    @property
    def started(self) -> int:
        """The number of processes to start, idle ones included."""
        return max(self.ranks) + 1 if self.ranks else self.processes

    @property
    def degrees(self) -> tuple[str, ...]:
        """The numbers whose product is `processes`, as text: pp or width, dp, and tp if ranks share a worker."""
        pipeline = f"width {'+'.join(map(str, self.width))}" if self.width else f"pp {self.pp}"
        count = f", {self.workers} workers" if self.mode.form is not None else ""
        mode = "" if self.mode is DpMode.REPLICATED else f" ({self.mode}{count})"
        return (*([] if self.mode.is_cyclic else [pipeline]), f"dp {self.dp}{mode}", *([f"tp {self.tp}"] if self.tp > 1 else []))


def refuse_crowd(ranks: int) -> None:
    """Raises if one host would have to start too many workers; called before any of them starts."""
    if ranks > LOCAL_RANKS:
        raise MeshwrightError(f"{ranks} workers exceed the limit of {LOCAL_RANKS} on one host", fix="torchrun on more hosts")
