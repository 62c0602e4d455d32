"""Memory of communication on CPU workers: what a plan is charged is what the runtime and gloo really allocate."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
import torch.distributed as dist
from torch import nn

from meshwright import Cluster, Device, Host, LayerCost, Link, Profile
from meshwright.costs.memory.comm_buffers import SLOTS, copied_bytes, ring_bytes, window_bytes
from meshwright.costs.memory.memory_classes import AddedBytes, memory_use
from meshwright.ir.placement import Placement
from meshwright.ir.stage_cost import StageCost
from meshwright.planners._limits import PlanLimits
from meshwright.planners._pricing.pricing import Pricer
from meshwright.planners._search.candidate_plans import Candidate
from meshwright.planners._search.families import families
from meshwright.planners._search.plan_bounds import PlanBounds
from meshwright.planners._search.problem import Problem
from meshwright.planners._search.tensor_costs import ALONE
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.parameters.zero_shares import Shares
from meshwright.runtime.transport import shared_memory
from meshwright.runtime.transport.pair_sum import PairSum

CORE = Device("core of x86_64", 8e9, {"fp32": 1e11})
LOCAL = Cluster(Link(1e-5, 1e9), devices=(CORE,) * 4)
APART = Cluster(devices=(CORE,) * 4, hosts=(Host(1, Link(0.0, 1e9), Link(1e-5, 1e9)),) * 4)
GPUS = Cluster(Link(1e-5, 1e9), devices=(Device("a100", 8e9, {"fp32": 1e11}),) * 4)
ELEMENTS = 10_000_000


def _kilobytes(name: str, file: str = "status") -> int:
    return next(int(x.split()[1]) for x in Path("/proc/self", file).read_text().splitlines() if x.startswith(name))


def gathered() -> float:
    """The growth of a worker while it gathers a divided unit, beyond what it has before."""
    ctypes.CDLL(None).mallopt(-3, 64 << 10)  # freed blocks go back to the system, so that a peak is one of tensors
    parameter = nn.Parameter(torch.ones(ELEMENTS))
    shares = Shares([parameter], (0, 1), dist.get_rank(), dist.group.WORLD)
    Path("/proc/self/clear_refs").write_text("5")
    before = _kilobytes("VmRSS")
    shares.start_gather()
    shares.wait()
    return 1024.0 * (_kilobytes("VmHWM") - before)


def shown(run_id: str) -> float:
    """The growth of a worker's share in shared memory by a sum of two."""
    before, rank = _kilobytes("Pss_Shmem", "smaps_rollup"), dist.get_rank()
    gradients = torch.ones(ELEMENTS)
    pair = PairSum([gradients], rank, 1 - rank, run_id)
    for one in pair.start([gradients]):
        one.wait()
    dist.barrier()  # both have read
    found = _kilobytes("Pss_Shmem", "smaps_rollup") - before
    dist.barrier()
    pair.close()
    return 1024.0 * found


def test_what_is_charged_is_what_a_run_allocates(workers: Workers) -> None:
    assert SLOTS == shared_memory.SLOTS
    size = 4.0 * ELEMENTS
    assert workers.run(gathered, ranks=2) == pytest.approx([copied_bytes(LOCAL, (0, 1), size)] * 2, rel=0.1)
    assert workers.run(shown, "buffers", ranks=2) == pytest.approx([window_bytes(LOCAL, (0, 1), size)] * 2, rel=0.1)


def test_only_cores_of_one_host_share_memory() -> None:
    assert window_bytes(LOCAL, (0, 1), 8.0) == 8.0
    assert window_bytes(LOCAL, (0, 1, 2), 8.0) == 0.0, "three ranks use a collective, in buckets"
    assert window_bytes(APART, (0, 1), 8.0) == 0.0 == window_bytes(GPUS, (0, 1), 8.0)
    assert copied_bytes(APART, (0, 1), 8.0) == 12.0 and copied_bytes(GPUS, (0, 1), 8.0) == 0.0 == copied_bytes(LOCAL, (0,), 8.0)


def test_rings_belong_half_to_each_end() -> None:
    costs = [StageCost(output_bytes=10.0, gradient_bytes=4.0), StageCost(output_bytes=2.0, gradient_bytes=2.0), StageCost()]
    line = Placement.line(3)
    seats = [[0], [1], [2]]
    assert ring_bytes(LOCAL, seats, costs, line, microbatches=16) == [42.0, 54.0, 12.0]
    assert ring_bytes(LOCAL, seats, costs, line, microbatches=2) == [14.0, 18.0, 4.0], "never more than there are messages"
    assert ring_bytes(APART, seats, costs, line, microbatches=16) == [0.0] * 3
    both = [StageCost(output_bytes=10.0, gradient_bytes=10.0), StageCost()]
    assert ring_bytes(LOCAL, [[0], [1]], both, Placement.mirrored(2), microbatches=8) == [80.0, 80.0], "4 messages each way"


def test_copies_count_where_they_exceed_activations() -> None:
    kinds = {"param": 10.0, "wgrad": 10.0, "opt": 10.0, "saved": 7.0, "act": 1.0}
    few, many = (memory_use(kinds, more=AddedBytes(transient=2.0, buffers=3.0, copied=c)) for c in (5.0, 15.0))
    assert few.total == 43.0 and few.messages == 4.0
    assert many.total == 48.0 and (many.activations, many.transients, many.messages) == (0.0, 0.0, 18.0)
    assert AddedBytes(2.0, 3.0, 5.0).peak(30.0, 8.0) == 43.0 and AddedBytes(2.0, 3.0, 15.0).peak(30.0, 8.0) == 48.0


@pytest.mark.parametrize(("zero", "messages"), [("replicated", 400.0), ("zero-1", 600.0), ("zero-2", 600.0)])
def test_copies_of_a_model_on_cores(zero: str, messages: float) -> None:
    """Two copies of 400 bytes: a window as large as the gradients, or what gloo copies when there are no activations."""
    layers = tuple(LayerCost(f"layer {n}", (1.0,), (1.0,), (1.0,), parameter_bytes=100.0, saved_bytes=1.0) for n in range(4))
    found = []
    for cluster in (LOCAL, GPUS):
        problem = Problem(Profile(layers, rows=(1,)), cluster, PlanLimits(), microbatches=None, batch=4)
        pricer = Pricer(problem, PlanBounds(problem))
        plan = Candidate(families("onef1b")[0], 1, 2, ALONE, 1, 1, 2, zero, False, "copies", (4,), 0.0)
        quick = pricer.quick(plan)
        _, uses = pricer.engine(pricer.price(plan))
        assert quick is not None and quick.peak_bytes[0] == pytest.approx(uses[0].total)
        found.append(uses[0].messages)
    assert found == [messages, 0.0]
