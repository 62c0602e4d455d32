"""What a user asks for: degrees, a schedule and its options. The API, plan files and CLI flags share this one type."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from math import inf, nan
from numbers import Real
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.input_limits import refuse_unfit, shown
from meshwright.ir.plan.plan_names import Unsaid, UnsaidName
from meshwright.ir.plan.plan_order import Follows, followed, order_of, refers
from meshwright.ir.plan.plan_tensor import TENSOR_FIELDS, checked_tensor
from meshwright.ir.profile import StageCost, costs_from
from meshwright.ir.reader import LARGEST
from meshwright.ir.schedule import Schedule

LOCAL_RANKS = 256
"""The most processes that are started on one host."""


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[KMGT]B|[KMG]iB)", re.IGNORECASE)


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
        dp: Copies of the pipeline, each with its own rows of the batch.
        schedule: A name, a `Schedule`, a schedule file, or `package.module:function`.
        microbatches: Microbatches of one step; 0 stands for as many as workers.
        options: Options of the schedule, such as `{"mode": "halving"}`.
        sync: When gradients are added up: `lazy`, `eager`, `eager-opt` or `ring`.
        recompute: `none`, `inline`, `early`, a share for each stage, or a budget in bytes such as `"2GB"`.
        width: For each stage how many workers share its rows; empty is one each.
        transport: `auto`, `torch`, `shared` or `strict`.
        stages: Where the stages after the first begin: modules by name, or numbers of layers. Empty: cut evenly.
        order: The lists themselves, instead of a schedule by name.
        costs: What each stage costs, so that the schedule is shaped by it.
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

    pp: int = Unsaid(1)
    dp: int = 1
    schedule: str = UnsaidName("onef1b")
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
    tp: int = Unsaid(1)
    tensor: str = UnsaidName("line")
    box: tuple[int, ...] = ()
    depth: int = 1
    sequence: bool = False
    save: str = "shards"
    overlap: bool = False
    replicate: tuple[str, ...] = ()

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
        options = _options(self.options)
        self._set(options=options, recompute=_recompute(self.recompute), width=_width(self.width), stages=_stages(self.stages))
        self._set(costs=() if self.costs in (None, (), []) else costs_from(self.costs, "the costs of a plan"))
        if self.order is not None:
            self._follow(self.order)
        elif refers(self.schedule):
            self._set(microbatches=self.microbatches or Unsaid(self.pp))
        else:
            self._set(pp=int(self.pp), schedule=str(self.schedule), microbatches=int(self.microbatches) or int(self.pp))
        if self.width and len(self.width) != self.pp and not isinstance(self.pp, Unsaid):
            raise MeshwrightError(f"width has {len(self.width)} stages, pp is {self.pp}", fix=f"pp={len(self.width)}")
        self._set(**vars(checked_tensor({name: getattr(self, name) for name in TENSOR_FIELDS}, self.width)))

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
            pp=None if isinstance(self.pp, Unsaid) else self.pp,
            microbatches=None if isinstance(self.microbatches, Unsaid) else self.microbatches or None,
            width=self.width,
            schedule=None if isinstance(self.schedule, UnsaidName) else self.schedule,
            options=self.options or None,
        )
        found = followed(order, given)
        self._set(pp=found.pp, microbatches=found.microbatches, width=found.width, schedule=found.schedule)
        self._set(options=_options(found.options))

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def given(self) -> dict[str, Any]:
        """Returns all fields by name, without counts and names that the user did not set."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if not isinstance(value, Unsaid | UnsaidName)}

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
    def workers(self) -> int:
        """The number of workers of one data-parallel copy."""
        return sum(self.width) if self.width else int(self.pp)

    @property
    def processes(self) -> int:
        """The total number of processes."""
        return self.workers * self.dp * self.tp


def refuse_crowd(ranks: int) -> None:
    """Raises if one host would have to start too many workers; called before any of them starts."""
    if ranks > LOCAL_RANKS:
        raise MeshwrightError(f"{ranks} workers exceed the limit of {LOCAL_RANKS} on one host", fix="torchrun on more hosts")


def bytes_in(text: str) -> float | None:
    """Returns a size such as 2GB or 512 MiB in bytes; None if the text is not a size with a unit."""
    size = _SIZE.fullmatch(text.strip())
    return float(size[1]) * _UNITS[size[2].upper()] if size else None


def _options(given: object) -> dict[str, object]:
    """Returns the options by name; None means no options."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise MeshwrightError(f"options must be a mapping from names to values, got {shown(given)}", fix="options={'chunks': 2}")
    for name, value in given.items():
        if isinstance(value, int) and abs(value) >= LARGEST:
            raise MeshwrightError(f"option {name} must be below {LARGEST}, got {shown(value)}", fix=f"options={{'{name}': 2}}")
    refuse_unfit(given, "a mapping of options")
    return dict(given)


def _recompute(given: object) -> str | float | tuple[float, ...] | None:
    """Returns a mode name, a budget in bytes, or shares. The number of shares is checked later, when stages are known."""
    if given is None:
        return None
    if isinstance(given, str):
        budget = bytes_in(given)
        if budget is None:
            return given
        if budget < inf:
            return budget
    elif 1 < (budget := _number(given)) < inf:
        return budget
    if (shares := _listed(given)) is None or not all(_is_share(share) for share in shares):
        raise MeshwrightError(
            "recompute must be a mode, a budget in bytes, or for each stage a share of its layers between 0 and 1, "
            f"got {shown(given)}",
            fix="recompute='inline', recompute='2GB', or recompute=[0.5, 1]",
        )
    return tuple(float(share) for share in shares)


def _listed(given: object) -> tuple[Any, ...] | None:
    """Returns the items of a sequence; None for str and bytes, which count as one value."""
    single = isinstance(given, str | bytes | bytearray | memoryview)
    return tuple(given) if isinstance(given, Sequence) and not single else None


def _is_share(given: object) -> bool:
    return 0 <= _number(given) <= 1


def _number(given: object) -> float:
    """Returns a number as a float: infinity if it is too large, NaN if it is not a number."""
    if not isinstance(given, Real) or isinstance(given, bool):
        return nan
    try:
        return float(given)
    except OverflowError:
        return inf


def _stages(given: object) -> tuple[str | int, ...]:
    """Returns where stages begin; None means that Meshwright chooses."""
    if given is None:
        return ()
    found = _listed(given)
    if found is None or not all(_is_place(at) for at in found):
        raise MeshwrightError(
            f"stages must list the modules that stages begin with, got {shown(given)}",
            fix='stages=["model.layers.4", "model.layers.8"]',
        )
    return found


def _is_place(given: object) -> bool:
    return isinstance(given, str) or (isinstance(given, int) and not isinstance(given, bool) and abs(given) < LARGEST)


def _width(given: object) -> tuple[int, ...]:
    """Returns the number of workers of each stage; None means one each."""
    if given is None:
        return ()
    found = _listed(given)
    if found is None or any(isinstance(w, bool) or not isinstance(w, int) or not 0 < w < LARGEST for w in found):
        raise MeshwrightError(f"width must list the workers of each stage, got {shown(given)}", fix="width=(4, 2, 1, 1)")
    return found
