"""What ranks tell each other goes as JSON and bytes: it comes back exact or is refused on all ranks, and nothing is pickled."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright
from meshwright.errors import MeshwrightError
from meshwright.runtime.json_exchange import (
    all_gather_json,
    all_gather_state,
    broadcast_json,
    dtype_name,
    dtype_named,
    gather_json,
)
from tests.conftest import Pool

ROOT = Path(meshwright.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
PLAIN = [
    None, True, 0, -(2**70), 0.1, -0.0, 5e-324, math.inf, -math.inf, math.nan, "", "ü\ud800\u2028\0", [], {},
    [[1], {"a": [None]}],
]  # fmt: skip
DTYPES = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64]


def same(one: Any, other: Any) -> bool:
    """Equal in type, value and, for numbers and tensors, in every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        form = one.dtype == other.dtype and one.shape == other.shape
        bits = [t.resolve_conj().reshape(-1).view(torch.uint8) for t in (one, other)]
        return form and torch.equal(*bits)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return repr(one) == repr(other)


def state(rank: int) -> dict[Any, Any]:
    """What optimizers keep, and worse."""
    made = [(torch.arange(7.0 + 5 * rank) / 3).to(dtype) for dtype in DTYPES]
    odd = [
        torch.empty(0, 3),
        torch.tensor(2.5 + rank),
        torch.arange(6).reshape(2, 3).T,
        torch.randn(2, dtype=torch.complex64).conj(),
    ]
    return {
        "tensors": made + odd,
        3: (rank, {"betas": (0.9, 0.999), "lr": math.inf}),
        "tensor": {"dict": [made[0]]},
        (1, None): rank,
    }


def told(text: str) -> list[Any]:
    """A value of this rank; they differ in length."""
    return [text * (50 * dist.get_rank() + 1), *PLAIN]


def exchange() -> dict[str, bool]:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    every = [state(other) for other in range(world)]
    texts = ["x" * (50 * other + 1) for other in range(world)]
    heard, gathered, states = all_gather_json(told("x")), gather_json(told("x")), all_gather_state(every[rank])
    part = dist.new_group([world - 1, 0])
    return {
        "all_gather": [one[0] for one in heard] == texts and all(same(one[1:], PLAIN) for one in heard),
        "gather": gathered is None if rank else same(gathered, heard),
        "broadcast": same(broadcast_json(told("y") if rank == 0 else object()), ["y", *PLAIN]),
        "state": all(map(same, states, every)),
        "own memory": len({t.untyped_storage().data_ptr() for t in states[0]["tensors"] if t.numel()}) == len(DTYPES) + 3,
        "group": rank not in (0, world - 1) or sorted(all_gather_json(rank, group=part)) == [0, world - 1],
    }


def test_everything_comes_back_as_it_was(pool: Pool) -> None:
    for found in pool.run(exchange, ranks=2):
        assert found == dict.fromkeys(found, True) and len(found) == 6


def refused() -> list[str]:
    """Only the last rank has something that cannot be sent; what every rank says of it."""
    last = dist.get_rank() == dist.get_world_size() - 1
    found = []
    for wrong in ({"a": [{1, 2}]}, {"a": (1,)}, {3: 1}, torch.float32, torch.ones(1), b"x"):
        for send in (all_gather_json, gather_json):
            try:
                send(wrong if last else 1)
            except MeshwrightError as error:
                found.append(str(error))
    for wrong in (object(), {"a": [torch.eye(2).to_sparse()]}, torch.empty(2, device="meta")):
        try:
            all_gather_state(wrong if last else 1)
        except MeshwrightError as error:
            found.append(str(error))
    try:
        broadcast_json({1} if dist.get_rank() == 0 else None)
    except MeshwrightError as error:
        found.append(str(error))
    return [*found, str(all_gather_json("in step"))]


def test_what_json_cannot_hold_is_refused_on_all_ranks(pool: Pool) -> None:
    one, other = pool.run(refused, ranks=2)
    assert one == other and len(one) == 6 * 2 + 3 + 2 and one[-1] == "['in step', 'in step']"
    assert one[0] == (
        "rank 1 cannot send its value to the other ranks: the value['a'][0] is a set, which JSON cannot hold exactly\n"
        "  try: send numbers, text, None, lists, and dicts with text keys"
    )
    assert "the value['a'] is a tuple" in one[2] and "the value has the key 3" in one[4] and "is a dtype" in one[6]
    assert "is a object" in one[12] and "['a'][0] is a tensor whose values are not plain bytes (torch.sparse_coo" in one[13]
    assert one[15].startswith("rank 0 cannot send")


def test_dtypes_have_names() -> None:
    assert all(dtype_named(dtype_name(dtype)) is dtype for dtype in DTYPES)
    with pytest.raises(MeshwrightError, match="torch has no dtype 'load'"):
        dtype_named("load")


# -- nothing is pickled


ALLOWED = {
    "runtime/launch/shared_tensors.py": "the hand-over from the user's process to its own local workers, and back",
    "runtime/launch/workers.py": "the pipes of that hand-over",
    "runtime/launch/worker_main.py": "the pipes of that hand-over",
    "train/verify/verify_case.py": "tries whether a function can be handed over; nothing is loaded",
    "capture/trace/patches/python_random.py": "states of generators, kept and put back in one process",
}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing"}


def pickles(source: str) -> list[str]:
    """What a file uses that pickles."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names) if any(alias.name.split(".")[0] in PICKLES for alias in names):
                found.append(node)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLES:
                found.append(node)
            case ast.Attribute(attr=name) | ast.alias(name=name) if name.endswith(("_object", "_object_list")):
                found.append(node)
            case ast.Attribute(value=ast.Name(id="torch"), attr="load" | "save"):
                found.append(node)
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("torch.distributed.checkpoint"):
                if {alias.name for alias in names} & {"save", "load", "async_save", "save_state_dict", "load_state_dict"}:
                    found.append(node)  # ranks send each other their plans
            case ast.Call(keywords=words) if any(
                w.arg == "weights_only" and isinstance(w.value, ast.Constant) and w.value.value is False for w in words
            ):
                found.append(node)
    return [ast.unparse(node) for node in found]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_object_goes_to_another_host_as_a_pickle(path: Path) -> None:
    found = pickles(path.read_text())
    if str(path.relative_to(ROOT)) in ALLOWED:
        assert found, "take it off the list"
    else:
        assert found == [], "send JSON or tensors: runtime/json_exchange.py"


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "from multiprocessing import Pipe",
        "dist.all_gather_object(a, b)",
        "dist.broadcast_object_list(a)",
        "from torch.distributed import gather_object",
        "torch.load(path)",
        "load(path, weights_only=False)",
        "from torch.distributed.checkpoint.state_dict_saver import save as save_tensors",
    ],
)
def test_pickles_are_recognised(line: str) -> None:
    assert len(pickles(line)) >= 1
