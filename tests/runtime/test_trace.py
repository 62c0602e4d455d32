"""Measured timelines: every action, message and sync of a run once, on one clock, beside its prediction."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from itertools import pairwise
from time import process_time

import pytest
import torch
from torch import nn

from meshwright import Cell, Lane, MeshwrightError, Op, Span, Timeline, Transfer, simulate
from meshwright.ir.action import actions
from meshwright.ir.plan.plan import Parallel
from meshwright.report.comparison import versus, versus_text
from meshwright.report.perfetto import both_to_perfetto
from meshwright.runtime.emulate.emulate import emulate
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.tracing.clock_offset import common_clock
from meshwright.runtime.tracing.trace import Trace
from meshwright.train.setup.build_schedule import lists_for
from tests.support.emulation import named
from tests.support.helpers import costs_of


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3)


def engine(parallel: Parallel, trace: Trace | None) -> Engine:
    torch.manual_seed(0)
    schedule = lists_for(parallel)
    layers = Layers.of([nn.Linear(8, 8) for _ in range(schedule.stages)], schedule.stages)
    loss = nn.functional.mse_loss
    settings = Settings(sgd, parallel.microbatches, copies=parallel.dp, loss=loss, transport=parallel.transport)
    return Engine(schedule, layers, settings, trace)


def trained(parallel: Parallel, steps: int) -> Timeline | None:
    one = engine(parallel, Trace())
    batch = torch.ones(8, 8), torch.ones(8, 8)
    for step in range(steps):
        one.run(lambda _: batch, step)
    found = one.timeline()
    one.close()
    return found


def names(spans: tuple[Span, ...]) -> Counter[tuple[int, Lane, str]]:
    return Counter((span.worker, span.lane, str(span.entry)) for span in spans)


@pytest.mark.parametrize("name", ["onef1b", "chimera", "zbv", "dualpipe"])
@pytest.mark.parametrize("transport", ["shared", "torch"])
def test_a_real_run_has_the_spans_that_were_predicted(name: str, transport: str, workers: Workers) -> None:
    parallel = Parallel(pp=4, schedule=name, microbatches=8, transport=transport)
    found, *others = workers.run(trained, parallel, 1, ranks=4)
    assert others == [None] * 3
    schedule = lists_for(parallel)
    predicted = simulate(schedule, costs_of(schedule))
    assert names(found.spans) == names(predicted.spans)
    assert min(span.start_s for span in found.spans) == 0 and all(span.end_s >= span.start_s for span in found.spans)
    again = Timeline.from_json(found.to_json())
    assert again == found
    for worker, spans in enumerate(found.compute):
        order = [entry for entry in schedule.lists[worker] if not isinstance(entry, Transfer) and _computes(entry)]
        assert [span.entry for span in spans] == order
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(spans))


def _computes(entry: object) -> bool:
    ops = {Op.F, Op.B, Op.I, Op.W, Op.R}
    return isinstance(entry, Cell) or any(action.op in ops for action in actions(entry))  # type: ignore[arg-type]


def test_receives_end_before_their_readers_start_and_after_their_sends(workers: Workers) -> None:
    found = workers.run(trained, Parallel(pp=4, schedule="chimera", microbatches=4), 1, ranks=4)[0]
    sent = {(span.entry.value, span.entry.peer): span for span in found.spans if span.lane is Lane.SEND}
    received = [span for span in found.spans if span.lane is Lane.RECEIVE]
    assert len(received) == len(sent) > 0
    for span in received:
        assert span.end_s >= sent[span.entry.value, span.worker].start_s
    for span in found.spans:
        if span.lane is Lane.COLLECTIVE and span.entry.op is Op.S:
            (update,) = [s for s in found.spans if s.worker == span.worker and str(s.entry) == f"{span.entry.stage}U"]
            assert span.start_s <= span.end_s <= update.end_s


def test_steps_follow_each_other_and_copies_are_further_workers(workers: Workers) -> None:
    found = workers.run(trained, Parallel(pp=2, dp=2, microbatches=2), 3, ranks=4)[0]
    assert found.workers == 4
    entries = [str(span.entry) for span in found.compute[3]]
    assert entries == ["1F0", "1B0", "1F1", "1B1", "1F2#1", "1B2#1", "1F3#1", "1B3#1", "1F4#2", "1B4#2", "1F5#2", "1B5#2"]
    peers = {span.worker: span.entry.peer for span in found.spans if isinstance(span.entry, Transfer)}
    assert peers == {0: 1, 1: 0, 2: 3, 3: 2}


def test_an_untraced_run_has_no_timeline(workers: Workers) -> None:
    assert all(workers.run(_untraced, ranks=2))


def _untraced() -> bool:
    one = engine(Parallel(pp=2, microbatches=2), None)
    with pytest.raises(MeshwrightError, match="not traced"):
        one.timeline()
    one.close()
    return True


def test_one_host_has_one_clock(workers: Workers) -> None:
    assert workers.run(_offset, ranks=4) == [0.0] * 4


def _offset() -> float:
    return common_clock().offset_s


def test_prediction_and_measurement_over_each_other(workers: Workers) -> None:
    job, _ = named("chimera", workers=4, microbatches=4, forward=0.002, backward=0.004, sync=0.002, trace=True)
    predicted = simulate(job.schedule, job.costs)
    [measured] = emulate([job], repeat=1, workers=workers)
    assert measured.timeline is not None
    assert names(measured.timeline.spans) == names(predicted.spans)
    found = versus(predicted, measured.timeline)
    assert found.unmatched == 0 and found.ratio >= 0.999
    assert {row.op for row in found.rows} == {"F", "B", "U"} and len(found.largest) == 5
    assert sum(row.spans for row in found.rows if row.op == "F") == 16
    assert found.to_dict()["ratio"] == found.ratio
    text = versus_text(found)
    assert "predicted ms" in text and "relative to its prediction" in text
    events = json.loads(both_to_perfetto(predicted, measured.timeline))["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"predicted", "measured"}
    assert sum(e["ph"] == "X" for e in events) == len(predicted.spans) + len(measured.timeline.spans)


def test_a_timeline_compared_with_itself() -> None:
    job, _ = named("dualpipe", workers=2, microbatches=4)
    predicted = simulate(job.schedule, job.costs)
    found = versus(predicted, predicted)
    assert found.ratio == 1 and found.unmatched == 0
    assert all(row.predicted_s == row.measured_s for row in found.rows) and all(pair.late_s == 0 for pair in found.largest)
    shorter = Timeline(predicted.schedule, predicted.workers, predicted.spans[:-5])
    assert versus(predicted, shorter).unmatched > 0 and "only" in versus_text(versus(predicted, shorter))


def cost_of_tracing(steps: int, repeats: int) -> list[float]:
    """CPU seconds of this rank with tracing over those without, pair by pair, by turns."""
    parallel = Parallel(pp=4, microbatches=8)
    trace = Trace()
    plain, traced = engine(parallel, None), engine(parallel, trace)
    batch = torch.ones(8, 8), torch.ones(8, 8)
    found = []
    for _ in range(repeats):
        spent = []
        for one in (plain, traced):
            trace.clear()
            before = process_time()
            for step in range(steps):
                one.run(lambda _: batch, step)
            spent.append(process_time() - before)
        found.append(spent[1] / spent[0])
    torch.distributed.barrier()
    plain.close()
    traced.close()
    return found


@pytest.mark.bench
def test_tracing_costs_less_than_two_hundredths(workers: Workers) -> None:
    ratios = [ratio for rank in workers.run(cost_of_tracing, 20, 100, ranks=4) for ratio in rank]
    assert statistics.median(ratios) <= 1.02
