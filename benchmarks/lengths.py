"""What a step costs when its length has been seen before: batches of 200 lengths, as a padding collator makes them.

A small captured GPT on two ranks. Every cycle goes through all lengths in another order, two steps each:

    new     the first step of a length: shapes are agreed, the walk is compiled
    back    a step whose length comes back, after all the other lengths
    same    the step after it, of the same length

    python -m benchmarks.lengths --json

`back` should cost what `same` does: a walk that was compiled once is not compiled again. Both are paired by length, and the
median of the ratios is reported with a bootstrap interval. CPU time is that of both ranks, so foreign load hardly touches it.
`compiled` is how many messages of both ranks were compiled in a step of each kind, on average.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.executor import ratio, sgd
from meshwright.ir.plan.plan import Parallel
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.program import Instruction
from meshwright.train.setup.build_schedule import lists_for
from tests.support.layers_of_models import layers_for

LENGTHS = range(2, 202)
WIDTH, BLOCKS, VOCABULARY, MICROBATCHES = 8, 2, 16, 8
AT_MOST = 1.05
"""The bar of `back` over `same`: the lower end of its interval."""


class Block(nn.Module):
    """Causal attention and a small MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inward, self.outward = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Both with their residuals."""
        query, key, value = self.inward(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
        x = x + self.outward(functional.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1))
        found: Tensor = x + self.mlp(x)
        return found


class Gpt(nn.Module):
    """A language model with its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean over all tokens."""
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(length: int) -> dict[str, Tensor]:
    """One row per microbatch."""
    ids = torch.randint(VOCABULARY, (MICROBATCHES, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "labels": ids}


KINDS = ("new", "second"), ("back", "same")


def steps(transport: str, cycles: int) -> dict[str, list[tuple[float, int]]]:
    """CPU seconds of this rank and messages that it compiled, for every step of a kind."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parallel = Parallel(pp=2, microbatches=MICROBATCHES, transport=transport)
    layers = layers_for(Gpt(), batch(LENGTHS[len(LENGTHS) // 2]), parallel.pp)
    settings = Settings(optimizer=sgd, microbatches=MICROBATCHES, transport=transport)
    engine = Engine(lists_for(parallel, ties=layers.ties), layers, settings)
    count, shape = 0, engine.actions.shape

    def counted(instruction: Instruction) -> object:
        nonlocal count
        count += 1
        return shape(instruction)

    engine.actions.shape = counted
    found: dict[str, list[tuple[float, int]]] = {kind: [] for kinds in KINDS for kind in kinds}
    for cycle in range(cycles):
        for length in random.Random(cycle).sample(LENGTHS, len(LENGTHS)):
            given = batch(length)
            for kind in KINDS[cycle > 0]:
                count, start = 0, time.process_time()
                engine.run(lambda _, given=given: given)  # type: ignore[misc]
                found[kind].append((time.process_time() - start, count))
    engine.close()
    return found


def measured(transport: str, cycles: int) -> dict[str, Any]:
    """CPU milliseconds of a step, and what a length that comes back costs over one that stays."""
    with Workers(2) as pool:
        ranks = pool.run(steps, transport, cycles)
    cpu_s = {kind: [a + b for (a, _), (b, _) in zip(*(rank[kind] for rank in ranks), strict=True)] for kind in ranks[0]}
    compiled = {kind: statistics.fmean(count for rank in ranks for _, count in rank[kind]) * len(ranks) for kind in ranks[0]}
    over = ratio(cpu_s["back"], cpu_s["same"])
    times_ms = {kind: statistics.median(found) * 1e3 for kind, found in cpu_s.items()}
    return {"cpu_ms": times_ms, "compiled": compiled, "back_over_same": over["median"], "interval": [over["low"], over["high"]]}


def main() -> None:
    """Measure, print, and fail where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cycles", type=int, default=4)
    options = parser.parse_args()
    result = {transport: measured(transport, options.cycles) for transport in ("shared", "torch")}
    print(json.dumps(result, indent=None if options.json else 2))
    if missed := [name for name, found in result.items() if found["interval"][0] > AT_MOST or found["compiled"]["back"]]:
        print(f"missed: a length that comes back is compiled again, or costs more than {AT_MOST}: {missed}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
