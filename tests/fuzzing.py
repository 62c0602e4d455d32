"""Random damage of files for every reader, with a clock: a reader takes at most two seconds, and raises MeshwrightError alone."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]

from meshwright import MeshwrightError, Parallel, cluster_from_json, costs_from_json, even_costs, from_csv, schedule_from_json
from meshwright.capture.weights import Weights
from meshwright.ir.plan_file import plan_from_json, plan_to_json, read_plan
from meshwright.ir.timeline import Timeline
from meshwright.runtime.board import Board
from meshwright.runtime.failure import Doing, Failure, How
from meshwright.train import folder_lock, rotate
from meshwright.train.job import read_job
from meshwright.train.named import model_file
from tests.file_forms import READERS, plain

QUICK_S = 2.0

PLAN = b"""{"schema": 1, "parallel": {"pp": 4, "dp": 2, "schedule": "chimera", "microbatches": 8, "options": {"pairs": 1},
"sync": "eager", "recompute": [0.5, 1, 0, 0.25], "width": [1, 2, 1, 1], "transport": "auto", "stages": ["a.b", 3]}}"""
PLAN_TOML = b"""schema = 1
[parallel]
pp = 2
schedule = "onef1b"
stages = ["model.layers.4"]
[parallel.options]
warmup = 0x2
"""
ORDER = plan_to_json(Parallel(order=plain("chimera", 2, 2), costs=even_costs(stages=2, workers=2), dp=2)).encode()
"""A plan with lists of its own and with costs."""
ORDER_TOML = b"""schema = 1
[parallel]
costs = [{forward_s = 1.0, input_s = 1, weight_s = 0.5}, {forward_s = 2.0, output_bytes = 8}]
[order]
schema = 1
kind = "schedule"
name = "pair"
microbatches = 2
placement = [[[[0]], [[1]]]]
period = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
"""
JOB = b"""schema = 1
model = "gpt-tiny"
dataset = 'stdlib'
length = 64
resume = false
parallel = {pp = 2, microbatches = 4}
[arguments]
max_steps = 100
learning_rate = 1e-3
output_dir = "out"
"""
MODEL = b"""schema = 1
head = "GPT2LMHeadModel"
dataset = "stdlib"
[config]
model_type = "gpt2"
n_positions = 64
activation = "gelu"
"""
CONFIG = b'{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 64, "task": {"a": [1, 2.5, null, true]}}'
INDEX = b'{"metadata": {"total_size": 8}, "weight_map": {"a.weight": "model-1.safetensors", "b": "model-2.safetensors"}}'
DIGEST = b"a" * 64
MARKER = (
    b'{"schema": 1, "step": 3, "files": {"state.json": {"bytes": 7, "sha256": "%s"}, "shard-1": {"bytes": 9, "sha256": "%s"}}}'
)

LOCK = json.dumps(asdict(folder_lock.Holder.me())).encode()

TOKENS = [
    b"", b"\0", b"\\u0000", b"\\ud800", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"9" * 5000, b"0x" + b"f" * 400,
    b"[" * 2000, b"{" * 70, b'{"a":' * 2000, b"a." * 100, b"a." * 30_000, b'""""', b"'''", b"\\", b'"', b"\n", b"=", b"[[", b"]]",
    b"NaN", b"-Infinity", b"1e999", b"-1", b"0", b"null", b"true", b"{}", b"[]", b"1979-05-27T07:32:00Z", b"inf", b"../", b"/",
    b":", b"os:system", b"\xe2\x80\xae",
]  # fmt: skip


def by_file(read: Callable[[Path], Any], name: str) -> Callable[[Path, bytes], None]:
    """A reader that is given a path."""

    def run(folder: Path, content: bytes) -> None:
        path = folder / name
        path.write_bytes(content)
        read(path)

    return run


def by_text(read: Callable[[str], Any]) -> Callable[[Path, bytes], None]:
    """A reader that is given a text."""
    return lambda _, content: read(content.decode("utf-8", errors="surrogateescape"))


def _positions(path: Path) -> None:
    assert (model_file(str(path)).positions or 1) >= 1


def _entry(read: Callable[[Board], object], key: str) -> Callable[[Path, bytes], None]:
    """An entry on a board, which ignores what is none."""

    def run(_: Path, content: bytes) -> None:
        store = HashStore()
        store.set(key, content.decode("utf-8", errors="replace"))
        if read(Board(store, 8)) is None:
            raise MeshwrightError("ignored")

    return run


FORMS: dict[str, tuple[Callable[[Path, bytes], None], bytes]] = {
    "plan.json": (by_file(read_plan, "plan.json"), PLAN),
    "plan text": (by_text(plan_from_json), PLAN),
    "plan.toml": (by_file(read_plan, "plan.toml"), PLAN_TOML),
    "order.json": (by_file(read_plan, "plan.json"), ORDER),
    "order text": (by_text(plan_from_json), ORDER),
    "order.toml": (by_file(read_plan, "plan.toml"), ORDER_TOML),
    "job.toml": (by_file(read_job, "job.toml"), JOB),
    "model.toml": (by_file(_positions, "model.toml"), MODEL),
    "config.json": (by_file(_positions, "config.json"), CONFIG),
    "index": (by_file(Weights.at, "model.safetensors.index.json"), INDEX),
    "marker": (by_file(lambda path: rotate.damage(path.parent), rotate.MARKER), MARKER % (DIGEST, DIGEST)),
    "lock": (by_file(lambda path: folder_lock.refuse_held(path.parent), folder_lock.NAME), LOCK),
    "doing": (_entry(lambda board: board.heard(3), "doing/3"), Doing(3, 7, "2F0", 2, 1, "act").to_json().encode()),
    "failure": (_entry(Board.failure, "failure"), Failure(3, How.DIED, "killed", fix="dmesg").to_json().encode()),
    "schedule": (by_text(schedule_from_json), READERS["schedule"][1].encode()),
    "lowered": (by_text(schedule_from_json), READERS["lowered"][1].encode()),
    "costs": (by_text(costs_from_json), READERS["costs"][1].encode()),
    "timeline": (by_text(Timeline.from_json), READERS["timeline"][1].encode()),
    "measurement": (by_text(READERS["measurement"][0]), READERS["measurement"][1].encode()),
    "cluster": (by_text(cluster_from_json), READERS["cluster"][1].encode()),
    "csv": (by_text(from_csv), READERS["csv"][1].encode()),
}


def damaged(good: bytes, draw: random.Random) -> bytes:
    """A file with some bits flipped, pieces removed, doubled or exchanged, or something hostile put in."""
    raw = bytearray(good)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(len(raw) + 1)
        match draw.randrange(6):
            case 0 | 1 if at < len(raw):
                raw[at] ^= 1 << draw.randrange(8)
            case 2:
                raw[at : at + draw.randrange(1, 20)] = b""
            case 3:
                raw[at:at] = raw[at : at + draw.randrange(1, 40)]
            case 4:
                other = draw.randrange(len(raw) + 1)
                raw[at : at + 4] = raw[other : other + draw.randrange(12)]
            case _:
                raw[at : at + draw.randrange(12)] = draw.choice(TOKENS)
    return bytes(raw)


@contextmanager
def in_time(what: object) -> Iterator[None]:
    """Fails where the block takes too long: processor time, so that a busy machine is not to blame."""

    def late(*_: object) -> None:
        raise AssertionError(f"more than {QUICK_S} s for {what!r}")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, QUICK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def fuzz(kind: str, count: int, folder: Path, *, seed: int = 0) -> tuple[int, int]:
    """Give a reader so many damaged files; how many it refused, and how many it read."""
    read, good = FORMS[kind]
    read(folder, good)
    draw, refused = random.Random(f"{kind} {seed}"), 0
    for _ in range(count):
        content = damaged(good, draw)
        try:
            with in_time(content[:300]):
                read(folder, content)
        except MeshwrightError as error:
            assert str(error)
            refused += 1
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} for {content[:2000]!r}") from error
    return refused, count - refused
