"""The picture of a schedule: true scale for any costs, within the width, under a time axis, with a legend."""

from __future__ import annotations

import random
import re

import pytest

from meshwright import Schedule, StageCost, Timeline, even_costs, schedules, simulate
from meshwright.ir.text_grid import label
from meshwright.report.terminal import slot_length, timeline_text
from meshwright.report.time_grid import SYMBOLS, Bar, scaled, shortened
from tests.support.command import meshwright

WIDTHS = (40, 80, 120, 200)


def uneven(stages: int) -> list[StageCost]:
    drawn = random.Random(0)
    return [StageCost(*(drawn.uniform(0.007, 0.02) for _ in range(3))) for _ in range(stages)]


def pictures(name: str) -> list[tuple[Schedule, Timeline]]:
    """A schedule at several sizes, with equal costs and with costs that have no common slot."""
    found = []
    for workers, microbatches in ((2, 4), (4, 8), (8, 32)) if name != "cyclic" else ((2, 2), (4, 4), (8, 8)):
        schedule = schedules.build(name, workers=workers, microbatches=microbatches)
        for costs in (even_costs(stages=schedule.stages, workers=workers), uneven(schedule.stages)):
            found.append((schedule, simulate(schedule, costs)))
    return found


def grid(text: str, workers: int) -> tuple[list[str], dict[int, str], list[str]]:
    """Axes, the columns of each worker over all bands, and the legend."""
    body = text.splitlines()[1 : next(i for i, line in enumerate(text.splitlines()) if line.startswith("makespan"))]
    legend = [line for line in body if " | " in line or re.match(r"[a-zA-Z.=+@]", line)]
    lines = [line for line in body if line not in legend]
    bands = [lines[i : i + workers + 1] for i in range(0, len(lines), workers + 1)]
    rows = {w: "".join(band[1 + w].split(maxsplit=1)[1] for band in bands) for w in range(workers)}
    return [band[0] for band in bands], rows, legend


@pytest.mark.parametrize("name", schedules.names())
@pytest.mark.parametrize("width", WIDTHS)
def test_every_picture_fits_and_has_its_axis_and_legend(name: str, width: int) -> None:
    for schedule, timeline in pictures(name):
        text = timeline_text(schedule, timeline, width=width)
        axes, rows, legend = grid(text, schedule.workers)
        assert max(len(line) for line in text.partition("makespan")[0].splitlines()) <= max(width, 60), text
        times = [float(word) for axis in axes for word in axis.split()]
        assert times[0] == 0 and times == sorted(times) and len(axes) <= 8
        assert times[-1] <= timeline.makespan_s and len(times) >= 2, text
        assert "forward" in legend[0] and ". idle" in " | ".join(legend) and len(rows) == schedule.workers


@pytest.mark.parametrize("name", schedules.names())
def test_columns_are_time(name: str) -> None:
    """As many columns are busy as the worker is, but for rounding at the ends of its spans."""
    for schedule, timeline in pictures(name)[1::2]:
        _, rows, _ = grid(timeline_text(schedule, timeline, width=120), schedule.workers)
        columns = max(map(len, rows.values()))
        for worker, row in rows.items():
            busy = sum(character != "." for character in row) / columns
            assert busy == pytest.approx(timeline.busy_s(worker) / timeline.makespan_s, abs=0.07)
            first = next(i for i, character in enumerate(row) if character != ".")
            assert first / columns == pytest.approx(timeline.compute[worker][0].start_s / timeline.makespan_s, abs=0.02)


@pytest.mark.parametrize("name", ["onef1b", "gpipe", "chimera", "zero_bubble"])
def test_eight_workers_and_thirty_two_microbatches_are_readable_in_120_columns(name: str) -> None:
    """Every action of every worker can be told by its letter and microbatch."""
    schedule = schedules.build(name, workers=8, microbatches=32)
    timeline = simulate(schedule, even_costs(stages=8, workers=8))
    replicas = schedule.placement.replicas
    bars = [[Bar(s.start_s, s.end_s, s.entry, label(s.entry, replicas=replicas), "") for s in row] for row in timeline.compute]
    scale = scaled(bars, timeline.makespan_s, slot_length(timeline), width=118)
    assert scale.bands <= 3
    for bar in (bar for row in bars for bar in row):
        columns = round(bar.end_s / scale.column_s) - round(bar.start_s / scale.column_s)
        shown = shortened(bar, columns).rstrip("=")
        assert len(shown) >= 2 and (shown[1:] in (str(bar.entry.mb), SYMBOLS[bar.entry.mb]) or shown[-1] in "du"), shown


def test_what_is_too_short_to_be_drawn_is_said() -> None:
    done = meshwright("show", "interleaved", "-w", "8", "-n", "64", "--option", "chunks=8", "--forward", "0.9")
    assert "may be left out" in done.stdout and max(map(len, done.stdout.splitlines())) <= 200
    assert "left out" not in meshwright("show", "interleaved", "-w", "8", "-n", "32", "--option", "chunks=4").stdout


def test_one_axis_is_drawn_for_times_without_a_common_slot() -> None:
    done = meshwright("show", "onef1b", "--forward", "0.137", "--backward", "0.251", "--send", "0.0113")
    axis = done.stdout.splitlines()[1]
    assert axis.split()[0] == "0" and float(axis.split()[-1]) > 1 and "|" in done.stdout


def test_slots_show_times_not_numbers_of_slots() -> None:
    done = meshwright("show", "gpipe", "-w", "2", "-n", "2", "--forward", "0.5", "--backward", "1")
    assert done.stdout.splitlines()[1].split() == ["0", "1", "2", "3", "4"]


def test_costs_of_nothing_have_an_axis_too() -> None:
    done = meshwright("show", "gpipe", "-w", "2", "-n", "2", "--forward", "0", "--backward", "0")
    assert done.returncode == 0 and done.stdout.splitlines()[1].strip() == "0"
