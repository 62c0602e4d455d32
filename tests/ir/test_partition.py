"""Cutting a chain: never far from the optimum that all ways give, cheap where that costs little, the same every time."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import MeshwrightError, ModelGraph, model_from_json, model_to_json
from meshwright.ir.model import Crossing, Layer, Weight
from meshwright.ir.partition import TOLERANCE, partition


def ways(count: int, runs: int) -> list[tuple[int, ...]]:
    return [(0, *inner, count) for inner in combinations(range(1, count), runs - 1)]


def heaviest(costs: list[int], starts: tuple[int, ...]) -> float:
    return max(sum(costs[a:b]) for a, b in pairwise(starts))


def price(edges: list[int], starts: tuple[int, ...]) -> int:
    return sum(edges[end - 1] for end in starts[1:-1])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_as_good_as_all_ways_tried(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=9))
    runs = data.draw(st.integers(1, min(4, len(costs))))
    edges = data.draw(st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs)))
    best, starts = partition(costs, edges, runs)
    all_ways = ways(len(costs), runs)
    assert starts in all_ways
    assert best == min(heaviest(costs, way) for way in all_ways)
    within = [way for way in all_ways if heaviest(costs, way) <= best * (1 + TOLERANCE)]
    assert starts in within
    assert price(edges, starts) == min(price(edges, way) for way in within)
    assert partition(costs, edges, runs) == (best, starts)


def graph(count: int = 6) -> ModelGraph:
    layers = tuple(
        Layer(
            name=f"block.{i}",
            flops=10.0 + i,
            parameters=(f"block.{i}.weight", "shared")[: 2 if i in (0, count - 1) else 1],
            parameter_bytes=8,
            output=(Crossing(f"x{i}", (2, 4), 32, i),) if i < count - 1 else (),
            saved_bytes=64,
            modules=(f"block.{i}",),
        )
        for i in range(count)
    )
    weights = (*(Weight(f"block.{i}.weight", (2,), 8) for i in range(count)), Weight("shared", (4,), 16))
    return ModelGraph("Toy", layers, weights)


def test_a_model_is_read_back_from_its_file() -> None:
    assert model_from_json(model_to_json(graph())) == graph()


def test_cuts_by_name_and_what_they_say() -> None:
    cuts = graph().cuts(3, at=["block.1", "block.4"])
    assert cuts.starts == (0, 1, 4, 6)
    assert cuts.parts[0].why.startswith("asked for")
    assert [part.parameters for part in cuts.parts] == [6, 6, 8]
    assert graph().ties[0].layers == (0, 5)


@pytest.mark.parametrize(
    ("stages", "at", "what"),
    [
        (7, None, "Toy has 6 layers and cannot be cut into 7 stages"),
        (0, None, "at least 1 stage, got 0"),
        (2, ["block.9"], "no layer of Toy begins with the module 'block.9'"),
        (3, ["block.2"], "3 stages need 2 cuts"),
        (3, ["block.4", "block.2"], "3 stages need 2 cuts in order"),
    ],
)
def test_what_cannot_be_cut_is_refused(stages: int, at: list[str] | None, what: str) -> None:
    with pytest.raises(MeshwrightError, match=what):
        graph().cuts(stages, at=at)


def test_a_file_that_is_none_is_refused() -> None:
    text = model_to_json(graph())
    for old, new in (('"schema": 1', '"schema": 9'), ('"flops"', '"flop"'), ('"shared"', '"lost"')):
        with pytest.raises(MeshwrightError):
            model_from_json(text.replace(old, new, 1))
