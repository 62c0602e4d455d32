"""`flatten_for_costs`: the graph of a model, captured from a few blocks if all others are proved to be equal to them.

A capture takes a quarter of a second for each block of a transformer, a run without values a hundredth. So the whole model runs
once without values, the model with shortened lists runs once and is captured, and its graph is repeated:

    log of the whole model == log of the shortened model, repeated      else the model is captured whole
    graph of the whole model = graph of the shortened model, repeated

It is used where only costs are asked for: `inspect`, `profile`, `plan`. A run always captures its model whole.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from meshwright.capture.repeat.block_lists import LEAST, BlockRun, block_runs, shortened
from meshwright.capture.repeat.block_spread import NotEqualError
from meshwright.capture.repeat.operation_log import operation_log
from meshwright.capture.repeat.repeat_graph import repeated_graph
from meshwright.capture.trace.batch_columns import columns_of
from meshwright.capture.trace.export import flatten, two_rows
from meshwright.capture.trace.graph import Flat

_LOG = logging.getLogger(__name__)


def flatten_for_costs(model: nn.Module, example: Any, *, least: int = LEAST) -> Flat:
    """Capture a model for batches like this one. Lists of at least so many equal blocks are captured from a few of them."""
    runs = block_runs(model, least)
    if runs:
        try:
            return _repeated(model, example, runs)
        except Exception as error:  # a model may raise anything if its lists are shortened; the whole capture decides
            _LOG.info("blocks are captured one by one: %s: %s", type(error).__name__, error)
    return flatten(model, example)


def _repeated(model: nn.Module, example: Any, runs: list[BlockRun]) -> Flat:
    columns = columns_of(model, example)
    given = {name: two_rows(t) for name, t in columns.given(example).items()}
    kept = [path for run in runs for path in run.kept]
    whole = operation_log(model, columns, given, kept)
    with shortened(model, runs):
        log = operation_log(model, columns, given, kept)
        for run in runs:
            log = log.repeated(run)
        if log != whole:
            raise NotEqualError(_difference(log.operations, whole.operations))
        flat = flatten(model, example)
    for run in runs:
        flat = repeated_graph(flat, run)
    return flat


def _difference(found: list[Any], wanted: list[Any]) -> str:
    pairs = zip(found, wanted, strict=False)
    at = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(found), len(wanted)))
    return f"operation {at} of {len(wanted)} differs from that of an equal block"
