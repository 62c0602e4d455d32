"""The layers of a model as a JSON file, without weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.model import Crossing, Layer, ModelGraph, Weight
from meshwright.ir.reader import Reader, count, number, parsed, rows, text

SCHEMA = 1


def model_to_json(graph: ModelGraph) -> str:
    """Write the layers of a model. The weights are not in it.

    Args:
        graph: The layers.

    Returns:
        JSON text, from which `model_from_json` makes an equal graph.

    Examples:
        >>> import meshwright as mw
        >>> graph = mw.ModelGraph("Model", (), ())
        >>> mw.model_from_json(mw.model_to_json(graph)) == graph
        True
    """
    layers = [asdict(layer) for layer in graph.layers]
    weights = [asdict(weight) for weight in graph.weights]
    return json.dumps({"schema": SCHEMA, "kind": "model", "name": graph.name, "layers": layers, "weights": weights}, indent=1)


def model_from_json(given: str) -> ModelGraph:
    """Read the layers of a model, as `meshwright inspect --output` writes them.

    Args:
        given: The JSON text.

    Returns:
        The layers.

    Raises:
        MeshwrightError: The text is not a model file.

    Examples:
        ```python
        graph = meshwright.model_from_json(Path("layers.json").read_text())
        print(graph.cuts(4).starts)
        ```
    """
    keys = frozenset({"schema", "kind", "name", "layers", "weights"})
    read = Reader(parsed(given, "a model file"), "a model file", kind="model", schema=SCHEMA, keys=keys)
    layers = tuple(_layer(index, row) for index, row in enumerate(read("layers", rows)))
    weights = tuple(_weight(index, row) for index, row in enumerate(read("weights", rows)))
    known = {weight.name for weight in weights}
    for layer in layers:
        if lost := [name for name in layer.parameters if name not in known]:
            raise MeshwrightError(f"a model file: layer {layer.name!r} has the parameter {lost[0]!r}, which is not in 'weights'")
    return ModelGraph(read("name", text), layers, weights)


def _layer(index: int, row: Any) -> Layer:
    names = frozenset({"name", "flops", "parameters", "parameter_bytes", "output", "saved_bytes", "columns", "modules"})
    what = f"layer {index} of a model file"
    read = Reader(row, what, kind=None, schema=SCHEMA, keys=names)
    return Layer(
        name=read("name", text),
        flops=read("flops", number),
        parameters=read("parameters", _texts),
        parameter_bytes=read("parameter_bytes", _bytes),
        output=tuple(_crossing(what, item) for item in read("output", rows)),
        saved_bytes=read("saved_bytes", _bytes),
        columns=read("columns", _texts, ()),
        modules=read("modules", _texts, ()),
    )


def _crossing(what: str, row: Any) -> Crossing:
    read = Reader(row, f"an output of {what}", kind=None, schema=SCHEMA, keys=frozenset({"name", "shape", "bytes", "since"}))
    return Crossing(read("name", text), read("shape", _shape), read("bytes", _bytes), read("since", count))


def _weight(index: int, row: Any) -> Weight:
    read = Reader(row, f"weight {index} of a model file", kind=None, schema=SCHEMA, keys=frozenset({"name", "shape", "bytes"}))
    return Weight(read("name", text), read("shape", _shape), read("bytes", _bytes))


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(text(item) for item in rows(value))


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(count(item) for item in rows(value))


def _bytes(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise MeshwrightError(f"{value!r} is not a number of bytes")
    return value
