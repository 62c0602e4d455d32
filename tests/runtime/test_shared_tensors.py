"""Large tensors travel as files in memory: the same objects come out, and nobody sees what another one changes."""

from __future__ import annotations

import gc
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.runtime.launch import shared_tensors as lend
from meshwright.runtime.launch.shared_tensors import Lending
from meshwright.runtime.launch.workers import Workers


def given() -> dict[str, Any]:
    """A tied parameter, views of one storage, small and odd tensors."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(256, 256), nn.Linear(256, 256)])
    model[1].weight = model[0].weight
    big = torch.randn(300, 200)
    return {"model": model, "big": big, "part": big[5:50].t(), "small": torch.ones(3), "half": big.bfloat16(), "none": None}


def test_what_was_lent_is_what_was_given() -> None:
    wanted = given()
    with Lending() as lending:
        data = lending.pack(wanted)
        assert len(data) < 20_000 and lending.file is not None
        assert os.fstat(lending.file).st_nlink == 0, "it has no name"
        open_before = len(os.listdir("/proc/self/fd"))
        one, other = (lend.unpack(data, os.dup(lending.file)) for _ in range(2))
        assert len(os.listdir("/proc/self/fd")) <= open_before, "mappings keep no descriptors"
    for key in ("big", "part", "small", "half"):
        assert torch.equal(one[key], wanted[key]) and one[key].stride() == wanted[key].stride()
    assert one["part"].untyped_storage().data_ptr() == one["big"].untyped_storage().data_ptr()
    weight = one["model"][0].weight
    assert one["model"][1].weight is weight and isinstance(weight, nn.Parameter) and weight.requires_grad
    with torch.no_grad():
        weight.add_(1)
    assert torch.equal(weight, wanted["model"][0].weight + 1)
    assert torch.equal(other["model"][0].weight, wanted["model"][0].weight), "a mapping is private"


@pytest.mark.parametrize("limit", ["room", "number"])
def test_what_cannot_be_lent_is_sent(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = given()
    if limit == "number":
        monkeypatch.setattr(lend, "MOST", 1)
    else:
        monkeypatch.setattr(lend, "_file_in_memory", partial(os.open, "/dev/full", os.O_RDWR))
    with Lending() as lending:
        data = lending.pack(wanted)
        found = lend.unpack(data, None if lending.file is None else os.dup(lending.file))
    assert torch.equal(found["big"], wanted["big"]) and found["model"][0].weight is found["model"][1].weight


def more(model: nn.Module) -> dict[str, Any]:
    """What a worker makes of what it was lent."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    return {"weights": dict(model.state_dict()), "rank": torch.distributed.get_rank()}


def test_workers_change_their_own_and_send_back(workers: Workers) -> None:
    model = given()["model"]
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for found in workers.run(more, model, ranks=2):
        assert all(torch.equal(found["weights"][name], before[name] + 1) for name in before)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_mapping_ends_with_its_last_tensor() -> None:
    with Lending() as lending:
        data = lending.pack([torch.zeros(1 << 20)])
        assert lending.file is not None
        (found,) = lend.unpack(data, os.dup(lending.file))
    address = f"{found.data_ptr():x}-"
    part = found[5:]
    del found
    gc.collect()
    assert address in Path("/proc/self/maps").read_text() and float(part.sum()) == 0
    del part
    gc.collect()
    assert address not in Path("/proc/self/maps").read_text()
