"""Overlap on delayed wires: one rank alone, collectives that take time, products that are timed waits."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.capture.cut.cut_points import LayerChain
from meshwright.capture.cut.stage_modules import States
from meshwright.capture.shard.emit import shard_layers
from meshwright.capture.shard.sharded import open_plan
from meshwright.capture.shard.woven_layer import WovenLayer
from meshwright.costs.declared import CollectiveKind, Phase, SentWords
from meshwright.costs.scheme import Save
from meshwright.tensor.weave.pieces import PieceGraph, cut
from meshwright.tensor.weave.weave import Weave
from meshwright.tensor.wires.lone_wires import DelayedWires, DryWires
from meshwright.tensor.wires.wires import StartedCollective, TotalKind
from tests.support.overlap_time import turns_of, weave_time
from tests.support.piece_times import backward_times, forward_times, multiply_adds
from tests.support.sharded import Reference, Request, box, cut_parameters, family, line, plan_of, settled

Part = tuple[PieceGraph, dict[str, Any]]


def graphs(ref: Reference, asked: Request, rows: tuple[int, ...], wires: Any, save: Save) -> list[Part]:
    """For each half its pieces and what they take."""
    found: list[Part] = []
    model, start = copy.deepcopy(ref.model), 0
    for count in rows:
        batch = {name: t[start : start + count] for name, t in ref.batch.items()}
        start += count
        half = settled(ref, asked, save=save, batch=batch)
        if not found:
            cut_parameters(dict(model.named_parameters()), half.cuts, half.grid, wires.rank)
        [layer] = shard_layers(half, States(model), wires)
        free = layer.prelude(batch) if layer.prelude is not None else {}
        direct = iter(layer.direct)
        names = [node.name for node in layer.body.graph.nodes if node.op == "placeholder"]
        found.append((cut(layer.body, wires), {n: free[n] if n in free else batch[next(direct)] for n in names}))
    return found


def timed(parts: list[Part], turns: list[int], rate_s: float, keep: bool) -> float:
    """Seconds of a forward pass with products as waits."""
    for pieces, _ in parts:
        pieces.slot.spend = lambda count: time.sleep(count * rate_s)
    weave = Weave([pieces for pieces, _ in parts], keep=keep, turns=turns)
    begin = time.monotonic()
    with torch.no_grad():
        weave.forward([given for _, given in parts])
    return time.monotonic() - begin


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
@pytest.mark.bench
def test_two_halves_gain_what_the_price_says(ratio: float) -> None:
    """Forward on a line of 2: the time with halves over the time without is at most 1.1 times the predicted ratio."""
    ref, asked = family("llama", layers=2), line(2)
    grid = settled(ref, asked).grid
    dry = [graphs(ref, asked, rows, DryWires(grid, 0), Save.GATHERED) for rows in ((8,), (4, 4))]
    counts = [[multiply_adds(*part) for part in parts] for parts in dry]
    rate_s = 0.8 / sum(counts[0][0])
    words = sum(float(t.words) for t in settled(ref, asked).transfers() if t.phase is Phase.FORWARD)
    beta_s = ratio * 0.8 / words
    predicted, measured = [], []
    for parts, count, rows in zip(dry, counts, ((8,), (4, 4)), strict=True):
        pairs = zip(parts, count, strict=True)
        seconds = [forward_times(p, c, rate_s=rate_s, collective=lambda w: beta_s * w) for (p, _), c in pairs]
        turns = turns_of(seconds)
        predicted.append(weave_time(seconds, turns))
        wires = DelayedWires(grid, 0, alpha_s=0.0, beta_s=beta_s, shared_channel=True)
        measured.append(timed(graphs(ref, asked, rows, wires, Save.GATHERED), turns, rate_s, keep=True))
    assert predicted[1] < 0.95 * predicted[0], "halves must gain here"
    assert measured[1] / measured[0] <= 1.1 * predicted[1] / predicted[0], (measured, predicted)


def test_weights_are_gathered_ahead_and_their_gradients_scattered_behind() -> None:
    """A trace of a box: the next gather of a weight starts before the product before it ends, a scatter ends after a later
    product has begun."""
    ref, asked = family("llama", layers=2), box(4, 1, 1)
    grid = settled(ref, asked).grid
    wires = DelayedWires(grid, 0, alpha_s=0.004, beta_s=0.0)
    [(pieces, given)] = graphs(ref, asked, (8,), wires, Save.SHARDS)
    spans: list[tuple[float, float]] = []

    def spend(count: int) -> None:
        begin = time.monotonic()
        time.sleep(0.003)
        spans.append((begin, time.monotonic()))

    pieces.slot.spend = spend
    weave = Weave([pieces], keep=False)
    results = weave.forward([given])[0]
    forward = len(spans)
    gathers = [i for i in wires.intervals if i.transfer.kind is CollectiveKind.GATHER]
    early = [i for i in gathers if any(begin < i.start_s < end or begin < i.end_s < end for begin, end in spans[:forward])]
    assert early, "no gather was under way during a product"
    wires.intervals.clear()
    weave.backward([[torch.ones_like(results[0]), *([None] * (len(results) - 1))]])
    scatters = [i for i in wires.intervals if i.transfer.kind is CollectiveKind.SCATTER]
    behind = [i for i in scatters if any(i.start_s < end and begin < i.end_s for begin, end in spans[forward:])]
    assert len(behind) >= len(scatters) // 2, "scatters of weight gradients run behind products"


class NotingWires(DryWires):
    """Counts the gathers that were started."""

    gathers = 0

    def _carry(self, sent: SentWords, t: Tensor, dim: int, op: TotalKind) -> StartedCollective:
        self.gathers += sent.kind is CollectiveKind.GATHER
        return super()._carry(sent, t, dim, op)


@pytest.mark.parametrize("chained", [True, False], ids=["chain", "layers"])
def test_the_next_weight_is_gathered_ahead_across_layers(chained: bool) -> None:
    """Of (4, 1, 1) only weights are gathered. At every product but the last, a later gather is under way; not layer by layer."""
    ref = family("llama", layers=2)
    plan = plan_of(ref, box(4, 1, 1), places=LayerChain(ref.line).starts)
    model, wires = copy.deepcopy(ref.model), NotingWires(plan.settled.grid, 0)
    cut_parameters(dict(model.named_parameters()), plan.settled.cuts, plan.settled.grid, 0)
    layers = open_plan(model, plan, wires)
    ahead: list[int] = []
    layers[0].parts[0].pieces.slot.spend = lambda _: ahead.append(wires.gathers - len(ahead) - 2)  # the table and its own
    with torch.no_grad():
        if chained:
            WovenLayer.chained(layers)((), ref.batch)
        else:
            values: tuple[Any, ...] = ()
            for layer in layers:
                values = layer(*values, **{name: ref.batch[name] for name in layer.batch_columns})
    assert len(ahead) == 15 and (min(ahead[:-1]) >= 1) is chained, ahead


def test_backward_times_mirror_the_forward_ones() -> None:
    ref, asked = family("llama", layers=2), line(2)
    grid = settled(ref, asked).grid
    [(pieces, given)] = graphs(ref, asked, (8,), DryWires(grid, 0), Save.GATHERED)
    counts = multiply_adds(pieces, given)
    back = backward_times(pieces, counts, rate_s=1.0, collective=float)
    assert [piece.seconds for piece in back.pieces] == [float(count) for count in reversed(counts)]
    words = sum(float(t.words) for t in settled(ref, asked).transfers() if t.phase is Phase.BACKWARD)
    assert sum(send.seconds for send in back.sends) == words
    assert all(send.source < send.reader for send in back.sends)
