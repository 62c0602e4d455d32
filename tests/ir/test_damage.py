"""Damaged files of every form are refused with a reason, or read, but never crash."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshwright import Action, Cell, MeshwrightError, Transfer
from meshwright.ir.action import parse
from tests.support.file_forms import FUZZ, READERS, SOAK, anything, refused_or_read


@pytest.mark.parametrize("kind", READERS)
def test_a_truncated_file_is_refused(kind: str) -> None:
    read, good = READERS[kind]
    read(good)
    for end in range(0, len(good) - 1, max(1, len(good) // 200)):
        if kind == "csv":
            refused_or_read(read, good[:end])
        else:
            with pytest.raises(MeshwrightError):
                read(good[:end])


NO_JSON = [
    "",
    " ",
    "null",
    "true",
    "5",
    '"x"',
    "[]",
    "{}",
    "[[]]",
    "{]",
    "\x00",
    "\ufeff{}",
    "NaN",
    "[" * 100_000,
    '{"a":' * 100_000,
]
NO_JSON += ["1" * 5000, "[" + "1" * 5000 + "]", "-", "1e999", '"\\ud800"', "é", "\ud800"]


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("text", NO_JSON, ids=lambda text: repr(text[:10]))
def test_what_is_no_such_file_is_refused(kind: str, text: str) -> None:
    with pytest.raises(MeshwrightError):
        READERS[kind][0](text)


@pytest.mark.parametrize("kind", READERS)
def test_a_file_of_another_kind_is_refused(kind: str) -> None:
    for other, (_, text) in READERS.items():
        if other != kind and {other, kind} != {"schedule", "lowered"}:
            with pytest.raises(MeshwrightError):
                READERS[kind][0](text)


def flipped(good: str, data: st.DataObject) -> str:
    """A file with some of its bytes changed, removed or put in."""
    raw = bytearray(good.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(raw) - 1)))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    return bytes(raw).decode("utf-8", errors=data.draw(st.sampled_from(["replace", "surrogateescape"])))


def exchanged(value: Any, data: st.DataObject) -> Any:
    """The same JSON with one value somewhere inside replaced, removed or doubled."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 4)):
        key = data.draw(st.sampled_from(sorted(value)))
        if data.draw(st.integers(0, 9)) == 0:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: exchanged(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.integers(0, 4)):
        at = data.draw(st.integers(0, len(value) - 1))
        match data.draw(st.integers(0, 9)):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value, value[at]]
            case _:
                return [*value[:at], exchanged(value[at], data), *value[at + 1 :]]
    return data.draw(anything)


@pytest.mark.parametrize("kind", READERS)
@FUZZ
@given(data=st.data())
def test_flipped_bytes_are_refused_or_read(kind: str, data: st.DataObject) -> None:
    read, good = READERS[kind]
    refused_or_read(read, flipped(good, data))


@pytest.mark.parametrize("kind", [kind for kind in READERS if kind != "csv"])
@FUZZ
@given(data=st.data())
def test_an_exchanged_value_is_refused_or_read(kind: str, data: st.DataObject) -> None:
    read, good = READERS[kind]
    refused_or_read(read, json.dumps(exchanged(json.loads(good), data)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", READERS)
@SOAK
@given(data=st.data())
def test_damage_for_long(kind: str, data: st.DataObject) -> None:
    read, good = READERS[kind]
    refused_or_read(read, flipped(good, data))
    if kind != "csv":
        refused_or_read(read, json.dumps(exchanged(json.loads(good), data)))


@pytest.mark.parametrize("kind", READERS)
@FUZZ
@given(text=st.text(max_size=40))
@example(text="0F0,0B0")
@example(text="0F٣,0B٣")
def test_any_text_is_refused_or_read(kind: str, text: str) -> None:
    refused_or_read(READERS[kind][0], text)


def test_every_kind_of_entry_stands_in_a_file_of_these_tests() -> None:
    """So that the damage above reaches all of them."""
    words = " ".join(json.loads(READERS["lowered"][1])["period"]).split()
    kinds = {type(parse(word)) for word in words}
    assert kinds == {Action, Cell, Transfer}
