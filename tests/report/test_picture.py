"""Pictures are true to scale: every action has its box where and as long as it runs, and memory its height."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from examples.pictures import FOLDER, LAYOUTS, PICTURES, draw, draw_layout
from meshwright import MeshwrightError, schedules, simulate
from meshwright.costs.modes import mode
from meshwright.ir.action import Cell
from meshwright.ir.stage_cost import StageCost, even_costs
from meshwright.ir.timeline import Timeline
from meshwright.report.pictures.layout_picture import layout_picture
from meshwright.report.pictures.picture import EDGE, HELD, LEFT, RIGHT, ROW, Area, Box, Picture, Text, picture
from meshwright.report.pictures.png import to_png
from meshwright.report.pictures.svg import to_svg
from tests.support.command import app

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name: str, **options: object) -> Timeline:
    schedule = schedules.build(name, workers=4, microbatches=8 if name != "cyclic" else 4, **options)  # type: ignore[arg-type]
    return simulate(schedule, even_costs(stages=schedule.stages, workers=schedule.workers, forward_s=1, backward_s=2))


def spans(found: Picture) -> list[Box]:
    return [shape for shape in found.shapes if isinstance(shape, Box) and " on worker " in shape.title]


@pytest.mark.parametrize("name", schedules.names())
def test_every_action_has_its_box(name: str) -> None:
    found = timeline(name)
    drawn = picture(found, width=3000)
    scale = (3000 - LEFT - RIGHT) / found.makespan_s
    by_title: dict[str, list[Box]] = defaultdict(list)
    for box in spans(drawn):
        by_title[box.title.split(":")[0]].append(box)
    for row in found.compute:
        for span in (span for span in row if span.end_s > span.start_s):  # a recompute may cost nothing
            boxes = by_title[f"{span.entry} on worker {span.worker}"]
            assert len(boxes) == (2 if isinstance(span.entry, Cell) else 1)
            for box in boxes:
                assert box.x == pytest.approx(LEFT + span.start_s * scale)
                assert box.width == pytest.approx((span.end_s - span.start_s) * scale - 0.6)


@pytest.mark.parametrize("name", ["chimera", "dualpipe", "zbv"])
def test_boxes_of_a_worker_do_not_overlap(name: str) -> None:
    drawn = [box for box in spans(picture(timeline(name))) if box.height >= ROW / 2]
    rows: dict[tuple[str, float], list[Box]] = defaultdict(list)
    for box in drawn:
        rows[box.title.split(" on worker ")[1].split(":")[0], box.y].append(box)
    for boxes in rows.values():
        ordered = sorted(boxes, key=lambda box: box.x)
        assert all(a.x + a.width <= b.x + 1e-6 for a, b in pairwise(ordered))


def test_replicas_and_halves_are_told_apart_without_colour() -> None:
    found = picture(timeline("chimera", mode="halving"))
    words = {shape.text for shape in found.shapes if isinstance(shape, Text)}
    assert {"F0d", "F4u", "B0da", "B0db"} <= words or {"F0d", "F2u", "B0da", "B0db"} <= words
    heights = {box.height for box in spans(found)}
    assert heights == {ROW, ROW / 2}
    edges = [shape for shape in found.shapes if isinstance(shape, Box) and shape.height == 3]
    assert len(edges) == len([box for box in spans(found) if "@1" in box.title]) + 1  # and one in the legend


def test_memory_is_drawn_to_scale_with_its_peak() -> None:
    schedule = schedules.build("onef1b", workers=4, microbatches=8)
    costs = [StageCost(1.0, 1.0, 1.0, activation_bytes=2e9, parameter_bytes=1e9)] * 4
    found = simulate(schedule, costs)
    drawn = picture(found)
    areas = [shape for shape in drawn.shapes if isinstance(shape, Area) and shape.fill == HELD]
    heights = [max(y for _, y in area.points) - min(y for _, y in area.points) for area in areas]
    peaks = [found.peak_bytes(worker) for worker in range(4)]
    assert [h / heights[0] for h in heights] == pytest.approx([p / peaks[0] for p in peaks])
    assert f"{peaks[0] / 1e9:.3g} GB" in {shape.text for shape in drawn.shapes if isinstance(shape, Text)}


def test_svg_is_xml_with_a_tooltip_for_every_span() -> None:
    found = timeline("chimera")
    root = ElementTree.fromstring(to_svg(picture(found, title="a < b & c")))
    titles = [element.text for element in root.iter(f"{SVG}title")]
    assert len(titles) >= sum(map(len, found.compute)) and any("0F0 on worker 0: 0 to 1" in str(title) for title in titles)
    assert "a < b & c" in {element.text for element in root.iter(f"{SVG}text")}


def test_png_has_the_size_of_the_picture() -> None:
    drawn = picture(timeline("gpipe"), width=800)
    found = to_png(drawn, scale=1.0)
    assert found.startswith(b"\x89PNG")
    assert (int.from_bytes(found[16:20], "big"), int.from_bytes(found[20:24], "big")) == (800, int(drawn.height))


def test_what_cannot_be_drawn_is_refused() -> None:
    schedule = schedules.build("gpipe", workers=2, microbatches=2)
    with pytest.raises(MeshwrightError, match="takes no time"):
        picture(simulate(schedule, [StageCost(0.0, 0.0, 0.0)] * 2))
    with pytest.raises(MeshwrightError, match="at least 400 pixels"):
        picture(timeline("gpipe"), width=10)


def test_the_verbs_draw_schedules_and_timelines(tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(app, list(words), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    svg = run("show", "chimera", "--format", "svg")
    assert ElementTree.fromstring(svg).tag == f"{SVG}svg"
    run("simulate", "chimera", "--format", "json", "-o", str(tmp_path / "timeline.json"))
    assert json.loads((tmp_path / "timeline.json").read_text())["kind"] == "timeline"
    assert run("show", str(tmp_path / "timeline.json"), "--format", "svg").count("<rect") == svg.count("<rect")
    run("show", "chimera", "--format", "png", "-o", str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "chimera", "--format", "png"], "a PNG needs a file"),
        (["compare", "--format", "svg"], "a comparison is not drawn as svg"),
    ],
)
def test_the_verbs_refuse_pictures_that_they_cannot_give(words: list[str], said: str) -> None:
    with pytest.raises(MeshwrightError, match=said):
        CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_of_the_docs_are_current(name: str, tmp_path: Path) -> None:
    assert draw(name, tmp_path).read_text() == (FOLDER / f"{name}.svg").read_text(), "make pictures"


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layouts_of_tensor_modes_are_current(name: str, tmp_path: Path) -> None:
    assert draw_layout(name, tmp_path).read_text() == (FOLDER / f"{name}.svg").read_text(), "make pictures"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_shows_every_rank_in_every_matrix(name: str) -> None:
    """Blocks fill their matrix without overlap, and all ranks are named in each of the six matrices."""
    mode_name, asked, title = LAYOUTS[name]
    grid = mode(mode_name).grid(asked)
    shown = layout_picture(grid, mode(mode_name).scheme(grid), title=title)
    blocks = [shape for shape in shown.shapes if isinstance(shape, Box) and shape.title]
    frames = [shape for shape in shown.shapes if isinstance(shape, Box) and shape.fill == EDGE]
    assert len(frames) == 6
    for frame in frames:
        inside = [b for b in blocks if frame.x <= b.x < frame.x + frame.width and frame.y <= b.y < frame.y + frame.height]
        ranks = [int(n) for b in inside for n in re.findall(r"\d+", b.title.replace("0 to 3", "0, 1, 2, 3"))]
        assert sorted(ranks) == list(range(grid.ranks))
        assert len({(b.x, b.y) for b in inside}) == len(inside)
        assert sum((b.width + 2) * (b.height + 2) for b in inside) == pytest.approx((frame.width - 2) ** 2)
    assert all(0 <= text.x < shown.width and 0 < text.y < shown.height for text in shown.shapes if isinstance(text, Text))
