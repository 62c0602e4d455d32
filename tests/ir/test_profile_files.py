"""Profiles as JSON: what is written is read back, repeated layers are short, and what is wrong is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import LayerCost, MeshwrightError, Profile, profile_from_json, profile_to_json
from meshwright.ir.profile import ProfileSource
from tests.support.file_forms import FUZZ

BYTES = ("output_bytes", "saved_bytes", "parameter_bytes", "transient_bytes", "fixed_bytes", "fixed_transient_bytes")
sizes = st.one_of(st.just(0.0), st.floats(0, 1e30), st.integers(0, 10**6).map(float))
names = st.one_of(
    st.sampled_from(["h.0.a", "h.1.a", "h.2.a", "h.10.a", "x 1", "a{}b", "{}", "", "7"]), st.text("ab.01{}", max_size=5)
)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Layers from a few kinds, so that some repeat."""
    rows = tuple(sorted(draw(st.sets(st.integers(1, 64), max_size=3))))
    times = st.tuples(*[sizes] * (len(rows) or 1))
    fields = dict.fromkeys((*BYTES, "flops"), sizes)
    ties = st.lists(names, max_size=2).map(tuple)
    costs = st.builds(LayerCost, name=names, forward_s=times, input_s=times, weight_s=times, ties=ties, **fields)
    kinds = draw(st.lists(costs, min_size=1, max_size=3))
    chosen = draw(st.lists(st.tuples(st.sampled_from(kinds), st.none() | names), min_size=1, max_size=12))
    layers = [replace(kind, name=kind.name if name is None else name) for kind, name in chosen]
    turns = range(draw(st.integers(0, 4)))
    blocks = [replace(kind, name=f"h.{k}.{at}") for k in turns for at, kind in enumerate(kinds)]
    return Profile(
        (*layers, *blocks, *layers[: draw(st.integers(0, 2))]),
        rows,
        device=draw(names),
        precision=draw(st.sampled_from(["fp32", "bf16"])),
        source=draw(st.sampled_from(ProfileSource)),
        parameter_itemsize=draw(st.floats(0.5, 8)),
        optimizer_bytes_per_parameter=draw(st.floats(0, 16)),
        tokens_per_row=draw(st.integers(1, 4096)),
        error=draw(st.floats(0, 2)),
    )


@FUZZ
@given(profiles())
def test_a_profile_reads_back_as_it_was_written(profile: Profile) -> None:
    assert profile_from_json(profile_to_json(profile)) == profile


def gpt(blocks: int) -> Profile:
    def layer(name: str, seconds: float) -> LayerCost:
        return LayerCost(name, (seconds,), (seconds,), (seconds,), saved_bytes=1e6 * seconds)

    parts = [layer(f"h.{k}.{part}", 1.0 + at) for k in range(blocks) for at, part in enumerate(("attn", "mlp"))]
    return Profile((layer("wte", 0.5), *parts, layer("head", 4.0)))


def test_blocks_are_written_once() -> None:
    few, many = (json.loads(profile_to_json(gpt(blocks)))["layers"] for blocks in (12, 96))
    assert len(few) == len(many) == 3 and few[1]["layers"] == many[1]["layers"]
    assert [layer["name"] for layer in many[1]["layers"]] == ["h.{}.attn", "h.{}.mlp"]
    assert (few[1]["repeat"], many[1]["repeat"], many[1]["first"]) == (12, 96, 0)


def test_a_block_that_differs_ends_a_group() -> None:
    whole = gpt(6)
    odd = LayerCost("h.3.attn", (9.0,), (9.0,), (9.0,))
    profile = Profile(tuple(odd if layer.name == odd.name else layer for layer in whole.layers))
    text = profile_to_json(profile)
    assert profile_from_json(text) == profile
    assert [row.get("repeat", 1) for row in json.loads(text)["layers"]].count(3) == 1


GOOD = {"name": "a", "forward_s": [1], "input_s": [1], "weight_s": [1]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "cluster"}, "its kind is 'cluster'"),
        ({"schema": 99}, "schema 99, this version reads up to 1"),
        ({"layers": []}, "at least one layer"),
        ({"layers": [{**GOOD, "forward_s": [1, 2]}]}, "has 2, 1 and 1 times, the profile has 1"),
        ({"layers": [{**GOOD, "seconds": 1}]}, "layer 0 of a profile file has unknown keys: seconds"),
        ({"layers": [{**GOOD, "saved_bytes": -1}]}, "'saved_bytes' of layer 0 of a profile file: -1 is not a number"),
        ({"layers": [{"repeat": 0, "layers": [GOOD]}]}, "not at least 1"),
        ({"layers": [{"repeat": 10**8, "layers": [GOOD]}]}, "100000000 times 1 layers, the limit is 100000"),
        ({"layers": [{"repeat": 60_000, "layers": [GOOD]}] * 2}, "more than 100000 layers"),
        ({"rows": [2, 1]}, "must increase"),
        ({"source": "guessed"}, "'source' of a profile file is malformed"),
        ({"parameter_itemsize": 0}, "more than 0 bytes"),
        ({"name": "x"}, "unknown keys: name"),
    ],
)
def test_what_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(MeshwrightError) as error:
        profile_from_json(json.dumps({"schema": 1, "kind": "profile", "layers": [GOOD], **change}))
    assert said in str(error.value)


def test_fixed_bytes_do_not_grow_with_rows() -> None:
    layer = LayerCost("a", (1.0,), (1.0,), (1.0,), saved_bytes=10.0, fixed_bytes=7.0)
    assert [Profile((layer,), rows=(1,)).at(rows).saved_bytes for rows in (1, 3)] == [(17.0,), (37.0,)]
    layer = LayerCost("a", (1.0,), (1.0,), (1.0,), transient_bytes=10.0, fixed_transient_bytes=7.0)
    assert [Profile((layer,), rows=(1,)).at(rows).transient_bytes for rows in (1, 3)] == [(17.0,), (37.0,)]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ((1.0, 2.0), {2: 0.5, 6: 1.5, 16: 4.0}),
        ((3.0, 4.0), {1: 2.25, 6: 3.5, 16: 6.0}),
        ((1.0, 0.9), {1: 1.075, 6: 0.95, 64: 0.9, 1024: 0.9}),
        ((1.0, 4.0), {1: 0.25, 2: 0.5, 3: 0.75, 16: 10.0}),
    ],
    ids=["in proportion", "with a constant part", "times that fall", "times that grow faster than the rows"],
)
def test_no_number_of_rows_is_free(times: tuple[float, float], expected: dict[int, float]) -> None:
    """More rows take at least the time of the most known ones, fewer at least their share of the fewest known ones."""
    profile = Profile((LayerCost("block", times, times, times),), rows=(4, 8))
    assert {rows: profile.at(rows).forward_s[0] for rows in expected} == pytest.approx(expected)
