"""Network namespaces joined by a bridge, with shaped links: a cluster with real sockets on one machine.

    with Namespaces(rates) as network:                 rates[a][b]: bytes per second from namespace a to b
        network.run(function, *args)                   one rank in each, inside a gloo process group
        network.run(function, order=(2, 0, 1))         rank 0 in namespace 2, rank 1 in namespace 0, ...

A namespace has no name: it belongs to a process that has called `unshare`, and the kernel removes it with its interfaces when
that process ends, whatever happens to the tests. Rates are shaped where packets leave, with one class (htb) for each destination
(u32), so that each pair has its own link. Headers are part of a rate; with packets of 9,000 bytes they are less than 1 %.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from time import sleep
from typing import Any

Rates = Sequence[Sequence[float]]
NEWNET = 0x40000000
PACKET = 9000
PORT = 29500
PATIENCE_S = 300.0
PRIORITY = -15
"""Processes that mostly sleep come first, so that others on the machine delay their wake-ups less."""


def missing() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if absent := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"there is no {absent[0]} (iproute2)"
    probe = "qdisc add dev lo root handle 1: htb"
    done = subprocess.run(["unshare", "-n", "tc", *probe.split()], capture_output=True, text=True)
    return None if done.returncode == 0 else f"this kernel cannot shape links: {done.stderr.strip()[:120]}"


def address(namespace: int) -> str:
    """The address of a namespace."""
    return f"10.77.0.{namespace + 1}"


class Namespaces:
    """Processes in their own namespaces. Each serves jobs until this is closed or its parent is gone."""

    def __init__(self, rates: Rates) -> None:
        self.count, self.jobs = len(rates), 0
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["meshwright.runtime.preload"])
        try:
            for _ in range(self.count + 1):  # the last one holds the bridge
                mine, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                self.pipes.append(mine)
                self.processes.append(process)
            ids = [self._answer(place) for place in range(self.count + 1)]
            self._ask(self.count, _configure, [("ip", _bridge(ids[:-1]))])
            for place, row in enumerate(rates):
                self._ask(place, _configure, [("ip", _interface(place)), ("tc", shaped(place, row))])
        except BaseException:
            self.close()
            raise

    def shape(self, rates: Rates) -> None:
        """Other rates for the same namespaces."""
        for place, row in enumerate(rates):
            self._ask(place, _configure, [("tc", ["qdisc del dev eth0 root", *shaped(place, row)])])

    def run(self, function: Callable[..., Any], *args: Any, order: Sequence[int] | None = None) -> list[Any]:
        """What each rank returned. Rank r runs in namespace `order[r]`; the first failure is raised, and ends all."""
        places = list(order if order is not None else range(self.count))
        self.jobs += 1
        for rank, place in enumerate(places):
            self.pipes[place].send((_ranked, (function, args, rank, len(places), address(places[0]), PORT + self.jobs)))
        found: dict[int, Any] = {}
        try:
            while len(found) < len(places):
                waiting = {self.pipes[place]: place for place in places if place not in found}
                ready = wait(list(waiting), timeout=PATIENCE_S)
                if not ready:
                    raise TimeoutError(f"namespaces {sorted(waiting.values())} gave no answer for {PATIENCE_S} s")
                for pipe in ready:
                    place = waiting[pipe]  # type: ignore[index]
                    found[place] = self._answer(place)
        except BaseException:
            self.close()
            raise
        return [found[place] for place in places]

    def _ask(self, place: int, function: Callable[..., Any], *args: Any) -> Any:
        self.pipes[place].send((function, args))
        return self._answer(place)

    def _answer(self, place: int) -> Any:
        good, value = self.pipes[place].recv()
        if not good:
            raise RuntimeError(f"namespace {place}: {value}")
        return value

    def close(self) -> None:
        """End the processes; their namespaces, interfaces and the bridge go with them."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(timeout=10)
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Connection) -> None:
    """A process in a new namespace: runs functions until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if ctypes.CDLL(None, use_errno=True).unshare(NEWNET):
        pipe.send((False, f"unshare failed: {os.strerror(ctypes.get_errno())}"))
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    pipe.send((True, os.getpid()))
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            pipe.send((True, function(*args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def _configure(batches: list[tuple[str, list[str]]]) -> None:
    for tool, lines in batches:
        done = subprocess.run([tool, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{tool}: {done.stderr.strip()[:400]}")


def _bridge(ids: Sequence[int]) -> list[str]:
    lines = ["link add name switch type bridge", "link set switch up"]
    for place, process in enumerate(ids):
        lines.append(f"link add name p{place} mtu {PACKET} type veth peer name eth0 netns {process} mtu {PACKET}")
        lines.append(f"link set p{place} master switch up")
    return lines


def _interface(place: int) -> list[str]:
    return ["link set lo up", f"addr add {address(place)}/24 dev eth0", "link set eth0 up"]


def shaped(place: int, rates: Sequence[float]) -> list[str]:
    """One class for each destination."""
    lines = ["qdisc add dev eth0 root handle 1: htb default 999"]
    lines.append("class add dev eth0 parent 1: classid 1:999 htb rate 10gbit quantum 60000")
    for other, rate in enumerate(rates):
        if other != place:
            size = f"rate {int(8 * rate)}bit burst {PACKET} cburst {PACKET} quantum {PACKET}"
            lines.append(f"class add dev eth0 parent 1: classid 1:{other + 1} htb {size}")
            match = f"u32 match ip dst {address(other)}/32 flowid 1:{other + 1}"
            lines.append(f"filter add dev eth0 parent 1: protocol ip prio 1 {match}")
    return lines


def _ranked(function: Callable[..., Any], args: tuple[Any, ...], rank: int, world: int, master: str, port: int) -> Any:
    """Runs a function inside a process group over the namespaces."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from meshwright.runtime.launch.worker_main import process_group

    store = TCPStore(master, port, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=60))
    with process_group(rank, world, store):
        found = function(*args)
    left = store.add("left", 1)
    while rank == 0 and left < world:  # the store ends with this process's part, and others may still need it
        sleep(0.01)
        left = store.add("left", 0)
    return found


MB = 1e6


def flat(count: int, rate: float = 20 * MB) -> list[list[float]]:
    """Every pair has the same rate."""
    return [[0.0 if a == b else rate for b in range(count)] for a in range(count)]


def two_levels(count: int, per_host: int, inside: float = 40 * MB, between: float = 8 * MB) -> list[list[float]]:
    """Groups with fast links inside and slow ones between."""
    return [
        [0.0 if a == b else inside if a // per_host == b // per_host else between for b in range(count)] for a in range(count)
    ]


def scattered(count: int, seed: int, least: float = 6 * MB, most: float = 40 * MB) -> list[list[float]]:
    """A random rate for each pair, the same in both directions."""
    import random

    draw = random.Random(seed)
    found = [[0.0] * count for _ in range(count)]
    for a in range(count):
        for b in range(a):
            found[a][b] = found[b][a] = round(least * (most / least) ** draw.random(), -3)
    return found
