"""Choose the transport of a run: shared memory if all ranks are CPU processes of one host, else torch.distributed."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch

from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import TransportName, parse_name
from meshwright.runtime.json_exchange import all_gather_json
from meshwright.runtime.transport.base import Channel, Transport
from meshwright.runtime.transport.blocking import StrictTransport
from meshwright.runtime.transport.self_test import ping
from meshwright.runtime.transport.shared_memory import SharedTransport
from meshwright.runtime.transport.torch_distributed import TorchTransport


def open_transport(
    name: str, channels: Sequence[Channel], rank: int, *, device: torch.device | None = None, start_timeout_s: float = 60.0
) -> Transport:
    """Creates a transport by name and tests it with a ping. All ranks call this together, after `init_process_group`."""
    wanted = parse_name(name)
    device = torch.device("cpu") if device is None else device
    if device.type != "cpu" and wanted in (TransportName.SHARED, TransportName.STRICT):
        raise MeshwrightError(f"the {wanted.value} transport is for CPU tensors, got {device}", fix="use transport auto or torch")
    transport: Transport
    run_id = None
    if device.type == "cpu" and wanted in (TransportName.AUTO, TransportName.SHARED):
        run_id = _agree(wanted)
    if run_id is not None:
        transport = SharedTransport(channels, rank, run_id, meet_timeout_s=start_timeout_s)
    elif wanted is TransportName.STRICT:
        transport = StrictTransport(channels, rank)
    else:
        transport = TorchTransport(channels, rank, device=device)
    ping(transport, channels, rank, start_timeout_s, device=device)
    return transport


def host_identity() -> str:
    """Returns a text that is equal for processes that can share memory; empty if this system does not support it."""
    if not hasattr(os, "memfd_create"):
        return ""
    # Abstract sockets belong to a network namespace: containers with their own networks do not see each other.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/net').st_ino}"


def _agree(wanted: TransportName) -> str | None:
    """Returns a run id if all ranks are on one host, else None. Every rank gets the same answer."""
    cards: list[list[str]] = all_gather_json([host_identity(), uuid.uuid4().hex])
    homes = {home for home, _ in cards}
    if len(homes) == 1 and "" not in homes:
        return cards[0][1]
    if wanted is TransportName.SHARED:
        hosts = ", ".join(sorted({home.split(" ")[0] or "a system without shared anonymous files" for home in homes}))
        raise MeshwrightError(
            f"the shared transport needs all ranks on one Linux host, got {hosts}", fix="use transport auto or torch"
        )
    return None
