"""A comparison of all tensor modes and boxes for a captured model: words, steps and memory of its local programs.

Norms, loss and embeddings are included. A mode that the model cannot run under gets a row with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from torch import nn

from meshwright.capture.shard.rank_memory import rank_memory
from meshwright.capture.shard.settle import Settled
from meshwright.capture.shard.sharded import TensorCut, shard_plan
from meshwright.capture.split import choose_cuts
from meshwright.capture.trace.graph import Flat
from meshwright.costs.declared import Phase
from meshwright.costs.modes import mode
from meshwright.costs.scheme import Grid, Save
from meshwright.costs.tensor_rows import TensorRow, in_order, requests
from meshwright.errors import MeshwrightError


def captured_rows(
    model: nn.Module, flat: Flat, *, ranks: int, save: Save, shapes: Mapping[str, tuple[int, ...]]
) -> list[TensorRow]:
    """Returns one row per mode and box: those with the fewest words first, those that cannot run last.

    Args:
        model: The model, on any device and on meta.
        flat: Its captured graph.
        ranks: The number of ranks of a worker.
        save: The tensors that products keep for the backward pass.
        shapes: The shapes of the columns of a microbatch.
    """
    places, found = choose_cuts(model, flat, 1).places, []
    for name, asked in requests(ranks):
        grid = mode(name).grid(asked)
        try:
            settled = shard_plan(model, flat, TensorCut.of(name, asked, save=save), shapes, places=places).settled
        except MeshwrightError as error:
            found.append(TensorRow(grid.mode, _sides(grid), feasible=False, reason=error.what))
        else:
            found.append(_row(settled, model))
    return in_order(found)


def _row(settled: Settled, model: nn.Module) -> TensorRow:
    transfers, memory = [*settled.transfers(), *settled.sums()], rank_memory(settled, model)
    forward, backward, sync = (sum((t.words for t in transfers if t.phase is phase), Fraction(0)) for phase in Phase)
    steps = sum(t.steps for t in transfers if t.phase is not Phase.SYNC)
    held = Fraction(memory.weight_words), Fraction(memory.saved_words)
    return TensorRow(settled.grid.mode, _sides(settled.grid), forward, backward, sync, steps, *held)


def _sides(grid: Grid) -> tuple[int, ...]:
    return tuple(size for _, size in grid.sizes)
