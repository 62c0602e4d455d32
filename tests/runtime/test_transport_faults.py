"""What transports say when something is wrong: peers that die, sizes that differ, edges that are dead, ranks that do not fit."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Kind
from meshwright.runtime.transport.base import Channel
from meshwright.runtime.transport.faults import from_torch
from meshwright.runtime.transport.self_test import ping
from meshwright.runtime.transport.shared_memory import SharedTransport
from tests.runtime.test_transport import ACT, ALL, GRAD, PAIR, opened
from tests.support import crew


def killed(rank: int, name: str, role: str) -> str | float:
    """Rank 0 dies; rank 1 waits for it (receiver) or keeps sending to it (sender)."""
    transport = opened(name, PAIR, rank)
    if rank == 0:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        while role == "sender":
            transport.send(GRAD, torch.ones(1000))
        transport.receive(ACT, torch.ones(1000)).wait()
    except MeshwrightError as error:
        return f"{error} after {time.monotonic() - start:.0f} s"
    return "nothing noticed"


@pytest.mark.parametrize("role", ["receiver", "sender"])
@pytest.mark.parametrize("name", ["torch", "shared", "strict"])
def test_a_killed_peer_is_noticed(name: str, role: str) -> None:
    start = time.monotonic()
    dead, text = crew.run(killed, 2, name, role)
    assert dead is None
    assert "rank 1 lost rank 0" in text
    assert ("grad 1->0" if role == "sender" else "act 0->1") in text
    assert time.monotonic() - start < 8


def forked(rank: int) -> str:
    """Rank 0 dies and leaves a forked child behind, as data loaders do."""
    transport = opened("shared", PAIR, rank)
    if rank == 0:
        if os.fork() == 0:
            time.sleep(2.5)  # the test cannot end before: this child also holds the way back
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(MeshwrightError, match="lost rank 0"):
        transport.receive(ACT, torch.ones(1)).wait()
    return "at once" if time.monotonic() - start < 1.5 else "late"


def test_a_child_of_the_killed_peer_does_not_hide_it() -> None:
    assert crew.run(forked, 2)[1] == "at once"


def wrong_size(rank: int, name: str) -> str:
    transport = opened(name, PAIR, rank)
    if rank == 0:
        transport.send(ACT, torch.ones(256))
        return "sent"
    transport.receive(ACT, torch.ones(100)).wait()
    return "received"


@pytest.mark.parametrize("name", ["shared", "strict"])
def test_a_wrong_size_names_channel_and_sizes(name: str) -> None:
    sender, receiver = crew.run(wrong_size, 2, name)
    for text in [receiver] if name == "shared" else [sender, receiver]:
        assert all(part in text for part in ("act 0->1", "1024 bytes", "400 bytes", "try:"))


def both_send_first(rank: int) -> str:
    transport = opened("strict", PAIR, rank)
    transport.timeout_s = 0.5
    transport.send(ACT if rank == 0 else GRAD, torch.ones(1))
    return "sent"


def test_strict_blocks_a_send_until_it_is_received() -> None:
    results = crew.run(both_send_first, 2)
    assert any("waited 0.5 s to send to" in text for text in results), results
    assert "sent" not in results


def ring_with_a_dead_edge(rank: int, name: str, dead: Channel) -> str:
    """Three ranks in a ring; the source of one channel does not know it."""
    ring = [Channel(a, b, kind) for kind in (Kind.ACT, Kind.GRAD) for a, b in ((0, 1), (1, 2), (2, 0))]
    transport = opened(name, ring, rank)
    known = [channel for channel in ring if channel != dead or rank != dead.source]
    dist.barrier()
    start = time.monotonic()
    try:
        ping(transport, known, rank, 0.6)
    except MeshwrightError as error:
        time.sleep(0.6)  # as a rank that still reports
        return f"{error}" if time.monotonic() - start < 3.0 else "late"
    time.sleep(1.2)
    return "fine"


@pytest.mark.parametrize("name", ALL)
def test_ping_names_a_dead_edge(name: str) -> None:
    results = crew.run(ring_with_a_dead_edge, 3, name, Channel(1, 2, Kind.GRAD))
    assert "rank 2 waited" in results[2] and "rank 1 on channel grad 1->2" in results[2], results
    if name in ("torch", "shared"):
        assert results[:2] == ["fine", "fine"]


def crossed(rank: int) -> str:
    """Rank 0 mixes two channels up."""
    other = Channel(0, 1, Kind.SUM)
    transport = opened("shared", [ACT, other], rank)
    if rank == 0:
        transport.send(ACT, torch.tensor([0, 1, *b"sum"]))
        transport.send(other, torch.tensor([0, 1, *b"act"]))
    else:
        ping(transport, [ACT, other], rank, 1.0)
    return "fine"


def test_ping_notices_crossed_channels() -> None:
    assert "channel act 0->1 carried a message of another channel" in crew.run(crossed, 2)[1]


def meeting(rank: int, run_id: str, channels: list[list[Channel]], users: list[int]) -> str:
    """Ranks that were told different channels, or run as different users."""
    os.getuid = lambda: users[rank]
    SharedTransport(channels[rank], rank, run_id, meet_timeout_s=0.5)
    return "met"


@pytest.mark.parametrize(
    ("channels", "other_user", "told", "text"),
    [
        ([[Channel(0, 1, Kind.GRAD)], [ACT]], False, 1, "rank 0 should have opened 'act 0->1' but sent grad 0->1"),
        ([[], [ACT]], False, 1, "rank 1 could not connect to rank 0 within 0.5 s"),
        ([[Channel(0, 2, Kind.ACT)], [ACT]], False, 0, "rank 1 has a channel to rank 0, which has none to it"),
        ([[ACT], [ACT]], True, 1, "start all ranks as one user"),
    ],
    ids=["kinds", "absent", "unknown", "user"],
)
def test_ranks_that_do_not_fit_do_not_meet(channels: list[list[Channel]], other_user: bool, told: int, text: str) -> None:
    me = os.getuid()
    result = crew.run(meeting, 2, f"{os.getpid()}-{time.monotonic_ns()}", channels, [me, me + 1 if other_user else me])[told]
    assert text in result


def test_a_group_timeout_is_told() -> None:
    text = str(from_torch(RuntimeError("Timed out waiting 1800000ms for recv"), ACT, 1, None))
    assert "rank 1 waited longer than its process group allows to receive from rank 0 on channel act 0->1" in text
