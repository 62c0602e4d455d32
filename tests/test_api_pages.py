"""Every public name is documented: on an API page, in Google style, with an example that runs."""

from __future__ import annotations

import contextlib
import doctest
import enum
import inspect
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import meshwright

ROOT = Path(__file__).parent.parent
PAGES = [page for page in sorted((ROOT / "docs" / "api").glob("*.md")) if page.stem != "index"]
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Examples):$", re.MULTILINE)
SCHEDULES = ["build", "names", "options", "summary"]
"""The functions of `meshwright.schedules` that are on its page."""


def documented(name: str) -> Any:
    """What carries the docstring of a public name; the package `capture` is also a function."""
    if name == "capture":
        from meshwright.capture.model_graph import capture

        return capture
    return getattr(meshwright, name)


NAMES = [name for name in meshwright.__all__ if name != "schedules"]
OBJECTS = [*NAMES, *(f"schedules.{name}" for name in SCHEDULES)]


def found(name: str) -> Any:
    return getattr(meshwright.schedules, name.partition(".")[2]) if name.startswith("schedules.") else documented(name)


def sections(text: str) -> dict[str, str]:
    """The sections of a docstring in Google style."""
    parts = SECTION.split(text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def parameters(thing: Any) -> list[str]:
    """What is given to make or call it; of a class that inherits its arguments, its own."""
    if isinstance(thing, type) and issubclass(thing, enum.Enum):
        return []
    if isinstance(thing, type) and thing.__name__ == "TrainingArguments":
        return list(thing.__annotations__)
    return [name for name in inspect.signature(thing).parameters if name != "self"]


def entries(section: str) -> set[str]:
    """The names that a section explains."""
    return set(re.findall(r"^    \*{0,2}(\w+): \S", section, re.MULTILINE))


def test_every_public_name_is_on_one_api_page() -> None:
    shown = [target for page in PAGES for target in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)]
    last = [target.rpartition(".")[2] for target in shown]
    assert sorted(last) == sorted(meshwright.__all__)
    listed = re.findall(r"`(\w+)`", (ROOT / "docs" / "api" / "index.md").read_text())
    assert sorted(set(listed) - {"import"}) == sorted(meshwright.__all__)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_public_docstring_is_complete(name: str) -> None:
    thing = found(name)
    text = inspect.getdoc(thing) or ""
    parts = sections(text)
    assert text.partition("\n")[0].endswith("."), "the first line is a sentence"
    if isinstance(thing, type) and "Attributes" in parts and "Args" not in parts:
        fields = {field for kind in thing.__mro__ for field in getattr(kind, "__annotations__", {})}
        assert entries(parts["Attributes"]) and (not fields or entries(parts["Attributes"]) <= fields)
    elif wanted := parameters(thing):
        assert entries(parts.get("Args", "")) == set(wanted)
    if not isinstance(thing, type):
        assert parts.get("Returns", "").strip()
    assert ">>>" in parts.get("Examples", "") or "```python" in parts.get("Examples", "")


@pytest.mark.parametrize("name", OBJECTS)
def test_examples_of_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example that needs workers is only compiled; all others are run and their output is compared."""
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(found(name)) or ""
    if ">>>" not in text:
        (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        compile(inspect.cleandoc("\n" + block), name, "exec")
        return
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    said = io.StringIO()
    with contextlib.redirect_stderr(io.StringIO()):
        failed, tried = doctest.DocTestRunner(verbose=False).run(test, out=said.write)
    assert tried and not failed, said.getvalue()


def test_names_that_are_loaded_later_are_known_to_the_pages() -> None:
    assert set(meshwright._LATER) <= set(meshwright.__all__)
    assert isinstance(meshwright.schedules, ModuleType) and set(SCHEDULES) <= set(meshwright.schedules.__all__)


def test_built_pages_show_arguments_and_examples(tmp_path: Path) -> None:
    """`make docs` builds them too, and fails on a name that cannot be found."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    for page in PAGES:
        html = (tmp_path / page.relative_to(ROOT / "docs").with_suffix("") / "index.html").read_text()
        for target in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE):
            at = html.index(f'id="{target}"')
            end = html.find('<h2 id="', at + 1)
            part = html[at : end if end > 0 else None]
            assert "<pre" in part and ("Examples" in part or target.endswith("schedules")), target
