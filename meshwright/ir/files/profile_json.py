"""A profile as a JSON file. Layers that repeat are written once:

    {"name": "embedding", ...}
    {"repeat": 12, "first": 0, "layers": [{"name": "h.{}.attention", ...}, {"name": "h.{}.mlp", ...}]}
    {"name": "head", ...}

`{}` in a name of a repeated layer is the number of the repetition, from `first` on. Such a group is short to write by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.profile import LayerCost, MatrixProduct, Profile, ProfileSource
from meshwright.ir.reader import Reader, count, flag, number, parsed, positive, rows, text

SCHEMA = 1
WHAT = "a profile file"
LAYERS = 100_000
"""The most layers of a profile."""
LONGEST = 16
"""The most layers of a group that repeats."""
_TIMES = ("forward_s", "input_s", "weight_s")
_SIZES = (
    "output_bytes",
    "saved_bytes",
    "parameter_bytes",
    "transient_bytes",
    "flops",
    "fixed_bytes",
    "fixed_transient_bytes",
)
_PRODUCT = frozenset({"into", "outs", "tokens", "contracts"})
_LAYER = frozenset({"name", "ties", "products", *_TIMES, *_SIZES})
_PROFILE = frozenset({"schema", "kind", *(field.name for field in fields(Profile))})
_NUMBER = re.compile(r"\d+")


def profile_to_json(profile: Profile) -> str:
    """Write a profile as a file for `--profile`.

    Args:
        profile: The profile.

    Returns:
        JSON text, from which `profile_from_json` makes an equal profile. Layers that repeat are written once.

    Examples:
        >>> from meshwright import LayerCost, Profile, profile_from_json, profile_to_json
        >>> profile = Profile(tuple(LayerCost(f"block {k}", (1.0,), (1.0,), (1.0,)) for k in range(96)))
        >>> profile_from_json(profile_to_json(profile)) == profile, len(profile_to_json(profile)) < 1000
        (True, True)
    """
    own = {field.name: getattr(profile, field.name) for field in fields(Profile) if field.name != "layers"}
    layers, found, at = profile.layers, list[dict[str, Any]](), 0
    while at < len(layers):
        period, times, first = _repeated(layers, at)
        group = [_row(layer) for layer in layers[at : at + period]]
        if times > 1:
            group = [{**row, "name": _pattern(row["name"], first)} for row in group]
            found.append({"repeat": times, "first": first, "layers": group})
        else:
            found += group
        at += period * times
    data = {"schema": SCHEMA, "kind": "profile", **own, "source": profile.source.value, "layers": found}
    return json.dumps(data, indent=1)


def profile_from_json(given: str) -> Profile:
    """Read a profile, as `meshwright profile --output` writes it.

    Args:
        given: The JSON text.

    Returns:
        The profile.

    Raises:
        MeshwrightError: The text is not a profile file, or a number in it is not possible.

    Examples:
        >>> from meshwright import profile_from_json
        >>> layer = '{"name": "block {}", "forward_s": [1], "input_s": [1], "weight_s": [1]}'
        >>> text = '{"schema": 1, "kind": "profile", "layers": [{"repeat": 3, "layers": [' + layer + ']}]}'
        >>> [layer.name for layer in profile_from_json(text).layers]
        ['block 0', 'block 1', 'block 2']
    """
    read = Reader(parsed(given, WHAT), WHAT, kind="profile", schema=SCHEMA, keys=_PROFILE)
    found: list[LayerCost] = []
    for index, row in enumerate(read("layers", rows)):
        found += _group(f"group {index} of {WHAT}", row) if _is_group(row) else [_layer(f"layer {index} of {WHAT}", row)]
        if len(found) > LAYERS:
            raise MeshwrightError(f"{WHAT} has more than {LAYERS} layers", fix="fewer repetitions")
    return Profile(
        tuple(found),
        rows=read("rows", lambda value: tuple(positive(item) for item in rows(value)), ()),
        device=read("device", text, ""),
        precision=read("precision", text, "float32"),
        source=read("source", lambda value: ProfileSource(text(value)), ProfileSource.PUBLISHED),
        parameter_itemsize=read("parameter_itemsize", _itemsize, 4.0),
        optimizer_bytes_per_parameter=read("optimizer_bytes_per_parameter", number, 8.0),
        tokens_per_row=read("tokens_per_row", positive, 1),
        error=read("error", number, 0.0),
    )


def _row(layer: LayerCost) -> dict[str, Any]:
    """Returns a layer as an object. What is zero or empty is left out."""
    return {key: value for key, value in asdict(layer).items() if key in ("name", *_TIMES) or value}


def _repeated(layers: Sequence[LayerCost], at: int) -> tuple[int, int, int]:
    """Returns the length of the group that begins here, how often it repeats, and the first number in its names."""
    best = (1, 1, 0)
    for period in range(1, min(LONGEST, (len(layers) - at) // 2) + 1):
        numbers = _NUMBER.search(layers[at].name)
        first = int(numbers[0]) if numbers is not None and len(numbers[0]) < 9 else 0
        group = [(replace(layer, name=""), _pattern(layer.name, first)) for layer in layers[at : at + period]]
        if any("{}" in layer.name for layer in layers[at : at + period]):
            continue
        times = 1
        while _is_next(layers, at + times * period, group, first + times):
            times += 1
        if times > 1 and period * times > best[0] * best[1]:
            best = (period, times, first)
    return best


def _is_next(layers: Sequence[LayerCost], at: int, group: Sequence[tuple[LayerCost, str]], turn: int) -> bool:
    found = layers[at : at + len(group)]
    return len(found) == len(group) and all(
        layer == replace(cost, name=name.replace("{}", str(turn))) for layer, (cost, name) in zip(found, group, strict=True)
    )


def _pattern(name: str, turn: int) -> str:
    """Replaces the first number of a name if it is that of the repetition."""
    found = _NUMBER.search(name)
    return name if found is None or found[0] != str(turn) else f"{name[: found.start()]}{{}}{name[found.end() :]}"


def _is_group(row: Any) -> bool:
    return isinstance(row, dict) and ("repeat" in row or "layers" in row)


def _group(what: str, row: Any) -> list[LayerCost]:
    read = Reader(row, what, kind=None, schema=SCHEMA, keys=frozenset({"repeat", "first", "layers"}))
    layers = [_layer(f"layer {index} of {what}", each) for index, each in enumerate(read("layers", rows))]
    times, first = read("repeat", positive), read("first", count, 0)
    if times * len(layers) > LAYERS:
        raise MeshwrightError(f"{what} has {times} times {len(layers)} layers, the limit is {LAYERS}", fix="fewer repetitions")
    return [replace(layer, name=layer.name.replace("{}", str(first + turn))) for turn in range(times) for layer in layers]


def _layer(what: str, row: Any) -> LayerCost:
    read = Reader(row, what, kind=None, schema=SCHEMA, keys=_LAYER)
    times = {name: read(name, lambda value: tuple(number(item) for item in rows(value))) for name in _TIMES}
    sizes = {name: read(name, number, 0.0) for name in _SIZES}
    ties = read("ties", lambda value: tuple(text(item) for item in rows(value)), ())
    products = read("products", lambda value: tuple(_product(what, item) for item in rows(value)), ())
    return LayerCost(read("name", text), **times, **sizes, ties=ties, products=products)


def _product(what: str, row: Any) -> MatrixProduct:
    read = Reader(row, f"a product of {what}", kind=None, schema=SCHEMA, keys=_PRODUCT)
    outs = read("outs", lambda value: tuple(positive(item) for item in rows(value)))
    return MatrixProduct(read("into", positive), outs, read("tokens", positive, 1), read("contracts", flag, False))


def _itemsize(value: Any) -> float:
    if number(value) <= 0:
        raise MeshwrightError("an element of a parameter has more than 0 bytes", fix='"parameter_itemsize": 4')
    return float(value)
