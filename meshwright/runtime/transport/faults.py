"""The errors of a channel, with its name and both ranks: a peer that died, a peer that does not answer, sizes that differ."""

from __future__ import annotations

from meshwright.errors import MeshwrightError
from meshwright.runtime.started_ranks import started
from meshwright.runtime.transport.base import Channel


def label(channel: Channel) -> str:
    """Returns a channel as text: `act 0->1`. Like all texts here, it has the numbers that processes were started with."""
    return f"{channel.kind.value} {started(channel.source)}->{started(channel.target)}"


def other(channel: Channel, rank: int) -> int:
    """Returns the rank at the other end of a channel."""
    return channel.target if rank == channel.source else channel.source


class PeerLost(MeshwrightError):
    """The process at the other end of a channel is gone. This is rarely the cause: look at that rank's own error first."""

    def __init__(self, channel: Channel, rank: int) -> None:
        self.channel, self.rank, self.peer = channel, rank, other(channel, rank)
        super().__init__(
            f"rank {started(rank)} lost rank {started(self.peer)} on channel {label(channel)}: that process died or closed its "
            "transport",
            fix=f"read the last output of rank {started(self.peer)}",
        )


class PeerSilent(MeshwrightError):
    """The other end of a channel did not answer in time."""

    def __init__(self, channel: Channel, rank: int, timeout_s: float | None) -> None:
        self.channel, self.rank, self.peer = channel, rank, other(channel, rank)
        verb = "send to" if rank == channel.source else "receive from"
        span = "longer than its process group allows" if timeout_s is None else f"{timeout_s:g} s"
        super().__init__(
            f"rank {started(rank)} waited {span} to {verb} rank {started(self.peer)} on channel {label(channel)}",
            fix=f"check whether rank {started(self.peer)} runs and can reach rank {started(rank)}, or increase the timeout",
        )


def wrong_message(channel: Channel, sent: str, expected: str) -> MeshwrightError:
    """Returns the error for two ends of a channel that disagree about the next message."""
    source, target = started(channel.source), started(channel.target)
    return MeshwrightError(
        f"channel {label(channel)}: rank {source} sent {sent}, rank {target} expects {expected}",
        fix="give both ends the same schedule, shapes and dtypes",
    )


def from_torch(error: RuntimeError, channel: Channel, rank: int, timeout_s: float | None) -> MeshwrightError:
    """Returns the error for a failed wait. Only the text of torch's error tells a timeout from a lost peer."""
    if "imed out" in str(error) or "imeout" in str(error):
        return PeerSilent(channel, rank, timeout_s)
    return PeerLost(channel, rank)
