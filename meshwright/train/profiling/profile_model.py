"""`profile_model`: what each layer of a model costs, measured on this machine or estimated for another device.

The layers are those that `Parallel.stages` numbers. Bytes come from a walk without values; times from layers that run alone, or
from a roofline. The model is never in memory as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture.cut.cut_points import LayerChain
from meshwright.capture.cut.dry_walk import DryLayer, WalkOptions, dry_walk
from meshwright.capture.cut.liveness import Line
from meshwright.capture.cut.op_work import layer_products, layer_work
from meshwright.capture.model_graph import graph_of, line_of
from meshwright.capture.repeat.capture_for_costs import flatten_for_costs
from meshwright.capture.trace.batch_columns import columns_of
from meshwright.capture.trace.graph import Flat
from meshwright.costs.roofline import ESTIMATE_ERROR, HalfTimes, estimated_times
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.model import Layer, ModelGraph
from meshwright.ir.profile import LayerCost, MatrixProduct, Profile, ProfileSource, optimizer_states
from meshwright.runtime.stage.precision import Precision
from meshwright.train.profiling.profile_request import ProfileRequest, device_name, this_device
from meshwright.train.profiling.profile_rows import ROWS
from meshwright.train.profiling.timed_layers import LayerTimer, TimedLayer

_log = logging.getLogger(__name__)


def profile_model(
    model: nn.Module,
    example_batch: Any,
    *,
    rows: Sequence[int] = ROWS,
    cluster: Cluster | None = None,
    precision: str = "fp32",
    optimizer: str = "adamw",
    estimate: bool | None = None,
    repeats: int = 5,
) -> Profile:
    """Profile the layers of a model, as the input of a planner.

    Args:
        model: A module on any device. On `meta` it needs no memory: layers get weights one at a time.
        example_batch: A batch of the length to profile: a mapping of columns, or a tuple of tensors.
        rows: The numbers of rows of a microbatch to time.
        cluster: Where it will run. Its first device is estimated if it is not the one of this machine.
        precision: `fp32`, `bf16` or `fp16`.
        optimizer: `adamw`, `adam`, `sgd` or `sgd-momentum`: what it keeps for each parameter.
        estimate: True estimates times, False measures them. None measures if the device of the cluster is this one.
        repeats: How often a layer is timed. The shortest times count.

    Returns:
        The profile. Its layers are those that `Parallel.stages` numbers.

    Raises:
        MeshwrightError: The model cannot be captured, it cannot run with one of these numbers of rows, or the cluster does not
            tell what is needed for an estimate.

    Examples:
        ```python
        skeleton = meshwright.sketch(build)
        profile = meshwright.profile_model(skeleton.model, batch, rows=(1, 2, 4))
        Path("profile.json").write_text(meshwright.profile_to_json(profile))
        ```
    """
    wanted = ProfileRequest(tuple(rows), Precision.of(precision), optimizer_states(optimizer), cluster, estimate, repeats)
    flat = flatten_for_costs(model, example_batch)
    line = line_of(model, flat)
    places = LayerChain(line).starts
    graph = graph_of(model, line, places)
    given = columns_of(model, example_batch).given(example_batch)
    _refuse_rows(flat, given, wanted.rows)
    walks = _walks(line, places, model, wanted)
    timed: _Times = (
        _estimated(line, places, wanted) if wanted.is_estimate else _measured(line, places, model, given, walks, wanted)
    )
    products = [layer_products(line, first, last, rows=_row_count(flat)) for first, last in pairwise(places)]
    layers = [_layer(graph, k, walks, timed.times[k], products[k], _row_count(flat)) for k in range(len(graph.layers))]
    parameters = sum(torch.Size(weight.shape).numel() for weight in graph.weights)
    itemsize = sum(weight.bytes for weight in graph.weights) / parameters if parameters else 4.0
    return Profile(
        tuple(layers),
        rows=timed.rows,
        device=timed.device,
        precision=precision,
        source=ProfileSource.ESTIMATED if wanted.is_estimate else ProfileSource.MEASURED,
        parameter_itemsize=itemsize,
        optimizer_bytes_per_parameter=wanted.states * itemsize,
        tokens_per_row=_tokens(given),
        error=timed.error,
    )


@dataclass(frozen=True)
class _Times:
    """The times of every layer at every number of rows, and how far they may be off."""

    times: list[list[HalfTimes]]
    rows: tuple[int, ...]
    device: str
    error: float


def _rows_of(columns: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Returns the given number of rows of an example, repeated if it has fewer."""
    found = {name: torch.zeros_like(t, device="cpu") if t.is_meta else t for name, t in columns.items()}
    return {name: torch.cat([t] * -(-count // len(t)))[:count] for name, t in found.items()}


def _refuse_rows(flat: Flat, columns: Mapping[str, Tensor], rows: Sequence[int]) -> None:
    for count in rows:
        if (why := flat.refusal({name: (count, *t.shape[1:]) for name, t in columns.items()})) is not None:
            raise MeshwrightError(f"the layers of this model are others for {count} rows: {why}", fix="--rows 2,4")


def _row_count(flat: Flat) -> int:
    return next(n.size.shape[0] for n in flat.nodes if n.target == flat.columns[0] and n.size is not None)


def _tokens(columns: Mapping[str, Tensor]) -> int:
    """Returns the length of a column of tokens; 1 if there is none."""
    return next((t.shape[1] for t in columns.values() if t.dim() == 2 and not t.is_floating_point()), 1)


def _walks(line: Line, places: Sequence[int], model: nn.Module, wanted: ProfileRequest) -> dict[int, list[DryLayer]]:
    """Returns what layers keep and pass on for each number of rows to time; for two numbers at least, as a line needs two points.

    Bytes grow with rows along a line, so an estimate needs no more than two.
    """
    counts = wanted.rows if len(wanted.rows) > 1 else (wanted.rows[0], 2 * wanted.rows[0])
    counts = (counts[0], counts[-1]) if wanted.is_estimate else counts
    try:
        return {
            count: dry_walk(
                line,
                places,
                model,
                WalkOptions(
                    rows=count, mixed=wanted.precision.dtype, gpu=wanted.on_gpu, transients=count in (counts[0], counts[-1])
                ),
            )
            for count in counts
        }
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise MeshwrightError(
            "a layer needs values and cannot be profiled without them, as layers whose values decide which experts run: "
            f"{type(error).__name__}: {str(error)[:300]}",
            fix="choose degrees by hand and run a few steps: meshwright measure MODEL --dataset stdlib --pp 2",
        ) from error


def _measured(
    line: Line,
    places: tuple[int, ...],
    model: nn.Module,
    columns: Mapping[str, Tensor],
    walks: Mapping[int, list[DryLayer]],
    wanted: ProfileRequest,
) -> _Times:
    """Times all layers with few rows before more rows. Numbers of rows for which the memory is too small are left out."""
    device = this_device()
    timer = LayerTimer(line, places, model, device, wanted.precision, wanted.repeats)
    found: dict[int, list[TimedLayer]] = {}
    for count in wanted.rows:
        try:
            found[count] = _timed(timer, walks[count], _rows_of(columns, count))
        except torch.OutOfMemoryError as error:
            if not found:
                raise MeshwrightError(
                    f"a layer with {count} rows does not fit into the memory of {device_name(device)}",
                    fix=f"--rows {max(1, count // 2)}, or a smaller --length",
                ) from error
            _log.warning("a layer with %d rows does not fit into memory: the profile ends at %d rows", count, max(found))
            break
    all_layers = [layer for layers in found.values() for layer in layers]
    whole_s = sum(one.best.forward_s + one.best.input_s + one.best.weight_s for one in all_layers)
    spread = sum(one.spread_s for one in all_layers) / whole_s if whole_s else 0.0
    times = [[layers[k].best for layers in found.values()] for k in range(len(places) - 1)]
    return _Times(times, tuple(found), device_name(device), spread)


def _timed(timer: LayerTimer, walk: list[DryLayer], columns: Mapping[str, Tensor]) -> list[TimedLayer]:
    """Times the layers of a model for one number of rows, equal ones once."""
    known: dict[tuple[str, Any], TimedLayer] = {}
    for k, dry in enumerate(walk):
        key = (dry.kind, dry.inputs)
        if key not in known:
            known[key] = timer.timed(k, dry, columns)
    return [known[dry.kind, dry.inputs] for dry in walk]


def _estimated(line: Line, places: tuple[int, ...], wanted: ProfileRequest) -> _Times:
    device, precision = wanted.target, wanted.precision
    rows = _row_count(line.flat)
    times = []
    for first, last in pairwise(places):
        work = layer_work(line, first, last, rows=rows, mixed=precision.mixed)
        times.append([estimated_times(work, rows=n, device=device, precision=precision.compute) for n in wanted.rows])
    return _Times(times, wanted.rows, device.kind, ESTIMATE_ERROR)


def _layer(
    graph: ModelGraph,
    k: int,
    walks: Mapping[int, list[DryLayer]],
    times: list[HalfTimes],
    products: tuple[MatrixProduct, ...],
    rows: int,
) -> LayerCost:
    layer: Layer = graph.layers[k]
    low, high = min(walks), max(walks)
    a, b = walks[low][k], walks[high][k]
    saved, transient = (max(0.0, (y - x) / (high - low)) for x, y in ((a.saved, b.saved), (a.transient, b.transient)))
    is_last = k == len(graph.layers) - 1
    return LayerCost(
        layer.name,
        tuple(t.forward_s for t in times),
        tuple(t.input_s for t in times),
        tuple(t.weight_s for t in times),
        output_bytes=0.0 if is_last else sum(size.bytes for size in b.outputs) / high,
        saved_bytes=saved,
        fixed_bytes=max(0.0, a.saved - saved * low),
        parameter_bytes=float(layer.parameter_bytes),
        transient_bytes=transient,
        fixed_transient_bytes=max(0.0, a.transient - transient * low),
        flops=layer.flops / rows,
        ties=tuple(tie.name for tie in graph.ties if k in tie.layers),
        products=products,
    )
