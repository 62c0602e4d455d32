"""Count what a rank sends during training: messages by kind with their bytes, and collectives.

    counts = RankCounts()
    engine = Engine(schedule, layers, settings, counts=counts)
    engine.run(batch)
    counts.messages[Kind.SUM], counts.collectives

A message is counted when it is handed to the transport. A collective is counted when a function of `torch.distributed` is called
between the start and the end of a walk, by any caller. The first rank of its group counts it, so that the sum over all ranks
is the number of collectives. The sum of two processes through shared memory replaces an all-reduce and is counted as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshwright.ir.action import Kind
from meshwright.runtime.stage.stage import Bundle
from meshwright.runtime.transport.base import Channel

COLLECTIVES = tuple(
    name
    for stem in (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "barrier",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "scatter",
    )
    for name in (stem, f"{stem}_single", f"{stem}_tensor", f"{stem}_into_tensor", f"{stem}_coalesced", f"{stem}_object")
    if hasattr(dist, name)
)
"""The functions of `torch.distributed` that all ranks of a group call together."""


@dataclass
class RankCounts:
    """What one rank sent. Bytes are those of tensors in messages, without headers, and of tensors that collectives got."""

    messages: Counter[Kind] = field(default_factory=Counter)
    message_bytes: Counter[Kind] = field(default_factory=Counter)
    collectives: int = 0
    collective_bytes: int = 0
    _paused: bool = False

    def sent(self, channel: Channel, bundle: Bundle) -> None:
        """Called for each message that is sent."""
        self.messages[channel.kind] += 1
        self.message_bytes[channel.kind] += sum(t.nbytes for t in bundle.tensors)

    def joined(self, tensors: object, *, first: bool) -> None:
        """Called for each collective. The first rank of its group counts it."""
        if first and not self._paused:
            self.collectives += 1
            self.collective_bytes += _bytes(tensors)

    @contextmanager
    def walking(self) -> Iterator[None]:
        """Counts the collectives of this process inside the context."""
        kept = {name: getattr(dist, name) for name in COLLECTIVES}
        for name, function in kept.items():
            setattr(dist, name, self._counted(function))
        try:
            yield
        finally:
            for name, function in kept.items():
                setattr(dist, name, function)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **more: Any) -> Any:
            group = more.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
            handed = [a for a in (*args, *more.values()) if isinstance(a, Tensor | list | tuple)]
            self.joined(max(handed, key=_bytes, default=()), first=dist.get_rank(group) == 0)
            return function(*args, **more)

        return call

    def sums_of_two(self, start: Callable[[Sequence[Tensor]], Any], *, first: bool) -> Callable[[Sequence[Tensor]], Any]:
        """Returns the function that starts a sum of two processes, with a count."""

        def counted(tensors: Sequence[Tensor]) -> Any:
            self.joined(tensors, first=first)
            return start(tensors)

        return counted

    def outside(self, function: Callable[..., None]) -> Callable[..., None]:
        """Returns a function whose collectives are not counted, because only an observer needs them."""

        def uncounted(*args: Any) -> None:
            self._paused = True
            try:
                function(*args)
            finally:
                self._paused = False

        return uncounted


def _bytes(tensors: object) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(map(_bytes, tensors)) if isinstance(tensors, list | tuple) else 0
