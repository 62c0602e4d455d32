"""What is unusable is refused with its numbers: files that stand for too much, malformed schedules, options without effect."""

from __future__ import annotations

import json

import pytest

from meshwright import MeshwrightError, check, lower, schedule_from_json, schedule_to_json, schedules

LONG = {"schema": 1, "kind": "schedule", "name": "x", "microbatches": 1, "placement": [[[[0]]]], "period": ["0F0 0B0"]}


@pytest.mark.parametrize(
    "more",
    [
        {"repeats": 999_999_999},
        {"parts": 999_999_999},
        {"placement": [[[[999_999_998]]]], "period": [], "repeats": 0},
        {"period": ["0F0 0B0" + " 0F0 0B0" * 99], "repeats": 25_001},
        {"period": [""], "repeats": 5_000_000, "turns": [["0F0", "0B0"]]},
    ],
)
def test_a_file_that_unrolls_to_too_much_is_refused(more: dict[str, object]) -> None:
    with pytest.raises(MeshwrightError, match=r"unrolls to [0-9]+ entries .*at most 5000000") as found:
        schedule_from_json(json.dumps({**LONG, **more}))
    assert "repeats" in str(found.value.fix)


def test_a_large_schedule_is_still_read() -> None:
    schedule = schedules.build("gpipe", workers=64, microbatches=4096)
    assert schedule_from_json(schedule_to_json(schedule)) == schedule


def test_many_repeats_are_still_read_and_proved() -> None:
    schedule = schedule_from_json(json.dumps({**LONG, "repeats": 1000}))
    assert check(schedule).ok and lower(schedule).steps == 1000
