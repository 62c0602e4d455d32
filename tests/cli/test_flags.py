"""Flags mean one thing in every verb, help shows examples that parse, and names that nearly exist are guessed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from meshwright import __version__, schedules
from tests.support.command import app, meshwright
from tests.support.paths import ROOT

COMMAND: Any = typer.main.get_command(app)
VERBS = COMMAND.commands
SEVERAL = {("profile", "--rows")}
"""Flags that take several numbers where other verbs take one."""


def parsed(line: str) -> None:
    """Fails where a verb or a flag of this command does not exist."""
    for part in line.split("&&"):
        _, verb, *words = shlex.split(part)
        with VERBS[verb].make_context(verb, words, resilient_parsing=False):
            pass


def test_a_flag_has_one_type_and_one_meaning() -> None:
    """Old names are hidden, and are not flags any more."""
    kinds: dict[str, str] = {}
    texts: dict[str, str] = {}
    costs = ("forward", "backward", "split", "recompute-cost", "send", "sync-cost", "bandwidth", "duplex", "overlap", "costs")
    same = {f"--{name}" for name in (*costs, "cluster", "format", "plan", "parallel", "batch-function", "json")}
    for verb, command in VERBS.items():
        for option in (option for option in command.params if not getattr(option, "hidden", False)):
            for name in (name for name in option.opts if name.startswith("--")):
                if (verb, name) not in SEVERAL:
                    assert kinds.setdefault(name, option.type.name) == option.type.name, f"{verb} {name}"
                assert name not in same or texts.setdefault(name, option.help) == option.help, f"{verb} {name}"
    assert same <= set(texts)
    for verb in ("show", "simulate", "compare"):
        named = {name for option in VERBS[verb].params for name in option.opts}
        assert {f"--{name}" for name in (*costs, "cluster", "format", "json", "output")} <= named, verb


def test_the_old_name_of_a_recompute_cost_still_works() -> None:
    new, old = (meshwright("simulate", "shifted", name, "1", "--json") for name in ("--recompute-cost", "--recompute"))
    assert new.stdout == old.stdout and new.stderr == "" and "--recompute is now --recompute-cost" in old.stderr


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_help_ends_with_examples_that_parse(verb: str) -> None:
    lines = re.findall(r"^ *(meshwright .*)$", str(VERBS[verb].epilog), re.MULTILINE)
    assert lines
    for line in lines:
        parsed(line)
    shown = meshwright(verb, "--help").stdout
    assert "Examples:" in shown and lines[0] in shown


def test_the_demo_names_commands_that_exist() -> None:
    lines = re.findall(r"\W(meshwright (?!import)[a-z]+ [^\"'\n]+)", (ROOT / "examples" / "tour.py").read_text())
    assert len(lines) >= 7
    for line in lines:
        parsed(line.strip())
    titled = re.findall(r"^    step\((.*)\)$", (ROOT / "examples" / "tour.py").read_text(), re.MULTILINE)
    assert all(re.search(r', "meshwright|"$', arguments) for arguments in titled), "what is shown as a command is one"


def test_version_and_the_list_of_schedules() -> None:
    assert meshwright("--version").stdout == f"meshwright {__version__}\n"
    found = json.loads(meshwright("schedules", "--json").stdout)
    assert [each["name"] for each in found] == schedules.names()
    assert all(each["about"].endswith((".", ":")) or each["about"] for each in found)
    assert {option["name"] for each in found if each["name"] == "onef1b" for option in each["options"]} == {"warmup", "memory"}
    text = meshwright("schedules").stdout
    assert "onef1b\n  1F1B" in text and "--option warmup=1|2|4   default: 1" in text


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("show", "1f1b"), "onef1b"),
        (("simulate", "zerobubble"), "zero_bubble"),
        (("show", "chimerra"), "chimera"),
        (("verify", "gtp"), "gpt"),
        (("verify", "gpt", "--schedule", "1F1B"), "onef1b"),
        (("inspect", "gpt-smal"), "gpt-small"),
        (("train", "gpt-tiny", "--schedule", "ZB-V"), "zbv"),
    ],
)
def test_names_that_nearly_exist_are_guessed(arguments: tuple[str, ...], meant: str) -> None:
    done = meshwright(*arguments)
    assert done.returncode == 2 and f"did you mean {meant}?" in done.stderr, done.stderr
    assert "did you mean" not in meshwright("show", "xyzzy").stderr


def test_the_old_name_of_a_batch_function_still_works_for_functions() -> None:
    own = ("inspect", "tests.support.captured_models:LongSkip")
    new = meshwright(*own, "--batch-function", "tests.support.captured_models:tokens", "--json")
    old = meshwright(*own, "--batch", "tests.support.captured_models:tokens", "--json")
    assert new.returncode == old.returncode == 0 and new.stdout == old.stdout
    assert new.stderr == "" and "--batch is now --batch-function" in old.stderr
    size = meshwright(*own, "--batch", "32")
    assert size.returncode == 2 and "--batch-function" in size.stderr
    assert "--batch " not in meshwright("inspect", "--help").stdout


def test_a_plan_file_goes_by_two_names_in_verify_and_train(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('schema = 1\n[parallel]\npp = 2\nschedule = "gpipe"\nmicrobatches = 2\n')
    for name in ("--plan", "--parallel"):
        done = meshwright("verify", "mlp", name, "plan.toml", "--steps", "1", cwd=tmp_path)
        assert done.returncode == 0 and done.stdout.startswith("gpipe  1 steps"), done.stderr
        for verb, model in (("verify", "mlp"), ("train", "gpt-tiny")):
            done = meshwright(verb, model, name, "plan.toml", "--pp", "2", cwd=tmp_path)
            assert done.returncode == 2 and "--plan and --pp both say" in done.stderr, done.stderr


def test_sizes_have_units() -> None:
    one, other = (json.loads(meshwright("simulate", "gpipe", "--bandwidth", size, "--json").stdout) for size in ("25GB", "25e9"))
    assert one == other
    assert "25GB" in meshwright("simulate", "gpipe", "--bandwidth", "fast").stderr
    assert "may mean bits" in meshwright("simulate", "gpipe", "--bandwidth", "25Gb").stderr


@pytest.mark.parametrize(("name", "missing"), [("Trainer", "transformers"), ("parallelize", "torch")])
def test_a_name_that_needs_an_extra_says_so(name: str, missing: str) -> None:
    code = f"import sys; sys.modules['{missing}'] = None; import meshwright; meshwright.check; meshwright.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-2:] == [
        f"meshwright.errors.MeshwrightError: meshwright.{name} needs {missing}, which is not installed",
        "  try: pip install 'meshwright[hf]'",
    ]
