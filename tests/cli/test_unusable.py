"""Input that cannot be used: refused in a line, never a number that is wrong, a flag that has no effect, or a long wait."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import (
    Cluster,
    Link,
    MeshwrightError,
    Schedule,
    StageCost,
    Timeline,
    check,
    cluster_to_json,
    costs_to_json,
    even_costs,
    from_csv,
    lower,
    schedule_from_json,
    schedule_to_json,
    schedules,
    simulate,
)
from meshwright.ir.action import parse
from meshwright.simulate import compile
from tests.support.command import meshwright

EARLY_SEND = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1SEND_B0,1F0,1B0\n"
"""Worker 1 sends a gradient that it has not made yet; no one waits for another for ever."""


def test_a_lowered_schedule_that_breaks_a_law_is_not_simulated(tmp_path: Path) -> None:
    broken = from_csv(EARLY_SEND)
    assert check(broken).law == "read"
    for run in (lambda: simulate(broken, even_costs(stages=2, workers=2)), lambda: compile(broken)):
        with pytest.raises(MeshwrightError, match="breaks the law of read at 0grad0>0 on worker 1"):
            run()
    file = tmp_path / "early.csv"
    file.write_text(EARLY_SEND)
    for verb in ("simulate", "show"):
        done = meshwright(verb, str(file))
        assert done.returncode == 2 and not done.stdout and "law of read" in done.stderr


@pytest.mark.parametrize("period", [[], [""]])
def test_repeats_of_nothing_take_no_memory(period: list[str]) -> None:
    pair = schedules.build("gpipe", workers=1, microbatches=1)
    data = json.loads(schedule_to_json(pair)) | {"period": period, "repeats": 999_999_999}
    found = schedule_from_json(json.dumps(data))
    assert not check(found).ok
    assert check(replace(found, prologue=pair.period)).ok  # the period has nothing to say


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("onef1b", {"workers": 100_000_000, "microbatches": 4}),
        ("onef1b", {"workers": 4, "microbatches": 1_000_000_000}),
        ("pipedream", {"workers": 2, "microbatches": 1, "steps": 100_000_000}),
        ("interleaved", {"workers": 4, "microbatches": 8, "chunks": 100_000_000}),
        ("hanayo", {"workers": 4, "microbatches": 8, "waves": 10**30}),
        ("cyclic", {"workers": 4, "microbatches": 8, "chunks": 10**9}),
    ],
)
def test_sizes_beyond_memory_are_refused_at_once(name: str, sizes: dict[str, int]) -> None:
    with pytest.raises(MeshwrightError, match="the limit is 5000000"):
        schedules.build(name, **sizes)


def test_more_memory_than_microbatches_is_no_more_work() -> None:
    built = [
        schedules.build("zero_bubble", workers=4, microbatches=8, variant="auto", memory=memory) for memory in (64, 999_999_999)
    ]
    assert built[0].lists == built[1].lists


def test_flags_that_a_file_replaces_are_refused_beside_it(tmp_path: Path) -> None:
    costs, cluster = tmp_path / "costs.json", tmp_path / "cluster.json"
    costs.write_text(costs_to_json([StageCost(1.0, 1.0, 1.0)] * 4))
    cluster.write_text(cluster_to_json(Cluster(Link(0.5))))
    done = meshwright("simulate", "onef1b", "--costs", str(costs), "--forward", "9", "--sync-cost", "2")
    assert done.returncode == 2 and "replaces --forward, --sync-cost" in done.stderr
    done = meshwright("simulate", "onef1b", "--cluster", str(cluster), "--send", "3")
    assert done.returncode == 2 and "replaces --send" in done.stderr
    both = ("simulate", "onef1b", "--costs", str(costs))
    assert meshwright(*both, "--send", "0.1").returncode == meshwright(*both, "--cluster", str(cluster)).returncode == 0


def test_an_option_given_twice_is_refused() -> None:
    done = meshwright("show", "onef1b", "--option", "warmup=1", "--option", "warmup=2")
    assert done.returncode == 2 and "warmup is given twice: 1 and 2" in done.stderr


def test_a_fault_of_no_single_action_names_none() -> None:
    short = replace(schedules.build("gpipe", workers=1, microbatches=1), microbatches=2)
    assert str(check(short)).splitlines()[0] == "once: microbatch 1 does not run at all"


@pytest.mark.parametrize("text", ["\u0662F0", "2F\u0660", "2act\u0660>3", "2act0>\u0663"])
def test_only_plain_digits_are_numbers(text: str) -> None:
    with pytest.raises(MeshwrightError, match="is not"):
        parse(text)
    with pytest.raises(MeshwrightError, match="not a cell"):
        from_csv("\u0660F0,\u0660B0\n")


@pytest.mark.parametrize("key", ["memory", "parameter_copies"])
def test_a_timeline_has_rows_for_all_workers_or_none(key: str) -> None:
    data = json.loads(simulate(_lowered(), even_costs(stages=2, workers=2)).to_json())
    data[key] = data[key][:1]
    with pytest.raises(MeshwrightError, match="2 workers, but rows for 1"):
        Timeline.from_json(json.dumps(data))


def _lowered() -> Schedule:
    return lower(schedules.build("onef1b", workers=2, microbatches=2))
