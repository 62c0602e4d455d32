"""Memory over time: every value counted again from spans alone, the papers' copies and peaks, and recompute to a budget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import NamedTuple

import pytest

from meshwright import (
    Action,
    Cluster,
    Link,
    MeshwrightError,
    Op,
    Recompute,
    Schedule,
    StageCost,
    Timeline,
    Transfer,
    check,
    even_costs,
    lower,
    schedules,
    simulate,
    stage_aware,
)
from meshwright.ir.action import COMPUTE, Entry, Kind, actions
from tests.random_schedules import (
    Case,
    build,
    label,
    named,
    random_case,
    random_cluster,
    random_costs,
    random_schedule,
    row_count,
    rows_of,
)

CLOSE = 1e-9
FOREVER = float("inf")


class Held(NamedTuple):
    """Something that a worker holds from `start` on and no longer at `end`."""

    start: float
    end: float
    bytes: float
    activations: float = 0.0


class Book:
    """One worker's lowered list with its times: who made what when, and who used it last."""

    def __init__(self, schedule: Schedule, costs: Sequence[StageCost], timeline: Timeline, worker: int) -> None:
        self.schedule, self.costs, self.worker = schedule, costs, worker
        self.entries = schedule.lists[worker]
        self.span = {span.entry: (span.start_s, span.end_s) for span in timeline.spans if span.worker == worker}
        self.done: dict[Action, tuple[float, float]] = {
            action: self.span[entry] for entry in self.entries for action in actions(entry)
        }
        self.plain = {action._replace(version=0): times for action, times in self.done.items() if action.op in COMPUTE}

    def start(self, *, ops: tuple[Op, ...], like: Action, part: int | None = None) -> float | None:
        """When the first of these ops of an action's microbatch starts; None if there is none."""
        return min((times[0] for times in self._of(ops, like, part)), default=None)

    def end(self, *, ops: tuple[Op, ...], like: Action, part: int | None = None) -> float | None:
        """When the last of these ops ends."""
        return max((times[1] for times in self._of(ops, like, part)), default=None)

    def _of(self, ops: tuple[Op, ...], like: Action, part: int | None) -> list[tuple[float, float]]:
        part = like.part if part is None else part
        found = [self.plain.get(like._replace(op=op, part=part, version=0)) for op in ops]
        return [times for times in found if times is not None]

    def share(self, action: Action, part: int) -> float:
        """Which fraction of a microbatch's rows and halves this worker has of it."""
        placement = self.schedule.placement
        rows = rows_of(placement, placement.team(action.replica, action.stage, action.mb), self.worker)
        return len(rows) / row_count(placement) / (1 if part < 0 else self.schedule.parts)


def activations(book: Book) -> list[tuple[Held, Held]]:
    """What forwards leave for backwards, least and most.

    All of it from the start of F to the end of B or W. With recompute inside: the input and what is not dropped from F on,
    the rest while the backward runs. With an early R: the same until R starts, then all of it. A split backward with
    recompute inside has all of it back from its I on; whether the input is still held during I is left open.
    """
    schedule, found = book.schedule, []
    weight = schedule.workers / schedule.stages
    for action in book.done:
        if action.op is not Op.F:
            continue
        parts = (action.part,) if action.part >= 0 or schedule.parts == 1 else tuple(range(schedule.parts))
        for part in parts:
            stage, begin = action.stage, book.done[action][0]
            end = book.end(ops=(Op.B, Op.W), like=action, part=part)
            back = book.start(ops=(Op.B, Op.I), like=action, part=part)
            middle = book.end(ops=(Op.B, Op.I), like=action, part=part)
            assert end is not None and back is not None and middle is not None
            share = book.share(action, part)
            full = book.costs[stage].activation_bytes * share
            how = schedule.recompute[stage] if schedule.recompute else Recompute(0.0)
            given = book.costs[stage - 1].output_bytes * share if stage else 0.0
            count = weight * share
            if not how.share:
                found.append(twice(Held(begin, end, full, count)))
                continue
            kept = given + (1.0 - how.share) * full
            if how.early:
                again = book.start(ops=(Op.R,), like=action, part=part)
                assert again is not None
                found.append(twice(Held(begin, again, kept, count)))
                found.append(twice(Held(again, end, full, count)))
            else:
                whole = middle == end and book.start(ops=(Op.B,), like=action, part=part) is not None
                found.append(twice(Held(begin, back, kept, count)))
                most = Held(back, middle, given + full, count)
                found.append((most if whole else Held(back, middle, full, count), most))
                found.append(twice(Held(middle, end, full, count)))
    return found


def twice(held: Held) -> tuple[Held, Held]:
    """Least and most are the same."""
    return held, held


def messages(book: Book) -> list[tuple[Held, Held]]:
    """Outputs and gradients of stages: with their maker until they are used there or off; with a receiver from their start."""
    schedule, placement, worker = book.schedule, book.schedule.placement, book.worker
    found = []
    moved = {entry.value: entry for entry in book.entries if isinstance(entry, Transfer)}
    for entry, (start, _) in book.span.items():
        if isinstance(entry, Transfer) and entry.value.kind in (Kind.ACT, Kind.GRAD) and not entry.sends:
            value = entry.value
            ops = (Op.F,) if value.kind is Kind.ACT else (Op.B, Op.I)
            stage = value.stage + (value.kind is Kind.ACT)
            reader = Action(Op.F, stage, value.mb, value.replica, part=value.part)
            used = book.end(ops=ops, like=reader)
            assert used is not None
            found.append(twice(Held(start, used, crossing_bytes(book, reader, value.kind, entry.peer))))
    for action, (start, _) in book.done.items():
        if action.op not in (Op.F, Op.B, Op.I):
            continue
        kind = Kind.ACT if action.op is Op.F else Kind.GRAD
        near = action.stage + (1 if kind is Kind.ACT else -1)
        if not 0 <= near < schedule.stages:
            continue
        team = placement.team(action.replica, near, action.mb)
        mine = rows_of(placement, placement.team(action.replica, action.stage, action.mb), worker)
        for other in team:
            rows = mine & rows_of(placement, team, other)
            if not rows:
                continue
            ops = (Op.F,) if kind is Kind.ACT else (Op.B, Op.I)
            if other == worker:
                end = book.end(ops=ops, like=action._replace(stage=near))
            else:
                end = next(
                    book.span[entry][1]
                    for value, entry in moved.items()
                    if entry.sends
                    and entry.peer == other
                    and (value.kind, value.mb, value.replica, value.part) == (kind, action.mb, action.replica, action.part)
                    and value.stage == min(action.stage, near)
                )
            assert end is not None
            found.append(twice(Held(start, end, rows_bytes(book, action, kind, near, len(rows)))))
    return found


def crossing_bytes(book: Book, reader: Action, kind: Kind, sender: int) -> float:
    """The size of what a reader gets from one sender: the rows that both have."""
    placement = book.schedule.placement
    near = reader.stage - 1 if kind is Kind.ACT else reader.stage + 1
    mine = rows_of(placement, placement.team(reader.replica, reader.stage, reader.mb), book.worker)
    theirs = rows_of(placement, placement.team(reader.replica, near, reader.mb), sender)
    return rows_bytes(book, reader, kind, near, len(mine & theirs))


def rows_bytes(book: Book, action: Action, kind: Kind, near: int, rows: int) -> float:
    """The size of some rows at the boundary between an action's stage and the one near it."""
    cost = book.costs[min(action.stage, near)]
    whole = cost.output_bytes if kind is Kind.ACT else cost.gradient_bytes
    return whole * rows / row_count(book.schedule.placement) / (1 if action.part < 0 else book.schedule.parts)


def parameters(book: Book) -> list[tuple[Held, Held]]:
    """Every version of every stage, from its update to its last reader, the newest for ever; one gradient per round."""
    schedule, found = book.schedule, []
    for stage in {stage for _, stage in schedule.placement.held[book.worker]}:
        size = book.costs[stage].parameter_bytes
        updates = {a.version: t[1] for a, t in book.done.items() if a.op is Op.U and a.stage == stage}
        readers: dict[int, float] = defaultdict(float)
        backwards: dict[int, float] = {}
        for action, (start, end) in book.done.items():
            if action.stage != stage or action.op in (Op.S, Op.N):
                continue
            readers[action.version] = max(readers[action.version], end)
            if action.op in (Op.B, Op.W):
                round_ = action.mb // schedule.microbatches
                backwards[round_] = min(backwards.get(round_, FOREVER), start)
        for version in range(len(updates) + 1):
            begin = updates[version - 1] if version else 0.0
            found.append(twice(Held(begin, readers[version] if version in updates else FOREVER, size)))
        for round_, end in updates.items():
            sync = book.done[Action(Op.S, stage, version=round_)][0]
            found.append(twice(Held(min(backwards.get(round_, sync), sync), end, size)))
    return found


def agree(timeline: Timeline, worker: int, found: Sequence[tuple[Held, Held]]) -> None:
    """Levels and peaks lie between the two counts, which mostly are one."""
    least, most = ([pair[k] for pair in found] for k in (0, 1))
    levels = {level.time_s: level for level in timeline.memory[worker]}
    times = sorted({time for held in most for time in (held.start, held.end) if time < FOREVER} | set(levels))
    peak_low = peak_high = peak_count = 0.0
    now = (0.0, 0.0)
    for time in times:
        if time in levels:
            now = levels[time].bytes, levels[time].activations
        low, high = total(least, time), total(most, time)
        count = sum(held.activations for held in most if held.start <= time < held.end)
        peak_low, peak_high, peak_count = max(peak_low, low), max(peak_high, high), max(peak_count, count)
        assert low - 1e-6 <= now[0] <= high + 1e-6, f"worker {worker} holds {low} to {high} at {time}, not {now[0]}"
        assert now[1] == pytest.approx(count, abs=1e-6), f"worker {worker} at {time}"
    # What takes no time is held for a moment that no interval shows: then the peak may only be higher.
    moments = any(span.start_s == span.end_s for span in timeline.compute[worker])
    assert peak_low - 1e-6 <= timeline.peak_bytes(worker) <= (FOREVER if moments else peak_high + 1e-6)
    assert timeline.peak(worker) >= peak_count - 1e-6 if moments else timeline.peak(worker) == pytest.approx(peak_count, abs=1e-6)


def total(found: Sequence[Held], time: float) -> float:
    """The bytes held at a time."""
    return sum(held.bytes for held in found if held.start <= time < held.end)


def books(case: Case) -> tuple[Timeline, list[Book]]:
    """A case simulated, and a book for each worker."""
    timeline = simulate(case.schedule, case.costs, case.cluster, sync=case.sync, overlap=case.overlap)
    lowered = lower(case.schedule, sync=case.sync, costs=case.costs, cluster=case.cluster)
    return timeline, [Book(lowered, case.costs, timeline, worker) for worker in range(lowered.workers)]


def without(costs: Sequence[StageCost], *names: str) -> tuple[StageCost, ...]:
    """The same costs with some of them zero."""
    return tuple(replace(cost, **dict.fromkeys(names, 0.0)) for cost in costs)


def seeded(block: int, size: int) -> list[Random]:
    """The random sources of one block of seeds."""
    return [Random(f"memory:{block}:{number}") for number in range(size)]


def count_again(case: Case) -> None:
    """Compare activations and messages of all workers; parameters weigh nothing here."""
    timeline, found = books(case._replace(costs=without(case.costs, "parameter_bytes")))
    for worker, book in enumerate(found):
        agree(timeline, worker, activations(book) + messages(book))


def splits_inside(case: Case) -> bool:
    """Does a split backward have recompute inside?"""
    schedule = lower(case.schedule, costs=case.costs)
    how = schedule.recompute or (Recompute(0.0),) * schedule.stages
    inside = {stage for stage in range(schedule.stages) if how[stage].share > 0 and not how[stage].early}
    return any(a.op is Op.I and a.stage in inside for entries in schedule.lists for entry in entries for a in actions(entry))


@pytest.mark.parametrize("block", range(5))
def test_activations_and_messages_counted_again(block: int) -> None:
    tried = [case for rng in seeded(block, 60) if not splits_inside(case := random_case(rng))]
    assert len(tried) > 30
    for case in tried:
        count_again(case)


def test_split_backwards_with_recompute_inside_counted_again() -> None:
    tried = [case for rng in seeded(9, 60) if splits_inside(case := random_case(rng))]
    assert len(tried) > 5
    for case in tried:
        count_again(case)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("name", "options"), named(), ids=label)
def test_named_activations_and_messages_counted_again(name: str, options: dict[str, object], recompute: bool) -> None:
    schedule = build(name, options)
    for rng in seeded(10, 3):
        costs = random_costs(rng, schedule.stages, recompute=False)
        costs = tuple(replace(cost, recompute_s=1.0) for cost in costs) if recompute else costs
        count_again(Case(schedule, costs, random_cluster(rng, schedule.workers), "eager", 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(100, 150))
def test_activations_and_messages_of_larger_schedules_counted_again(block: int) -> None:
    for rng in seeded(block, 20):
        if not splits_inside(case := random_case(rng, workers=6, stages=7, microbatches=8)):
            count_again(case)


def test_parameters_and_gradients_counted_again_on_random_schedules() -> None:
    for rng in seeded(20, 60):
        case = random_case(rng)
        case = case._replace(costs=without(case.costs, "activation_bytes", "output_bytes", "gradient_bytes"))
        timeline, found = books(case)
        for worker, book in enumerate(found):
            agree_bytes(timeline, worker, parameters(book))


@pytest.mark.parametrize(("name", "options"), named(), ids=label)
def test_parameters_and_gradients_counted_again_on_named_schedules(name: str, options: dict[str, object]) -> None:
    schedule = build(name, options)
    if schedule.ring:
        pytest.skip("running sums are buffers of their own")
    for rng in seeded(21, 3):
        costs = without(random_costs(rng, schedule.stages), "activation_bytes", "output_bytes", "gradient_bytes")
        timeline, found = books(Case(schedule, costs, random_cluster(rng, schedule.workers), "eager", 0.5))
        for worker, book in enumerate(found):
            agree_bytes(timeline, worker, parameters(book))


def agree_bytes(timeline: Timeline, worker: int, found: Sequence[tuple[Held, Held]]) -> None:
    """As `agree`, where activations weigh nothing and are not looked at."""
    flat = replace(timeline, memory=tuple(tuple(level._replace(activations=0.0) for level in row) for row in timeline.memory))
    agree(flat, worker, found)


def test_no_level_is_below_zero_and_time_does_not_run_back() -> None:
    for rng in seeded(22, 80):
        case = random_case(rng)
        timeline = simulate(case.schedule, case.costs, case.cluster, sync=case.sync, overlap=case.overlap)
        for levels in timeline.memory:
            assert all(first.time_s <= second.time_s for first, second in pairwise(levels))
            assert all(level.bytes >= -CLOSE and level.activations >= -CLOSE for level in levels)


def test_after_a_flush_only_parameters_are_left() -> None:
    for rng in seeded(23, 60):
        case = random_case(rng)
        timeline = simulate(case.schedule, case.costs, case.cluster, sync=case.sync)
        for worker, levels in enumerate(timeline.memory):
            stages = {stage for _, stage in case.schedule.placement.held[worker]} if levels else set()
            left = levels[-1] if levels else None
            if left is not None:
                assert left.bytes == pytest.approx(sum(case.costs[s].parameter_bytes for s in stages), abs=1e-6)
                assert left.activations == 0


@pytest.mark.parametrize(("name", "options"), named(), ids=label)
def test_peaks_in_time_are_the_peaks_of_the_lists(name: str, options: dict[str, object]) -> None:
    """A worker computes one thing at a time, so costs do not matter for how many activations are alive."""
    schedule = build(name, options)
    verdict = check(schedule)
    for rng in seeded(24, 3):
        costs = [StageCost(rng.uniform(0.5, 2), rng.uniform(0.5, 2), rng.uniform(0.5, 2)) for _ in range(schedule.stages)]
        timeline = simulate(schedule, costs, random_cluster(rng, schedule.workers))
        for worker, peak in enumerate(verdict.peak_activations):
            wanted = peak * schedule.workers / schedule.stages / schedule.parts
            assert timeline.peak(worker) == pytest.approx(wanted)


def test_what_takes_no_time_still_takes_room() -> None:
    """Peaks follow from the order of the lists alone, even where every action is free."""
    for name, options in named():
        schedule = build(name, options)
        timeline = simulate(schedule, [StageCost()] * schedule.stages)
        for worker, peak in enumerate(check(schedule).peak_activations):
            wanted = peak * schedule.workers / schedule.stages / schedule.parts
            assert timeline.peak(worker) == pytest.approx(wanted), (name, options, worker)


# What is written in the papers.


@pytest.mark.parametrize(("workers", "microbatches"), [(2, 2), (4, 4), (4, 10), (6, 9)])
def test_peaks_of_plain_pipelines(workers: int, microbatches: int) -> None:
    """GPipe keeps all N; 1F1B the min of N and D - s; GEMS one."""
    costs = even_costs(stages=workers, workers=workers)
    for name, peaks in {
        "gpipe": [microbatches] * workers,
        "onef1b": [min(microbatches, workers - stage) for stage in range(workers)],
        "gems": [1] * workers,
    }.items():
        schedule = schedules.build(name, workers=workers, microbatches=microbatches)
        timeline = simulate(schedule, costs)
        assert [timeline.peak(worker) for worker in range(workers)] == peaks


@pytest.mark.parametrize("workers", [2, 3, 4, 6])
def test_parameter_copies(workers: int) -> None:
    """PipeDream D..1, 2BW two, Chimera and GEMS two, f pairs 2f; cyclic one copy of each stage, 1F1B of its own."""
    copies = {
        "pipedream": [float(workers - stage) for stage in range(workers)],
        "pipedream_2bw": [2.0] * workers if workers > 1 else [1.0],
        "cyclic": [float(workers)] * workers,
        "onef1b": [1.0] * workers,
        "interleaved": [1.0] * workers,
        "gpipe": [1.0] * workers,
    }
    if workers % 2 == 0:
        copies |= {"chimera": [2.0] * workers, "gems": [2.0] * workers, "dualpipe": [2.0] * workers}
    for name, wanted in copies.items():
        schedule = build(name, {}, workers=workers, steps=4)
        costs = even_costs(stages=schedule.stages, workers=workers)
        assert list(simulate(schedule, costs).parameter_copies) == wanted, name
    if workers == 4:
        schedule = build("chimera", {"pairs": 2}, workers=4)
        assert list(simulate(schedule, even_costs(stages=4, workers=4)).parameter_copies) == [4.0] * 4


@pytest.mark.parametrize(("name", "options"), named(), ids=label)
def test_parameter_copies_counted_again(name: str, options: dict[str, object]) -> None:
    """Versions alive after each entry of the list: made, and still read or the newest."""
    schedule = lower(build(name, options, steps=3))
    timeline = simulate(schedule, even_costs(stages=schedule.stages, workers=schedule.workers))
    for worker, entries in enumerate(schedule.lists):
        most = 0
        made = {(stage, 0) for _, stage in schedule.placement.held[worker]}
        last = last_reads(entries)
        replaced = {(a.stage, a.version) for entry in entries for a in actions(entry) if a.op is Op.U}
        for index, entry in enumerate(entries):
            made |= {(a.stage, a.version + 1) for a in actions(entry) if a.op is Op.U and a.stage < schedule.stages}
            alive = {key for key in made if key not in replaced or last[key] > index}
            most = max(most, len(alive))
        assert timeline.parameter_copies[worker] == pytest.approx(most * schedule.workers / schedule.stages)


def last_reads(entries: Sequence[Entry]) -> dict[tuple[int, int], int]:
    """For each (stage, version) the last place in a list that reads it."""
    ops = (Op.F, Op.R, Op.B, Op.I, Op.W, Op.U)
    return {(a.stage, a.version): index for index, entry in enumerate(entries) for a in actions(entry) if a.op in ops}


def test_cyclic_keeps_the_number_of_live_activations_constant() -> None:
    """Between fill and drain the workers together hold N (N + 1) / 2 stage activations at any time."""
    for workers in (2, 3, 4, 5):
        schedule = schedules.build("cyclic", workers=workers, microbatches=workers, steps=5)
        timeline = simulate(schedule, even_costs(stages=workers, workers=workers, forward_s=1.0, backward_s=1.0))
        begin, end = 2.0 * workers, timeline.makespan_s - 2.0 * workers
        slot = 1.0
        for step in range(round((end - begin) / slot)):
            time = begin + (step + 0.5) * slot
            alive = sum(level_at(timeline, worker, time) for worker in range(workers))
            assert alive == workers * (workers + 1) / 2, time


def level_at(timeline: Timeline, worker: int, time: float) -> float:
    """A worker's activations at a time."""
    return next((level.activations for level in reversed(timeline.memory[worker]) if level.time_s <= time), 0.0)


# Recompute.

SIZES = StageCost(forward_s=1.0, input_s=1.0, weight_s=1.0, recompute_s=1.0, activation_bytes=8.0, output_bytes=1.0)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_inline_recompute_has_one_working_set(share: float) -> None:
    """N inputs and N times what is not dropped; one microbatch whole while its backward runs."""
    plain = schedules.build("gpipe", workers=2, microbatches=4)
    schedule = replace(plain, recompute=(Recompute(share),) * 2)
    timeline = simulate(schedule, [replace(SIZES, output_bytes=0.0)] * 2)
    kept = (1 - share) * 8.0
    assert timeline.peak_bytes(0) == pytest.approx(4 * kept + share * 8.0)
    given = simulate(schedule, [SIZES] * 2)
    assert given.peak_bytes(1) == pytest.approx(4 * (1.0 + kept) + share * 8.0)
    assert timeline.peak(0) == 4, "dropped or not, four microbatches are alive"


@pytest.mark.parametrize(("op", "share"), [(op, share) for op in ("B", "I") for share in (0.25, 1.0)])
def test_one_microbatch_is_never_held_twice(op: str, share: float) -> None:
    """With recompute inside, whole or split backward: the input and one set of activations at most."""
    placement = schedules.build("gpipe", workers=1, microbatches=1).placement
    back = [Action(Op.B, 0, 0)] if op == "B" else [Action(Op.I, 0, 0), Action(Op.W, 0, 0)]
    schedule = Schedule("one", placement, 1, ((Action(Op.F, 0, 0), *back),), recompute=(Recompute(share),))
    timeline = simulate(schedule, [replace(SIZES, output_bytes=0.0)])
    assert timeline.peak_bytes(0) == pytest.approx(8.0)


def test_early_recompute_brings_activations_back_at_its_start() -> None:
    schedule = schedules.build("shifted", workers=2, microbatches=2, level="early")
    timeline = simulate(schedule, [replace(SIZES, output_bytes=0.0)] * 2, Cluster(Link(2.0)))
    first = next(span for span in timeline.spans if span.worker == 0 and str(span.entry) == "0R0")
    before = max(level.bytes for level in timeline.memory[0] if level.time_s < first.start_s)
    after = [level.bytes for level in timeline.memory[0] if level.time_s == first.start_s][-1]
    assert (before, after) == (0.0, 8.0)


def test_recompute_that_costs_time_is_inside_by_default() -> None:
    """Costs with recompute_s and a schedule that has not decided: the stage drops everything but its input."""
    schedule = schedules.build("onef1b", workers=3, microbatches=4)
    rows = [replace(SIZES, output_bytes=0.0)] * 3
    decided = replace(schedule, recompute=(Recompute(1.0),) * 3)
    assert simulate(schedule, rows).memory == simulate(decided, rows).memory
    assert simulate(schedule, rows).peak_bytes(0) == 8.0


# Recompute to a budget.


def budget_costs(rng: Random, stages: int, *, outputs: bool, parameters: bool) -> list[StageCost]:
    """Costs without recompute, with sizes for all or some."""
    return [
        StageCost(
            forward_s=rng.uniform(0.5, 2),
            input_s=rng.uniform(0.5, 2),
            weight_s=rng.uniform(0.5, 2),
            sync_s=rng.uniform(0, 1) if parameters else 0.0,
            activation_bytes=rng.uniform(2, 6),
            output_bytes=rng.uniform(0.1, 1) if outputs else 0.0,
            gradient_bytes=rng.uniform(0.1, 1) if outputs else 0.0,
            parameter_bytes=rng.uniform(0.1, 2) if parameters else 0.0,
        )
        for _ in range(stages)
    ]


def peaks(schedule: Schedule, costs: Sequence[StageCost], shares: Sequence[Recompute]) -> list[float]:
    """Simulated peaks with these shares recomputed inside backwards."""
    rows = [replace(cost, recompute_s=cost.forward_s) for cost in costs]
    timeline = simulate(replace(schedule, recompute=tuple(shares)), rows)
    return [timeline.peak_bytes(worker) for worker in range(schedule.workers)]


def undecided() -> list[tuple[str, dict[str, object]]]:
    """The named schedules that leave recompute open."""
    return [(name, options) for name, options in named() if build(name, options).recompute is None]


@pytest.mark.parametrize(("name", "options"), undecided(), ids=label)
@pytest.mark.parametrize("sizes", ["activations", "outputs", "parameters", "all"])
def test_a_budget_holds_when_simulated(name: str, options: dict[str, object], sizes: str) -> None:
    schedule = build(name, options)
    kept = 0
    for rng in seeded(30, 8):
        costs = budget_costs(rng, schedule.stages, outputs=sizes in ("outputs", "all"), parameters=sizes in ("parameters", "all"))
        budget = max(peaks(schedule, costs, (Recompute(0.0),) * schedule.stages)) * rng.uniform(0.4, 1.1)
        try:
            shares = stage_aware(schedule, costs, budget_bytes=budget)
        except MeshwrightError:
            continue
        assert max(peaks(schedule, costs, shares)) <= budget + CLOSE, [how.share for how in shares]
        kept += 1
    assert kept, "no budget was met"


def test_a_budget_holds_on_random_schedules() -> None:
    for rng in seeded(31, 80):
        schedule = random_schedule(rng, recomputes=False, cells=False)
        costs = budget_costs(rng, schedule.stages, outputs=False, parameters=False)
        budget = max(peaks(schedule, costs, (Recompute(0.0),) * schedule.stages)) * rng.uniform(0.4, 1.1)
        try:
            shares = stage_aware(schedule, costs, budget_bytes=budget)
        except MeshwrightError:
            continue
        assert max(peaks(schedule, costs, shares)) <= budget + CLOSE


@pytest.mark.parametrize("name", ["gpipe", "onef1b"])
@pytest.mark.parametrize("parameters", [False, True])
def test_a_chain_drops_no_more_than_brute_force(name: str, parameters: bool) -> None:
    """Every stage alone on its worker: the smallest share of a fine grid whose simulated peak fits is the answer."""
    grid = 60
    schedule = schedules.build(name, workers=3, microbatches=4)
    for rng in seeded(32, 4):
        costs = budget_costs(rng, 3, outputs=False, parameters=parameters)
        table = [peaks(schedule, costs, (Recompute(k / grid),) * 3) for k in range(grid + 1)]
        budget = rng.uniform(max(table[grid]), max(table[0]))
        shares = stage_aware(schedule, costs, budget_bytes=budget)
        for stage, how in enumerate(shares):
            least = next(k for k in range(grid + 1) if table[k][stage] <= budget + CLOSE)
            assert (least - 1) / grid - CLOSE <= how.share <= least / grid + CLOSE, (stage, budget)


def test_whole_layers_round_up_to_the_next_layer_and_no_further() -> None:
    """With exact numbers: 10 layers of 1 byte, a budget for every whole layer."""
    schedule = schedules.build("gpipe", workers=1, microbatches=4)
    cost = StageCost(1.0, 1.0, 1.0, activation_bytes=10.0)
    table = [peaks(schedule, [cost], [Recompute(k / 10)])[0] for k in range(11)]
    for dropped, budget in enumerate(table):
        shares = stage_aware(schedule, [cost], budget_bytes=budget + CLOSE, layers=[10])
        assert shares[0].share == pytest.approx(dropped / 10), budget


@pytest.mark.parametrize(("name", "options"), undecided(), ids=label)
def test_what_fits_recomputes_nothing(name: str, options: dict[str, object]) -> None:
    schedule = build(name, options)
    for rng in seeded(33, 4):
        costs = budget_costs(rng, schedule.stages, outputs=False, parameters=False)
        fits = max(peaks(schedule, costs, (Recompute(0.0),) * schedule.stages))
        assert all(how.share == 0 for how in stage_aware(schedule, costs, budget_bytes=fits + CLOSE))


@pytest.mark.parametrize(("name", "options"), undecided(), ids=label)
def test_a_larger_budget_never_drops_more(name: str, options: dict[str, object]) -> None:
    schedule = build(name, options)
    rng = Random(name)
    costs = budget_costs(rng, schedule.stages, outputs=True, parameters=True)
    top = max(peaks(schedule, costs, (Recompute(0.0),) * schedule.stages))
    before: tuple[Recompute, ...] | None = None
    refused_at = 0.0
    for step in range(1, 41):
        try:
            shares = stage_aware(schedule, costs, budget_bytes=2 * top * step / 40)
        except MeshwrightError:
            assert before is None, "a smaller budget was met"
            refused_at = 2 * top * step / 40
            continue
        assert all(0 <= how.share <= 1 and not how.early for how in shares)
        if before is not None:
            assert all(new.share <= old.share + CLOSE for new, old in zip(shares, before, strict=True))
        before = shares
    assert before is not None and all(how.share == 0 for how in before) and refused_at > 0


@pytest.mark.parametrize("name", ["gpipe", "onef1b"])
def test_a_budget_that_cannot_be_met_is_refused_with_the_numbers(name: str) -> None:
    """Full recompute needs inputs, one working set, parameters and gradient; the message says how much, where and of what."""
    schedule = schedules.build(name, workers=2, microbatches=4)
    cost = StageCost(1.0, 1.0, 1.0, activation_bytes=10.0, parameter_bytes=3.0)
    with pytest.raises(MeshwrightError) as caught:
        stage_aware(schedule, [cost] * 2, budget_bytes=15.5)
    assert "worker 0" in caught.value.what and "16" in caught.value.what and "15.5" in caught.value.what
    assert caught.value.fix
    assert max(peaks(schedule, [cost] * 2, (Recompute(1.0),) * 2)) > 15.5
    stage_aware(schedule, [cost] * 2, budget_bytes=16.5)


def test_a_budget_is_refused_only_if_full_recompute_does_not_fit() -> None:
    for rng in seeded(34, 60):
        schedule = random_schedule(rng, recomputes=False, cells=False, wide=False)
        costs = budget_costs(rng, schedule.stages, outputs=False, parameters=False)
        least = max(peaks(schedule, costs, (Recompute(1.0),) * schedule.stages))
        stage_aware(schedule, costs, budget_bytes=least + CLOSE)
