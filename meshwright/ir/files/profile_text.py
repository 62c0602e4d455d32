"""Reads the text form in which planners of pipelines publish profiles of models:

    node2 -- conv -- forward_compute_time=3.4, backward_compute_time=6.8, activation_size=384000000, parameter_size=6835
        node1 -- node2

A line per operation with milliseconds and bytes of one microbatch, then a line per edge. Operations are put in an order in which
every edge points forward (the order of the file where it allows that). A cut carries each tensor that an operation after it
reads once, forward and back.
"""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter

from meshwright.errors import MeshwrightError
from meshwright.ir.input_limits import shown
from meshwright.ir.profile import LayerCost, Profile, ProfileSource

FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_EDGE = re.compile(r"\s*(\S+)\s+--\s+(\S+)\s*")
_LIMIT = 100_000
"""The most lines of a profile."""


def profile_from_text(text: str) -> Profile:
    """Read a published profile.

    Args:
        text: Lines of operations and edges.

    Returns:
        The profile. It does not know its rows.

    Raises:
        MeshwrightError: A line is neither an operation nor an edge, a number is not possible, or edges form a cycle.

    Examples:
        >>> from meshwright import profile_from_text
        >>> sizes = "forward_compute_time=1, backward_compute_time=2, activation_size=8, parameter_size=4"
        >>> [layer.name for layer in profile_from_text(f"a -- x -- {sizes}").layers]
        ['x']
    """
    nodes: dict[str, tuple[str, list[float]]] = {}
    edges: list[tuple[str, str]] = []
    lines = text.splitlines()
    if len(lines) > _LIMIT:
        raise MeshwrightError(f"a profile has at most {_LIMIT} lines, got {len(lines)}")
    for number, line in enumerate(lines, start=1):
        parts = [part.strip() for part in line.split(" -- ")]
        if len(parts) >= 3:
            if parts[0] in nodes:
                raise MeshwrightError(f"line {number} of the profile has the operation {shown(parts[0])} a second time")
            nodes[parts[0]] = (" -- ".join(parts[1:-1]), _numbers(parts[-1], number))
        elif (edge := _EDGE.fullmatch(line)) is not None:
            edges.append((edge[1], edge[2]))
        elif line.strip():
            raise MeshwrightError(
                f"line {number} of the profile is neither an operation nor an edge: {shown(line.strip())}",
                fix=f"name -- text -- {', '.join(f'{field}=0' for field in FIELDS)}",
            )
    return _chain(nodes, edges)


def _numbers(text: str, number: int) -> list[float]:
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise MeshwrightError(f"line {number} of the profile: {shown(part.strip())} is not a number") from None
    missing = [field for field in FIELDS if not 0.0 <= found.get(field, -1.0) < 1e300]
    if missing:
        raise MeshwrightError(f"line {number} of the profile needs a number of at least 0 for {', '.join(missing)}")
    return [found[field] for field in FIELDS]


def _chain(nodes: dict[str, tuple[str, list[float]]], edges: list[tuple[str, str]]) -> Profile:
    if len(nodes) > 1 and not edges:
        raise MeshwrightError(
            f"the profile has {len(nodes)} operations and no edges: which of them read what others compute is not known",
            fix="lines such as 'node1 -- node2' after the operations",
        )
    if unknown := [end for edge in edges for end in edge if end not in nodes]:
        raise MeshwrightError(f"an edge of the profile names {shown(unknown[0])}, which is no operation of it")
    before: dict[str, list[str]] = {name: [] for name in nodes}
    for source, target in edges:
        before[target].append(source)
    order = list(nodes)
    place = {name: at for at, name in enumerate(order)}
    if any(place[source] >= place[target] for source, target in edges):
        try:
            order = list(TopologicalSorter(before).static_order())
        except CycleError as error:
            raise MeshwrightError(f"the edges of the profile form a cycle: {' -- '.join(error.args[1])[:200]}") from None
        place = {name: at for at, name in enumerate(order)}
    last_reader = dict.fromkeys(order, -1)
    for source, target in edges:
        last_reader[source] = max(last_reader[source], place[target])
    crossing = _crossing([nodes[name][1][2] for name in order], [last_reader[name] for name in order])
    layers = []
    for name, bytes_ in zip(order, crossing, strict=True):
        label, (forward, backward, _, parameters) = nodes[name]
        half = (backward / 2e3,)
        layers.append(LayerCost(label, (forward / 1e3,), half, half, output_bytes=bytes_, parameter_bytes=parameters))
    return Profile(tuple(layers), source=ProfileSource.PUBLISHED)


def _crossing(sizes: list[float], last_reader: list[int]) -> list[float]:
    """For each position, the bytes of the tensors that are made at or before it and read after it, each once."""
    ends: list[float] = [0.0] * (len(sizes) + 1)
    found: list[float] = []
    for at, (size, last) in enumerate(zip(sizes, last_reader, strict=True)):
        if last > at:
            ends[last] += size
    live = 0.0
    for at, (size, last) in enumerate(zip(sizes, last_reader, strict=True)):
        live += (size if last > at else 0.0) - ends[at]
        found.append(max(live, 0.0))
    return found
