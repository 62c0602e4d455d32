"""Random damage of files for every reader, with a clock: a reader takes at most two seconds, and raises MeshwrightError alone."""

from __future__ import annotations

import json
import logging
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from meshwright import MeshwrightError, Parallel, cluster_from_json, costs_from_json, even_costs, from_csv, schedule_from_json
from meshwright.capture.weights.safetensors_files import Weights
from meshwright.ir.files.cluster_file import read_cluster
from meshwright.ir.files.model_json import model_from_json, model_to_json
from meshwright.ir.files.profile_json import profile_from_json, profile_to_json
from meshwright.ir.files.profile_text import profile_from_text
from meshwright.ir.model import Crossing, Layer, ModelGraph, Weight
from meshwright.ir.plan.plan_file import plan_from_json, plan_to_json, read_plan
from meshwright.ir.plan.planned_file import is_plan_file, plan_file_json, planned_file
from meshwright.ir.profile import LayerCost, Profile
from meshwright.ir.timeline import Timeline
from meshwright.runtime.watchdog.board import Board
from meshwright.runtime.watchdog.failure import Doing, Failure, FailureKind
from meshwright.train.checkpoint import folder_lock
from meshwright.train.checkpoint import folders as rotate
from meshwright.train.checkpoint.checkpoint_facts import read_facts
from meshwright.train.data import named_datasets as datasets
from meshwright.train.job_file import read_job
from meshwright.train.models.model_names import model_file
from meshwright.train.setup.build_schedule import lists_for
from meshwright.train.setup.settled_plan import settled
from tests.support.file_forms import READERS, plain

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
PLANNED = plan_file_json(
    Parallel(order=plain("listed", 2, 2), costs=even_costs(stages=2, workers=2), width=(2, 1), ranks=(3, 0, 1), stages=(4,)),
    stages=[{"layers": [0, 3], "devices": [3, 0], "width": 2, "recompute": 0.5}, {"layers": [4, 5], "devices": [1], "width": 1}],
    predicted={"step_s": 0.5, "lower_bound_s": 0.4, "peak_bytes": [1e9, 1e9, 2e9]},
    made_for={"profile": {"digest": "ab12"}, "batch": 64, "precision": "bf16"},
).encode()
"""A plan that a planner chose."""
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
CLUSTER_TOML = b"""schema = 1
racks = {latency = "50 us"}
[device.a100]
memory = "80 GB"
bf16 = 312e12
fp32 = "17 TFLOPS"
reads = "1.5 TB/s"
launch = "20 us"
[[nodes]]
count = 2
per_node = 4
device = "a100"
inside = {latency_s = 5e-6, bytes_per_s = 250e9}
card = {latency_s = 2e-5, bytes_per_s = 25e9, per_node = 2}
[[links]]
source = 0
target = 7
bandwidth = "8 Gbit/s"
"""
MATRIX = b'{"memory_bytes": [1e9, 2e9, 3e9], "bytes_per_s": [[0, 1.5, 2], [1, 0, 3], [1, 2, 0]], "latency_s": 1e-5}'
NUMBERS = "forward_compute_time=1.5, backward_compute_time=3, activation_size=8, parameter_size=4"
PROFILE = f"n1 -- in -- {NUMBERS}\nn2 -- mask -- {NUMBERS}\nn3 -- out -- {NUMBERS}\n\tn1 -- n2\n\tn1 -- n3\n\tn2 -- n3\n".encode()
INDEX = b'{"metadata": {"total_size": 8}, "weight_map": {"a.weight": "model-1.safetensors", "b": "model-2.safetensors"}}'
DIGEST = b"a" * 64
MARKER = (
    b'{"schema": 1, "step": 3, "files": {"state.json": {"bytes": 7, "sha256": "%s"}, "shard-1": {"bytes": 9, "sha256": "%s"}}}'
)

GRAPH = ModelGraph(
    "mlp",
    (
        Layer("in", 12.0, ("a", "b"), 24, (Crossing("x", (2, 3), 24, 0),), 48, ("input",), ("0",)),
        Layer("out", 6.0, ("c",), 12, (), 24, ("labels",), ("1",)),
    ),
    (Weight("a", (2, 1), 8), Weight("b", (4,), 16), Weight("c", (3,), 12)),
)
FACTS = b"""{"schema": 2, "step": 3, "seed": 0, "written_under": {"schedule": "onef1b", "workers": 2, "stages": 2, "dp": 1},
"data": {"epoch": 0, "rows": 12}, "scaler": null, "extra": {"rates": {"a": [1]}, "state": {"epoch": 0.5}}, "optimizer": "AdamW",
"scheduler": null, "counters": {"a": {"step": {"tensor": "float32", "value": 3.0}}}, "groups": [{"lr": 0.1}], "options": {"a": 0},
"unread": ["b"]}"""
TEXTS = b"".join(b'{"text": "some words of row %d", "id": %d}\n' % (row, row) for row in range(8))
TOKENS = b"".join(b'{"input_ids": [%d, 2, 3], "labels": [1, -100, 3]}\n' % row for row in range(12))
LOCK = json.dumps(asdict(folder_lock.Holder.me())).encode()

HOSTILE = [
    b"", b"\0", b"\\u0000", b"\\ud800", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"9" * 25, b"9" * 5000, b"0x" + b"f" * 400,
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


def _rows(path: Path) -> None:
    """Every row of a data set, as training reads them."""
    for which in (False, True):
        found: Any = datasets.named(str(path), length=4, evaluation=which)
        assert all(len(found[index]["input_ids"]) for index in range(0, len(found), 1 + len(found) // 64))


def _tensors(path: Path) -> None:
    """Every tensor of a file, as a rank reads its weights."""
    weights = Weights.at(path)
    assert all(tuple(weights[name].shape) == weights.shape(name) for name in weights)


def _entry(read: Callable[[Board], object], key: str) -> Callable[[Path, bytes], None]:
    """An entry on a board, which ignores what is none."""

    def run(_: Path, content: bytes) -> None:
        store = HashStore()
        store.set(key, content.decode("utf-8", errors="replace"))
        if read(Board(store, 8)) is None:
            raise MeshwrightError("ignored")

    return run


def _planned(path: Path) -> None:
    """Reads a plan as `simulate` does, up to its proved lists."""
    if is_plan_file(path.read_text(encoding="utf-8", errors="replace")):  # as `simulate` looks at it first
        lists_for(settled(planned_file(path).parallel))
    else:
        read_plan(path)


LAYERS = Profile(
    tuple(LayerCost(name, (1.0, 2.0), (1.0, 2.0), (1.0, 2.0), saved_bytes=8.0, ties=("a",)) for name in ("b", "h.0.c", "h.1.c")),
    rows=(1, 2),
    tokens_per_row=64,
)
FORMS: dict[str, tuple[Callable[[Path, bytes], None], bytes]] = {
    "plan.json": (by_file(read_plan, "plan.json"), PLAN),
    "planned.json": (by_file(_planned, "plan.json"), PLANNED),
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
    "facts": (by_file(lambda path: read_facts(path.parent), rotate.FACTS), FACTS),
    "texts": (by_file(_rows, "texts.jsonl"), TEXTS),
    "tokens": (by_file(_rows, "tokens.jsonl"), TOKENS),
    "text": (by_file(_rows, "text.txt"), b"a line of text\n" * 3),
    "safetensors": (by_file(_tensors, "model.safetensors"), safetensors.torch.save({"a": torch.ones(2, 3), "b": torch.ones(())})),
    "lock": (by_file(lambda path: folder_lock.refuse_held(path.parent), folder_lock.NAME), LOCK),
    "doing": (_entry(lambda board: board.heard(3), "doing/3"), Doing(3, 7, "2F0", 2, 1, "act").to_json().encode()),
    "failure": (_entry(Board.failure, "failure"), Failure(3, FailureKind.DIED, "killed", fix="dmesg").to_json().encode()),
    "schedule": (by_text(schedule_from_json), READERS["schedule"][1].encode()),
    "lowered": (by_text(schedule_from_json), READERS["lowered"][1].encode()),
    "costs": (by_text(costs_from_json), READERS["costs"][1].encode()),
    "timeline": (by_text(Timeline.from_json), READERS["timeline"][1].encode()),
    "measurement": (by_text(READERS["measurement"][0]), READERS["measurement"][1].encode()),
    "cluster": (by_text(cluster_from_json), READERS["cluster"][1].encode()),
    "cluster.toml": (by_file(read_cluster, "cluster.toml"), CLUSTER_TOML),
    "cluster.json": (by_file(read_cluster, "cluster.json"), MATRIX),
    "profile": (by_text(profile_from_text), PROFILE),
    "profile.json": (by_text(profile_from_json), profile_to_json(LAYERS).encode()),
    "graph": (by_text(model_from_json), model_to_json(GRAPH).encode()),
    "csv": (by_text(from_csv), READERS["csv"][1].encode()),
}


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**25, 10**999, 0.5, -0.5, 1e300, float("nan"), float("inf"), "",
    "a", "0F0", "\0", "\ud800", "../x", "os:system", "x" * 9000, [], {}, [[]], [{}], {"": 0}, {"a": {"b": []}}, [0] * 3, ["a"],
    [None], [[0, 1]],
]  # fmt: skip
"""What a value of JSON is exchanged for: each kind of it, at its limits."""


def exchanged(value: Any, draw: random.Random) -> Any:
    """JSON with a value somewhere inside replaced, removed or doubled: what a reader sees whose parser finds nothing wrong."""
    if isinstance(value, dict) and value and draw.randrange(6):
        key = draw.choice(list(value))
        match draw.randrange(12):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, draw.choice(["", "x", key + "x", "schema"]): draw.choice(VALUES)}
        return {**value, key: exchanged(value[key], draw)}
    if isinstance(value, list) and value and draw.randrange(6):
        at = draw.randrange(len(value))
        match draw.randrange(12):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value, value[at]]
        return [*value[:at], exchanged(value[at], draw), *value[at + 1 :]]
    return draw.choice(VALUES)


def damaged(good: bytes, draw: random.Random) -> bytes:
    """A file with a value of its JSON exchanged, or with bits flipped, pieces removed or doubled, or something hostile put in."""
    if good[:1] in (b"{", b"[") and draw.randrange(2):
        with suppress(ValueError):  # lines of JSON are several values
            return json.dumps(exchanged(json.loads(good), draw)).encode()
        lines = good.splitlines()
        at = draw.randrange(len(lines))
        lines[at] = json.dumps(exchanged(json.loads(lines[at]), draw)).encode()
        return b"\n".join(lines)
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
                raw[at : at + draw.randrange(12)] = draw.choice(HOSTILE)
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
    logging.disable()  # a board names each entry that it ignores
    try:
        for _ in range(count):
            refused += not _is_read(read, folder, damaged(good, draw))
    finally:
        logging.disable(logging.NOTSET)
    return refused, count - refused


def _is_read(read: Callable[[Path, bytes], None], folder: Path, content: bytes) -> bool:
    """Whether a reader took it; anything but a MeshwrightError in time is a failure."""
    try:
        with in_time(content[:300]):
            read(folder, content)
    except MeshwrightError as error:
        assert str(error)
        return False
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} for {content[:2000]!r}") from error
    return True
