"""Costs, timelines and clusters read back what was written; wrong numbers in them are refused."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import (
    Cluster,
    Duplex,
    Link,
    MeshwrightError,
    StageCost,
    Timeline,
    cluster_from_json,
    cluster_to_json,
    costs_from_json,
    costs_to_json,
)
from tests.support.cases import Case, tiny
from tests.support.file_forms import FUZZ, INFINITY, NAN, READERS, plain, short, timeline_of

# Costs

sizes = st.one_of(st.just(0.0), st.floats(0, 1e30), st.integers(0, 10**6).map(float))
stage_costs = st.builds(StageCost, **{field.name: sizes for field in fields(StageCost)})


@FUZZ
@given(st.lists(stage_costs, min_size=1, max_size=6))
def test_costs_read_back(costs: list[StageCost]) -> None:
    assert costs_from_json(costs_to_json(costs)) == tuple(costs)


def test_costs_may_be_a_bare_list_and_leave_out_zeros() -> None:
    (cost,) = costs_from_json('[{"forward_s": 2, "output_bytes": 8}]')
    assert cost == StageCost(forward_s=2.0, output_bytes=8.0, gradient_bytes=8.0)


@pytest.mark.parametrize("value", [None, True, "1", -1, -0.5, NAN, INFINITY, -INFINITY, [], {}, [1], 10**400], ids=short)
@pytest.mark.parametrize("field", ["forward_s", "activation_bytes"])
def test_a_cost_that_is_no_number_is_refused(field: str, value: object) -> None:
    with pytest.raises(MeshwrightError) as caught:
        costs_from_json(json.dumps({"schema": 1, "stages": [{}, {field: value}]}))
    assert "stage 1" in str(caught.value) and field in str(caught.value)


@pytest.mark.parametrize("rows", [None, 5, "x", [], {}, [5], [None], [[1.0]], ["x"], [{"forward": 1.0}], [{"": 1.0}]])
def test_costs_without_rows_are_refused(rows: object) -> None:
    with pytest.raises(MeshwrightError) as caught:
        costs_from_json(json.dumps({"schema": 1, "stages": rows}))
    assert caught.value.fix


@pytest.mark.parametrize("schema", [2, 99, "1", None, 1.5, True, 0, [1]])
def test_costs_of_another_schema_are_refused(schema: object) -> None:
    with pytest.raises(MeshwrightError, match="schema"):
        costs_from_json(json.dumps({"schema": schema, "stages": [{"forward_s": 1.0}]}))


def test_unknown_keys_beside_the_rows_are_refused() -> None:
    with pytest.raises(MeshwrightError, match="colour"):
        costs_from_json(json.dumps({"schema": 1, "stages": [{"forward_s": 1.0}], "colour": "red"}))


# Timelines


@pytest.mark.parametrize("case", tiny(), ids=str)
def test_a_timeline_reads_back(case: Case) -> None:
    timeline = timeline_of(case.build())
    again = Timeline.from_json(timeline.to_json())
    assert again == timeline
    assert (again.makespan_s, again.bubble_ratio, again.steady) == (timeline.makespan_s, timeline.bubble_ratio, timeline.steady)
    assert [again.peak(w) for w in range(again.workers)] == [timeline.peak(w) for w in range(timeline.workers)]


TIMELINE_WRONG: dict[str, list[Any]] = {
    "schema": [None, "1", 1.5, True, 0, 2, 99, [1]],
    "kind": [None, "schedule", 1],
    "schedule": [None, 3, []],
    "workers": [None, "x", -1, 0, 1.5, True, [2]],
    "flush": [None, "no", 0],
    "lower_bound_s": [None, "x", [], NAN, True],
    "parameter_copies": [None, 5, "ab", ["x"], [None, None]],
    "spans": [
        *[None, 5, "abcde", [5], [[]], [[0, "compute", "0F0", 0.0]], [[0, "compute", "zz", 0.0, 1.0]]],
        *[[[0, "nowhere", "0F0", 0.0, 1.0]], [[0, 3, "0F0", 0.0, 1.0]], [[0, "compute", 5, 0.0, 1.0]]],
        *[[["0", "compute", "0F0", 0.0, 1.0]], [[7, "compute", "0F0", 0.0, 1.0]], [[-1, "compute", "0F0", 0.0, 1.0]]],
        *[[[0, "compute", "0F0", "a", 1.0]], [[0, "compute", "0F0", 0.0, None]], [[0, "compute", "0F0", NAN, 1.0]]],
        *[[[0, "compute", ["0F0"], 0.0, 1.0]], [[0, "compute", None, 0.0, 1.0]]],
    ],
    "memory": [None, 5, [5], [[5]], [[[0.0, 1.0]]], [[[0.0, "x", 1.0]], []], [[[None, 1.0, 1.0]], []]],
    "colour": ["red"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in TIMELINE_WRONG.items() for value in values], ids=repr)
def test_a_wrong_timeline_is_refused(key: str, value: object) -> None:
    data = json.loads(timeline_of(plain()).to_json())
    with pytest.raises(MeshwrightError):
        Timeline.from_json(json.dumps(data | {key: value}))


@pytest.mark.parametrize("key", list(json.loads(timeline_of(plain()).to_json())))
def test_a_timeline_without_a_key_is_refused(key: str) -> None:
    data = json.loads(timeline_of(plain()).to_json())
    del data[key]
    with pytest.raises(MeshwrightError):
        Timeline.from_json(json.dumps(data))


# Clusters

links = st.builds(Link, st.floats(0, 1e6), st.one_of(st.just(INFINITY), st.floats(1e-6, 1e15)))
clusters = st.builds(
    Cluster, links, st.dictionaries(st.tuples(st.integers(0, 9), st.integers(0, 9)), links, max_size=3), st.sampled_from(Duplex)
)


@FUZZ
@given(clusters)
def test_a_cluster_reads_back(cluster: Cluster) -> None:
    assert cluster_from_json(cluster_to_json(cluster)) == cluster


CLUSTER_WRONG: dict[str, list[Any]] = {
    "schema": [None, "1", 1.5, 0, 2, 99, [1]],
    "kind": [None, "schedule", 1],
    "duplex": [None, "quarter", 1],
    "link": [
        *[None, 5, "x", []],
        *[{"latency_s": value} for value in (-1, None, "x", NAN, INFINITY, [], True, "0.5", 10**400)],
        *[{"bytes_per_s": value} for value in (0, -1, None, "x", NAN, [], True, 10**400)],
        {"bandwidth": 1.0},
    ],
    "links": [
        *[None, 5, "x", {"a": 1}, [5], [{}], [{"source": 0}], [{"source": "0", "target": 1}], [{"source": 0.5, "target": 1}]],
        *[[{"source": -1, "target": 1}], [{"source": 0, "target": None}], [{"source": True, "target": 0}]],
    ],
    "colour": ["red"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in CLUSTER_WRONG.items() for value in values], ids=short)
def test_a_wrong_cluster_is_refused(key: str, value: object) -> None:
    data = json.loads(READERS["cluster"][1])
    with pytest.raises(MeshwrightError):
        cluster_from_json(json.dumps(data | {key: value}))
