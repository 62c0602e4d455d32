"""The flags of tensor modes: one meaning in every verb, all fields of a plan, and errors before any work."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright import MeshwrightError, Parallel, plan_from_json, plan_to_json
from meshwright.cli._parts.mode_flags import ModeFlags, flag_of
from meshwright.costs.planned_grid import row_unit
from meshwright.ir.plan.plan_file import read_plan
from meshwright.ir.plan.plan_tensor import TENSOR_FIELDS
from tests.cli.test_flags import VERBS
from tests.support.command import app

FULL = ModeFlags(tensor_mode="box", tp=4, box="2,2,1", sub_pipeline=True, save="gathered", replicate=["lm_head", "model.norm"])


def refused(verb: str, *flags: str) -> MeshwrightError:
    done = CliRunner().invoke(app, [verb, "gpt-tiny", *flags])
    assert isinstance(done.exception, MeshwrightError), done.output
    return done.exception


@pytest.mark.parametrize("verb", ["verify", "train", "inspect", "measure"])
def test_every_verb_has_all_of_them(verb: str) -> None:
    named = {name for option in VERBS[verb].params for name in option.opts}
    assert {f"--{flag_of(field)}" for field in TENSOR_FIELDS} <= named
    assert len(fields(ModeFlags)) == len(TENSOR_FIELDS)


def test_flags_are_the_fields_of_a_plan() -> None:
    plan = Parallel.of(FULL.plan_fields())
    assert (plan.tp, plan.tensor, plan.box, plan.overlap, plan.save) == (4, "box", (2, 2, 1), True, "gathered")
    assert plan.replicate == ("lm_head", "model.norm")
    cut = Parallel.of(ModeFlags(tp=2, sequence_parallel=True).plan_fields())
    assert (cut.tensor, cut.sequence) == ("line", True), "tp alone means line"
    assert Parallel.of(ModeFlags(box="1,2,2").plan_fields()).tp == 4, "a box alone sets tp"
    deep = Parallel.of(ModeFlags(tensor_mode="tesseract", tp=8, depth=2).plan_fields())
    assert (deep.depth, row_unit(deep)) == (2, 4)
    assert ModeFlags().plan_fields() == {}


@pytest.mark.parametrize(
    ("flags", "what", "fix"),
    [
        (("--tensor-mode", "lin"), "no tensor mode 'lin'; did you mean line?", "one of box, grid, line, tesseract"),
        (("--tensor-mode", "box"), "--tensor-mode needs ranks that share a worker", "--tp 2"),
        (("--sequence-parallel",), "--sequence-parallel needs ranks that share a worker", "--tp 2"),
        (("--replicate", "lm_head"), "--replicate needs ranks that share a worker", "--tp 2"),
        (("--tp", "0"), "tp must be a whole number of at least 1", "tp=2"),
        (("--box", "2,2"), "--box takes three whole numbers w,a,b, got '2,2'", "--box 2,2,1"),
        (("--box", "2,2,0"), "box must be three whole numbers", "box=(2, 2, 1)"),
        (("--tp", "4", "--box", "2,1,1"), "box (2, 1, 1) has 2 ranks, tp is 4", "tp=2"),
        (("--tp", "2", "--box", "2,1,1", "--tensor-mode", "line"), "box (2, 1, 1) is the shape of tensor=", 'tensor="box"'),
        (("--tp", "3", "--tensor-mode", "grid"), "grid needs a square number of ranks, got 3", "tp=4"),
        (("--tp", "4", "--depth", "2"), "line has one axis", "tesseract"),
        (("--tp", "2", "--save", "all"), "--save must be shards or gathered, got 'all'", "--save shards"),
    ],
)
@pytest.mark.parametrize("verb", ["verify", "train", "inspect"])
def test_bad_values_are_errors_with_a_fix(verb: str, flags: tuple[str, ...], what: str, fix: str) -> None:
    error = refused(verb, *flags)
    assert what in error.what and fix in (error.fix or ""), error


@pytest.mark.parametrize("verb", ["verify", "train"])
@pytest.mark.parametrize(
    ("flags", "named"), [(("--tp", "2"), "--tp"), (("--tp", "2", "--sequence-parallel"), "--tp"), (("--box", "2,1,1"), "--box")]
)
def test_a_plan_file_says_it_alone(verb: str, flags: tuple[str, ...], named: str) -> None:
    assert f"--plan and {named} both say how to split" in refused(verb, "--plan", "plan.toml", *flags).what


def test_all_fields_travel_through_plan_files(tmp_path: Path) -> None:
    plan = Parallel.of({"pp": 2, "microbatches": 4, **FULL.plan_fields()})
    assert plan_from_json(plan_to_json(plan)) == plan
    table = json.loads(plan_to_json(plan))["parallel"]
    assert {name: table[name] for name in TENSOR_FIELDS} == {
        **{name: getattr(plan, name) for name in TENSOR_FIELDS},
        "box": [2, 2, 1],
        "replicate": ["lm_head", "model.norm"],
    }
    lines = [
        "schema = 1",
        "[parallel]",
        *(f"{name} = {_toml(table[name])}" for name in TENSOR_FIELDS),
        "pp = 2",
        "microbatches = 4",
    ]
    (tmp_path / "plan.toml").write_text("\n".join(lines))
    assert Parallel.of(read_plan(tmp_path / "plan.toml")) == plan


def test_all_fields_travel_through_job_files(tmp_path: Path) -> None:
    from meshwright.train.job_file import read_job

    given = {"tp": 4, "box": [2, 2, 1], "save": "gathered", "replicate": ["lm_head"], "overlap": True}
    lines = ["schema = 1", 'model = "gpt-tiny"', "[parallel]", *(f"{name} = {_toml(value)}" for name, value in given.items())]
    (tmp_path / "job.toml").write_text("\n".join(lines))
    assert dict(read_job(tmp_path / "job.toml").parallel) == given


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--tp", "2", "--sub-pipeline"), ("--box", "2,1,1", "--save", "gathered")], ids=" ".join)
def test_verify_and_train_take_them(flags: tuple[str, ...], tmp_path: Path) -> None:
    proved = CliRunner().invoke(app, ["verify", "gpt-tiny", *flags, "--steps", "1", "--json"])
    assert proved.exit_code == 0 and json.loads(proved.stdout)["passed"], proved.output
    more = ("--max-steps", "2", "--dataloader-drop-last", "true", "--save-strategy", "no", "--output-dir", str(tmp_path))
    trained = CliRunner().invoke(app, ["train", "gpt-tiny", *flags, *more])
    assert trained.exit_code == 0 and "pp 1, dp 1, tp 2, 1 microbatches: 2 steps" in trained.output, trained.output


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize("verb", ["verify", "train", "measure"])
def test_options_of_a_data_parallel_mode_are_flags(verb: str) -> None:
    cyclic = ("--dp", "2", "--dp-mode", "cyclic")
    assert "option rule cannot be 'v3'" in refused(verb, *cyclic, "--option", "rule=v3").what
    assert "--option takes KEY=VALUE" in refused(verb, *cyclic, "--option", "chunks").what
    assert "--plan and --option both say how to split" in refused(verb, "--plan", '{"dp": 2}', "--option", "chunks=2").what
