"""Every file form reads back what was written, and whatever else stands in a file is refused with a reason, never a crash."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright import (
    Action,
    Cell,
    Cluster,
    Duplex,
    Link,
    MeshwrightError,
    Op,
    Placement,
    Recompute,
    Schedule,
    StageCost,
    Timeline,
    Transfer,
    check,
    cluster_from_json,
    cluster_to_json,
    costs_from_json,
    costs_to_json,
    even_costs,
    from_csv,
    lower,
    schedule_from_json,
    schedule_to_json,
    schedules,
    simulate,
    to_csv,
)
from meshwright.ir.action import Entry, parse
from meshwright.ir.schedule import ChannelOrder
from tests.cases import Case, cases, large, schedule_files, tiny, usual_steps

FUZZ = settings(deadline=None, derandomize=True)
SOAK = settings(deadline=None, max_examples=3000)
LONG = int("9" * 4000)
NAN, INFINITY = float("nan"), float("inf")

anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.just(LONG), st.text(max_size=8), st.just("0F0 0B0")),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)
"""Any JSON value."""


def plain(name: str = "onef1b", workers: int = 2, microbatches: int = 2, **options: object) -> Schedule:
    return schedules.build(name, workers=workers, microbatches=microbatches, **{"steps": usual_steps(name), **options})


def with_extras() -> dict[str, Schedule]:
    """Schedules that use what no schedule by name uses."""
    line = plain(workers=3, microbatches=4)
    forwards = tuple(action for action in line.period[0] if isinstance(action, Action))
    teams = Placement((((((0, 1, 2),), ((3, 4),), ((5,),))),), rows=5)
    wide = replace(line, placement=teams, period=tuple(line.period[stage] for stage in (0, 0, 0, 1, 1, 2)))
    tied = replace(line, ties=((0, 2), (0, 1, 2)))
    turned = replace(line, turns=((Action(Op.F, 1, 0), Action(Op.F, 0, 2)),))
    return {
        "ties": tied,
        "recompute": replace(line, recompute=(Recompute(1.0), Recompute(0.5), Recompute(0.0))),
        "early recompute": lower(line, recompute="early"),
        "inline recompute": lower(line, recompute="inline"),
        "late syncs": lower(plain("chimera", 4, 4), sync="lazy"),
        "turns": turned,
        "channels": replace(line, channels=(ChannelOrder((0, 1), forwards),)),
        "teams": wide,
        "options": replace(line, options=(("depth", 3), ("name", "Größe"), ("share", 0.25), ("strict", True), ("what", None))),
        "repeats": line.repeated(3),
        "lowered repeats": lower(line.repeated(3)),
        "switches": replace(line, parts=2, ring=True, flush=False),
        "empty lists": replace(line, period=((), (), ())),
        "no lists": Schedule("nothing", Placement.line(1), 1, ()),
        "lowered ties": lower(tied),
        "lowered turns": lower(turned),
        "lowered teams": lower(wide),
    }


def short(value: object) -> str:
    """A test id."""
    return repr(value)[:60]


# Schedules


def reads_back(schedule: Schedule) -> None:
    again = schedule_from_json(schedule_to_json(schedule))
    assert again == schedule
    assert schedule_to_json(again) == schedule_to_json(schedule)


@pytest.mark.parametrize("name", schedules.names())
def test_a_schedule_reads_back_with_the_same_verdict(name: str) -> None:
    for case in cases(names=[name]):
        for schedule in (case.build(), lower(case.build())):
            reads_back(schedule)
            again = schedule_from_json(schedule_to_json(schedule))
            assert check(again) == check(schedule), case
            assert check(again).ok, case


@pytest.mark.slow
@pytest.mark.parametrize("name", schedules.names())
def test_every_large_schedule_reads_back(name: str) -> None:
    for case in (case for case in large() if case.name == name):
        reads_back(case.build())
        reads_back(lower(case.build()))


@pytest.mark.parametrize("what", with_extras())
def test_a_schedule_with_extras_reads_back(what: str) -> None:
    reads_back(with_extras()[what])


def reads_back_if_at_all(data: dict[str, Any]) -> None:
    try:
        schedule = schedule_from_json(json.dumps(data))
    except MeshwrightError:
        return
    reads_back(schedule)


@FUZZ
@given(schedule_files())
def test_any_schedule_reads_back(data: dict[str, Any]) -> None:
    reads_back_if_at_all(data)


@pytest.mark.slow
@SOAK
@given(schedule_files())
def test_any_schedule_reads_back_for_long(data: dict[str, Any]) -> None:
    reads_back_if_at_all(data)


def test_what_a_file_leaves_out_has_its_default() -> None:
    text = '{"schema": 1, "kind": "schedule", "name": "a", "microbatches": 1, "placement": [[[[0]]]], "period": ["0F0 0B0"]}'
    assert schedule_from_json(text) == Schedule("a", Placement.line(1), 1, ((Action(Op.F, 0, 0), Action(Op.B, 0, 0)),))


def test_a_plain_schedule_makes_a_short_file() -> None:
    data = json.loads(schedule_to_json(plain()))
    assert set(data) == {"schema", "kind", "name", "microbatches", "placement", "period"}
    assert data["period"] == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]


def test_the_file_keeps_the_period_apart() -> None:
    """Training of any length runs from one file."""
    for name in ("pipedream", "pipedream_2bw", "cyclic"):
        schedule = plain(name, steps=4)
        again = schedule_from_json(schedule_to_json(schedule))
        assert again.repeated(5).lists == schedule.repeated(5).lists
        assert check(again.repeated(5)).ok


WRONG: dict[str, list[Any]] = {
    "schema": [None, "1", 1.5, True, 0, -1, 2, 99, [1], {}],
    "kind": [None, "timeline", 1, ["schedule"]],
    "name": [None, 3, ["onef1b"], {}],
    "microbatches": [None, 0, -1, 1.5, "2", True, 10**9, [2], LONG],
    "placement": [
        *[None, 5, "x", {}, {"a": 1}, [], [[]], [[[]]], [[[[]]]], [0, 1], [[0], [1]], [[[0], [1]]], [[[["0"]], [[1]]]]],
        *[[[[[0, 0]], [[1]]]], [[[[-1]], [[1]]]], [[[[0]], [[True]]]], [[[[0]], [[1]]], [[[0]]]], [[[[0]], [[1.0]]]]],
    ],
    "rows": [None, -1, "2", 1.5, True],
    "repeats": [None, -1, "1", 1.5, True],
    "options": [None, 5, "x", [], [["a", 1]]],
    "parts": [None, 0, "2", 1.5],
    "ties": [None, 5, [5], ["01"], [[-1]], [["0"]], [[0, 1.0]], [[True, 0]]],
    "turns": [None, 5, "x", ["0F0"], [["0F0"]], [["0F0", "zz"]], [["0F0", "[0F0|0B0]"]], [["0F0", 3]], [["0F0", "0F1", "0B0"]]],
    "channels": [None, 5, [5], [[[0], "0F0"]], [[[0, 1, 2], ""]], [[[0, 1], "zz"]], [[[0, 1], 5]], [[["0", 1], ""]]],
    "recompute": [
        *[5, "x", [5, 5], [[0.5], [0.5]], [[0.5, False, 1]] * 2, [[None, False]] * 2, [["0.5", False]] * 2, [[0.5, "no"]] * 2],
        *[[[share, False]] * 2 for share in (-0.5, 1.5, NAN, INFINITY, -INFINITY, 10**400)],
        *[[[True, False]] * 2, [[1.0, 1]] * 2, [[1.0, False]], [[1.0, False]] * 3],
    ],
    **{key: [None, "0F0", ["0F0"], [""] * 3, [0, 1], ["0F0 zz", ""], ["0F", ""], {"0": ""}, 5] for key in ("period", "prologue")},
    "drain": [None, "0F0", ["0F0"], [0, 1], ["zz", ""]],
    **{key: [None, "false", "true", 0, 1, [], 0.5] for key in ("flush", "ring", "lowered", "norm")},
    "colour": ["red"],
    "": [1],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values], ids=short)
def test_a_wrong_type_is_refused_by_its_key(key: str, value: object) -> None:
    data = json.loads(schedule_to_json(plain()))
    with pytest.raises(MeshwrightError) as caught:
        schedule_from_json(json.dumps(data | {key: value}))
    assert key in str(caught.value)


@pytest.mark.parametrize("key", ["schema", "kind", "name", "microbatches", "placement", "period"])
def test_a_missing_key_is_named(key: str) -> None:
    data = json.loads(schedule_to_json(plain()))
    del data[key]
    with pytest.raises(MeshwrightError) as caught:
        schedule_from_json(json.dumps(data))
    assert key in str(caught.value)
    assert caught.value.fix


def test_a_newer_file_is_refused_with_both_numbers() -> None:
    data = json.loads(schedule_to_json(plain()))
    with pytest.raises(MeshwrightError, match=r"7.*1") as caught:
        schedule_from_json(json.dumps(data | {"schema": 7}))
    assert caught.value.fix == "update meshwright"


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


def timeline_of(schedule: Schedule, **more: Any) -> Timeline:
    costs = even_costs(stages=schedule.stages, workers=schedule.workers, sync_s=0.25)
    return simulate(schedule, costs, Cluster(Link(latency_s=0.125)), **more)


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


# torch's CSV


def expressible(schedule: Schedule) -> bool:
    """One replica, one worker per stage, whole microbatches, one step with a flush, no recompute."""
    alone = all(len(teams) == len(teams[0]) == 1 for copy in schedule.placement.teams for teams in copy)
    again = any(how.share for how in schedule.recompute or ())
    return schedule.placement.replicas == 1 and alone and schedule.parts == 1 and schedule.flush and not again


def without_ends(schedule: Schedule) -> tuple[tuple[Entry, ...], ...]:
    """The lists without syncs, reduction and updates."""
    ends = (Op.S, Op.N, Op.U)
    return tuple(tuple(e for e in entries if not (isinstance(e, Action) and e.op in ends)) for entries in schedule.lists)


@pytest.mark.parametrize("name", schedules.names())
def test_csv_reads_back_or_is_refused_with_a_reason(name: str) -> None:
    for case in cases(names=[name], every_option=False):
        for schedule in (case.build(), lower(case.build())):
            if not expressible(schedule):
                with pytest.raises(MeshwrightError, match=rf"cannot express .*{name}") as caught:
                    to_csv(schedule)
                assert caught.value.fix
                continue
            text = to_csv(schedule)
            again = from_csv(text, name)
            assert to_csv(again) == text
            assert without_ends(again) == without_ends(schedule), case
            assert (again.placement, again.microbatches) == (schedule.placement, schedule.microbatches)
            assert again.lowered == schedule.lowered or schedule.workers == 1
            assert check(again).ok, case
            if not schedule.lowered:
                assert again == replace(schedule, options=(), channels=(), recompute=None)


def test_csv_has_the_words_that_torch_has() -> None:
    assert to_csv(plain()) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    text = to_csv(lower(plain(microbatches=1)))
    assert text == "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    cells = to_csv(plain("dualpipev", 2, 4))
    assert all(word in cells for word in (")OVERLAP_F_B", "I", "W", ";"))


def test_csv_leaves_the_order_of_channels_to_torch() -> None:
    """What a schedule says of its channels is not in the compute form; in the lowered form it is in the order of messages."""
    listed = plain("listed", 3, 4)
    assert listed.channels and not from_csv(to_csv(listed)).channels
    again = from_csv(to_csv(lower(listed)), "listed")
    assert without_ends(again) == without_ends(lower(listed)) != without_ends(lower(replace(listed, channels=())))


def test_csv_may_have_idle_cells_and_blank_lines() -> None:
    text = " 0F0 ,0F1,,,0B0,,0B1\n\n,1F0,1B0,1F1,1B1,,\n"
    assert from_csv(text) == replace(plain(), name="csv")


def test_csv_passes_over_what_torch_says_of_sharded_parameters() -> None:
    assert from_csv("0UNSHARD,0F0,0RESHARD,0B0,0REDUCE_GRAD\n") == from_csv("0F0,0B0\n")


@pytest.mark.parametrize("case", tiny(), ids=str)
def test_torch_reads_every_cell(case: Case) -> None:
    module = pytest.importorskip("torch.distributed.pipelining.schedules")
    for schedule in (case.build(), lower(case.build())):
        if expressible(schedule):
            cells = [cell for line in to_csv(schedule).splitlines() for cell in line.split(",") if cell]
            assert [str(module._Action.from_str(cell)) for cell in cells] == cells


TWO = plain(workers=2, microbatches=2)
FORWARD, BACKWARD = Action(Op.F, 0, 1), Action(Op.B, 0, 0)
INEXPRESSIBLE = {
    "replicas": plain("gems"),
    "teams": plain("cyclic"),
    "half microbatches": replace(TWO, parts=2),
    "flush": plain("pipedream"),
    "steps": TWO.repeated(2),
    "recompute": replace(TWO, recompute=(Recompute(), Recompute())),
    "ties": replace(TWO, ties=((0, 1),)),
    "ties in a ring": lower(replace(plain(workers=3), ties=((0, 2),)), sync="ring"),
    "turns": replace(TWO, turns=((FORWARD, BACKWARD),)),
}


@pytest.mark.parametrize("what", INEXPRESSIBLE)
def test_csv_refuses_what_it_cannot_say(what: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        to_csv(INEXPRESSIBLE[what])
    assert what.split()[0].rstrip("s") in str(caught.value)
    assert INEXPRESSIBLE[what].name in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no action"),
        ("\n\n", "no action"),
        (",,,", "no action"),
        ("0F0,zz", "zz"),
        ("0F0,0X1", "0X1"),
        ("0F0;0B0", "0F0;0B0"),
        ("0F", "0F"),
        ("F0", "F0"),
        ("0F-1", "0F-1"),
        ("0F0,0B0\n0F1,0B1", "stage 0"),
        ("0F0,0B0\n2F0,2B0", "[0, 2]"),
        ("1F0,1B0", "[1]"),
        ("0SEND_F0\n0RECV_F0", "no action"),
        ("0F0,0SEND_F0,0B0", "boundary"),
        ("0F0,0RECV_F0,0B0", "boundary"),
        ("(0F1;0F2)OVERLAP_F_B", "OVERLAP"),
        ("(0F1;0B0)", "(0F1;0B0)"),
        ("0UNSHARD", "no action"),
        ("0F0,0SHARD", "0SHARD"),
        ("0F" + "9" * 5000, "9999"),
        ("9" * 5000 + "F0", "9999"),
        ("0F0,0SEND_F" + "9" * 5000, "9999"),
    ],
)
def test_a_bad_csv_is_refused_with_the_cell(text: str, said: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        from_csv(text)
    assert said in str(caught.value)


# Damage

Read = Callable[[str], Any]


def _schedule(text: str) -> None:
    schedule = schedule_from_json(text)
    assert schedule_to_json(schedule_from_json(schedule_to_json(schedule))) == schedule_to_json(schedule)


def _costs(text: str) -> None:
    costs = costs_from_json(text)
    assert costs_from_json(costs_to_json(costs)) == costs


def _timeline(text: str) -> None:
    timeline = Timeline.from_json(text)
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert 0 < timeline.workers < 1_000_000
    found = [timeline.makespan_s, timeline.bubble_ratio, timeline.span_bubble_ratio, timeline.lower_bound_s]
    found += [use(worker) for worker in range(len(timeline.memory)) for use in (timeline.peak, timeline.peak_bytes)]
    assert all(isinstance(number, int | float) for number in found)


def _cluster(text: str) -> None:
    cluster = cluster_from_json(text)
    assert cluster_from_json(cluster_to_json(cluster)) == cluster
    assert cluster.between(0, 1).busy_s(1.0) >= 0


def _csv(text: str) -> None:
    schedule = from_csv(text)
    assert without_ends(schedule) == without_ends(from_csv(text))
    assert isinstance(check(schedule).ok, bool)


def readers() -> dict[str, tuple[Read, str]]:
    """Each reader, used on what it gives back, and a good file for it."""
    cyclic, line = plain("cyclic"), plain("dualpipev", 2, 4)
    return {
        "schedule": (_schedule, schedule_to_json(cyclic)),
        "lowered": (_schedule, schedule_to_json(lower(line, recompute="early"))),
        "costs": (_costs, costs_to_json(even_costs(stages=3, workers=3))),
        "timeline": (_timeline, timeline_of(plain()).to_json()),
        "cluster": (_cluster, cluster_to_json(Cluster(Link(0.5), {(0, 1): Link(0.25, 8.0)}, Duplex.HALF))),
        "csv": (_csv, to_csv(lower(line))),
    }


READERS = readers()


def refused_or_read(read: Read, text: str) -> None:
    try:
        read(text)
    except MeshwrightError as error:
        assert str(error)


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


@FUZZ
@given(
    st.lists(
        st.lists(
            st.one_of(
                st.builds("{}{}{}".format, st.integers(0, 2), st.sampled_from("FBIW"), st.integers(0, 2)),
                st.builds(
                    "{}{}_{}{}".format,
                    st.integers(0, 2),
                    st.sampled_from(["SEND", "RECV"]),
                    st.sampled_from("FB"),
                    st.integers(0, 2),
                ),
                st.builds(
                    "({}F{};{}B{})OVERLAP_F_B".format, st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)
                ),
                st.sampled_from(["", "0F0 ", "x"]),
            ),
            max_size=6,
        ).map(",".join),
        max_size=3,
    ).map("\n".join)
)
def test_any_cells_of_csv_are_refused_or_read(text: str) -> None:
    refused_or_read(_csv, text)


def test_every_kind_of_entry_stands_in_a_file_of_these_tests() -> None:
    """So that the damage above reaches all of them."""
    words = " ".join(json.loads(READERS["lowered"][1])["period"]).split()
    kinds = {type(parse(word)) for word in words}
    assert kinds == {Action, Cell, Transfer}
