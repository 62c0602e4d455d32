"""Tensor parallelism: a step against torch's DTensor, and what two halves of a microbatch gain against the prediction.

    python -m benchmarks.tensor --json
    python -m benchmarks.tensor --only trace

step     a small Llama on two gloo processes: line mode on the executor against `parallelize_module` (colwise q, k, v, gate, up
         and head, rowwise o and down). Both run in the same processes, in turn; the median of paired ratios with its interval.
overlap  one rank on wires that take time, products as timed waits: the wall time of a forward and a backward pass as two halves
         over that in one, against the ratio that `tests/support/overlap_time.py` predicts, for three ratios of communication to
         compute.
trace    the same on a box: collectives and products on one clock. The next weight is gathered while a product runs, and weight
         gradients are scattered behind later products.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.executor import ratio, sgd
from meshwright.capture.shard.sharded import ShardPlan, TensorCut, open_plan, shard_plan
from meshwright.capture.shard.woven_chain import WovenChain
from meshwright.capture.shard.woven_layer import WovenLayer
from meshwright.capture.trace.export import flatten
from meshwright.costs.declared import CollectiveKind, Phase
from meshwright.costs.scheme import Save, TensorRequest
from meshwright.ir.plan.plan import Parallel
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.launch.workers import Workers
from meshwright.tensor.wires.lone_wires import DelayedWires, DryWires
from meshwright.tensor.wires.wires import Wires
from meshwright.train.prepared import PreparedRun
from meshwright.train.verify.verify_case import Case, prepare_case
from tests.support.overlap_time import turns_of, weave_time
from tests.support.piece_times import backward_times, forward_times, multiply_adds
from tests.support.sharded import cut_parameters

STEP_AT_MOST, OVERLAP_AT_MOST = 1.0, 1.1
"""The bars: our step over torch's, and the measured over the predicted ratio of halves."""
RATIOS = (0.5, 1.0, 2.0)
"""Seconds of collectives per second of compute."""
COMPUTE_S = 0.6
"""Seconds of products in a forward pass in one."""


def llama(**more: Any) -> nn.Module:
    """A Llama with grouped heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**{"vocab_size": 512, "num_hidden_layers": 4, **sizes, **more}))


def tokens(step: int, rows: int = 4, length: int = 128) -> dict[str, Tensor]:
    """Random tokens that are their own labels."""
    ids = torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


# a step against DTensor


class Theirs:
    """One rank of the same model as DTensors."""

    def __init__(self, case: Case) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan: dict[str, Any] = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.*.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.*.{name}"] = RowwiseParallel()
        self.model: Any = parallelize_module(case.model().train(), init_device_mesh("cpu", (dist.get_world_size(),)), plan)
        self.optimizer = sgd(list(self.model.parameters()))

    def step(self, batch: dict[str, Tensor]) -> float:
        """One training step."""
        self.optimizer.zero_grad()
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


class Ours:
    """One rank of line mode on the executor, as `verify` runs it."""

    def __init__(self, case: Case, run: PreparedRun) -> None:
        layers = run.open(case.model(), run.mesh(dist.get_rank()))
        self.engine = Engine(run.schedule, layers, run.settings(optimizer=sgd))
        self.steps = 0

    def step(self, batch: dict[str, Tensor]) -> float:
        """One training step."""
        tallies = list(self.engine.run(lambda _: batch, self.steps).values())
        self.steps += 1
        return float(tallies[0].loss) / float(tallies[0].weight) if tallies else 0.0  # the first rank of a box counts


def duel(case: Case, run: PreparedRun, repeats: int, steps: int) -> dict[str, list[float]]:
    """Wall seconds of some steps of each variant, in turn, and the losses of the first steps."""
    torch.set_num_threads(1)
    variants: dict[str, Any] = {"ours": Ours(case, run), "theirs": Theirs(case)}
    batch = tokens(0)
    found: dict[str, list[float]] = {f"{name}_losses": [v.step(batch) for _ in range(3)] for name, v in variants.items()}
    found |= {name: [] for name in variants}
    for _ in range(repeats):
        for name, variant in variants.items():
            dist.barrier()
            variant.step(batch)
            start = time.perf_counter()
            for _ in range(steps):
                variant.step(batch)
            found[name].append(time.perf_counter() - start)
    return found


def step_ratio(repeats: int) -> dict[str, Any]:
    """Our step time over torch's on two processes."""
    parallel = Parallel(tp=2, pp=1, microbatches=1, save="gathered")
    case, _, run = prepare_case(Case(llama, tokens, parallel, 1, "float32", 0, None, sgd))
    with Workers(2) as pool:
        ranks = pool.run(duel, case, run, repeats, 4)
    slowest = {name: [max(pair) for pair in zip(*(rank[name] for rank in ranks), strict=True)] for name in ("ours", "theirs")}
    apart = max(abs(a - b) for a, b in zip(ranks[0]["ours_losses"], ranks[0]["theirs_losses"], strict=True))
    assert apart < 1e-3, f"the two do not train alike: {ranks[0]['ours_losses']}, {ranks[0]['theirs_losses']}"
    found = ratio(slowest["ours"], slowest["theirs"])
    return {"step_over_dtensor": found["median"], "step_over_dtensor_interval": [found["low"], found["high"]]}


# two halves on wires that take time


def small() -> nn.Module:
    """A Llama whose own compute takes next to no time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 16, "num_key_value_heads": 8}
    return llama(**sizes, num_hidden_layers=2, vocab_size=512).train()


class Emulated:
    """A plan on one rank: its chain of layers, with products as timed waits."""

    def __init__(self, plan: ShardPlan, wires: Wires, spend: Callable[[int], None] | None = None) -> None:
        model = small()
        cut_parameters(dict(model.named_parameters()), plan.settled.cuts, plan.settled.grid, wires.rank)
        self.chain: WovenChain = WovenLayer.chained(open_plan(model, plan, wires))
        for graph in self.chain.graphs:
            graph.slot.spend = spend

    def step(self, batch: dict[str, Tensor]) -> float:
        """Wall seconds of a forward and a backward pass."""
        start = time.monotonic()
        loss = self.chain((), batch)[0]
        loss.backward()
        return time.monotonic() - start

    def counts(self, batch: dict[str, Tensor]) -> list[list[int]]:
        """Multiply-adds of every piece of every half."""
        given = [self.chain._given(half, [], batch, {}) for half in range(len(self.chain.graphs))]
        return [multiply_adds(graph, values) for graph, values in zip(self.chain.graphs, given, strict=True)]

    def predicted(self, counts: list[list[int]], rate_s: float, beta_s: float) -> float:
        """Seconds of both passes by the cost model."""
        pairs = list(zip(self.chain.graphs, counts, strict=True))
        ways = {"rate_s": rate_s, "collective": lambda words: beta_s * words}
        forward, backward = ([times(g, c, **ways) for g, c in pairs] for times in (forward_times, backward_times))
        turns = turns_of(forward)
        return weave_time(forward, turns) + weave_time(backward, turns[::-1])


def overlap_ratios(repeats: int) -> dict[str, Any]:
    """For each ratio of collectives to compute: the gain of halves, measured over predicted."""
    batch = tokens(0, rows=8, length=12)
    flat, one = flatten(small(), batch), TensorCut.of("line", TensorRequest(tp=2), save=Save.GATHERED)
    plans = [shard_plan(small(), flat, replace(one, overlap=overlap)) for overlap in (False, True)]
    dry = [Emulated(plan, DryWires(one.grid, 0)) for plan in plans]
    counts = [each.counts(batch) for each in dry]
    rate_s = COMPUTE_S / sum(map(sum, counts[0]))
    words = sum(float(t.words) for t in plans[0].settled.transfers() if t.phase is not Phase.SYNC)
    result: dict[str, Any] = {}
    for part in RATIOS:
        beta_s = part * 3 * COMPUTE_S / words
        whole, halves = (each.predicted(count, rate_s, beta_s) for each, count in zip(dry, counts, strict=True))
        measured: list[list[float]] = [[], []]
        for _ in range(repeats):
            for plan, times in zip(plans, measured, strict=True):
                wires = DelayedWires(one.grid, 0, alpha_s=0.0, beta_s=beta_s, shared_channel=True)
                times.append(Emulated(plan, wires, lambda count: time.sleep(count * rate_s)).step(batch))
        found = ratio(measured[1], measured[0])
        result[f"overlap_{part:g}"] = {
            "measured": found["median"],
            "interval": [found["low"], found["high"]],
            "predicted": halves / whole,
            "measured_over_predicted": found["median"] * whole / halves,
        }
    return result


# a trace on a box


def trace(lines: bool) -> dict[str, Any]:
    """How many gathers start before the product before them ends, and how many scatters of gradients run behind products."""
    batch = tokens(0, rows=8, length=12)
    plan = shard_plan(small(), flatten(small(), batch), TensorCut.of("box", TensorRequest(box=(4, 1, 1))))
    wires, products = DelayedWires(plan.settled.grid, 0, alpha_s=0.002, beta_s=0.0), list[tuple[float, float]]()

    def spend(count: int) -> None:
        start = time.monotonic()
        time.sleep(0.005)
        products.append((start, time.monotonic()))

    Emulated(plan, wires, spend).step(batch)
    behind = [(i, any(i.start_s < end and start < i.end_s for start, end in products)) for i in wires.intervals]
    if lines:
        zero = min(products[0][0], wires.intervals[0].start_s)
        spans = [(start, end, "product") for start, end in products]
        spans += [
            (i.start_s, i.end_s, f"  {i.transfer.phase} {i.transfer.kind} over {','.join(i.transfer.axes)}") for i, _ in behind
        ]
        for start, end, what in sorted(spans):
            print(f"{(start - zero) * 1e3:8.1f} to {(end - zero) * 1e3:8.1f} ms  {what}")
    found: dict[str, Any] = {}
    for name, kind in (("gathers", CollectiveKind.GATHER), ("scatters", CollectiveKind.SCATTER)):
        own = [early for i, early in behind if i.transfer.kind is kind]
        found[name], found[f"{name}_behind_products"] = len(own), sum(own)
    return found


def missed(result: dict[str, Any]) -> list[str]:
    """The bars that were missed."""
    found = []
    if result.get("step_over_dtensor", 0) > STEP_AT_MOST:
        found.append(f"step_over_dtensor {result['step_over_dtensor']:.3f} > {STEP_AT_MOST}")
    for name in (name for name in result if name.startswith("overlap_")):
        if (share := result[name]["measured_over_predicted"]) > OVERLAP_AT_MOST:
            found.append(f"{name}: measured {share:.3f} of predicted > {OVERLAP_AT_MOST}")
    for name in (name for name in ("gathers", "scatters") if name in result):
        if 2 * result[f"{name}_behind_products"] < result[name]:
            found.append(f"only {result[f'{name}_behind_products']} of {result[name]} {name} run behind products")
    return found


def main() -> None:
    """Measure, print, and fail where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", choices=["step", "overlap", "trace"])
    options = parser.parse_args()
    result: dict[str, Any] = {}
    if options.only in (None, "step"):
        result |= step_ratio(options.repeats)
    if options.only in (None, "overlap"):
        result |= overlap_ratios(max(3, options.repeats // 3))
    if options.only in (None, "trace"):
        result |= trace(lines=options.only == "trace" and not options.json)
    print(json.dumps(result, indent=None if options.json else 2))
    if bars := missed(result):
        print("missed: " + ", ".join(bars), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
