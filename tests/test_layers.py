"""The architecture as a table: imports point down, the pure half knows no torch, files stay short."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "meshwright"
LEVEL = {
    "errors": 0,
    "torch_internals": 1,
    "ir": 1,
    "passes": 2,
    "simulate": 3,
    "costs": 3,
    "schedules": 4,
    "report": 4,
    "tensor": 4,
    "planners": 5,
    "capture": 5,
    "runtime": 5,
    "train": 6,
    "cli": 7,
    "__main__": 8,
}
FILES = sorted(ROOT.rglob("*.py"))
TORCH = {"runtime", "train", "capture", "tensor", "torch_internals"}
"""The folders that are about torch; all others answer without it."""
LOADED_ON_DEMAND = {
    ROOT / "simulate" / "compiled.py",
    *(ROOT / "simulate").glob("quick_*.py"),
    *(path for path in (ROOT / "planners").rglob("*.py") if path.name not in ("__init__.py", "_limits.py")),
}
"""Pure files that need numpy: only callers that use them load it."""
README = ROOT.parent / "README.md"
PAGES = sorted((ROOT.parent / "docs").rglob("*.md"))
CODE = ("meshwright", "tests", "benchmarks", "examples")
MADE_BY_PAGES = {"meshwright/schedules/eager.py"}
"""Files that a reader of a page writes."""
NAMED_BY_USERS = {"cli", "schedules", "planners", "presets"}
"""Folders in which a file is a verb, a schedule, a planner or a preset."""
FOLDERS = sorted({path.parent for path in FILES} - {ROOT, *(ROOT / name for name in NAMED_BY_USERS)})
MOST_FILES = 15
"""The most files of a folder, besides its `__init__.py` and its subfolders."""
LONGEST_BODY = 60
"""The most lines of code of a function, its arguments and docstring not counted."""


def layer(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    here = layer(path)
    if here == "__init__":
        return
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "meshwright" and len(parts) > 1 and parts[1] in LEVEL and parts[1] != here:
            assert LEVEL[parts[1]] < LEVEL[here], f"{path.name} of {here} imports {name}"


def place(path: Path) -> str:
    """A subfolder of a layer, or a file directly in it."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:-1]) if len(parts) > 2 else "/".join(parts)


def test_folders_form_no_cycle() -> None:
    """Subfolders of a layer, and the files beside them, can be read in an order in which nothing is used before it is known."""
    modules = {".".join(("meshwright", *path.relative_to(ROOT).with_suffix("").parts)): path for path in FILES}
    uses: dict[str, set[str]] = {}
    for path in FILES:
        if path.name != "__init__.py":
            found = {place(modules[name]) for name in imported(path) if name in modules}
            uses[place(path)] = uses.get(place(path), set()) | (found - {place(path)})
    order = list(TopologicalSorter(uses).static_order())
    assert order.index("runtime/device.py") < order.index("runtime/engine") < order.index("train/session")


def test_no_two_files_share_a_name() -> None:
    """But for the verbs of the command line, which are called like what they call, and a tensor mode's twin in costs/."""
    twins = {path for path in FILES if layer(path) == "tensor" and (ROOT / "costs" / path.name).exists()}
    assert {path.stem for path in twins} == {"__init__", "line", "grid", "tesseract", "box"}
    names = Counter(path.name for path in FILES if path.name != "__init__.py" and layer(path) != "cli" and path not in twins)
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_public_classes_share_a_name() -> None:
    names = Counter(
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def body_lines(function: ast.FunctionDef) -> int:
    """The lines of a function without its signature and its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_short_and_say_what_they_are(path: Path) -> None:
    text = path.read_text()
    limit = 100 if path.parent.name == "schedules" and not path.name.startswith("_") else 300
    tree = ast.parse(text)
    assert len(text.splitlines()) <= limit
    assert ast.get_docstring(tree), "a file opens with its idea"
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and body_lines(node) > LONGEST_BODY]
    assert not [node.name for node in functions]


def folder_entries(folder: Path) -> set[str]:
    """The files of a folder without ending, and its subfolders with a slash."""
    files = {path.stem for path in folder.glob("*.py") if path.name != "__init__.py"}
    return files | {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: str(p.relative_to(ROOT)))
def test_folders_are_small_and_list_their_files(folder: Path) -> None:
    """But for those where a file is a name that users type: they grow, and `meshwright` lists them."""
    entries = folder_entries(folder)
    assert len({name for name in entries if not name.endswith("/")}) <= MOST_FILES
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    listed = set(re.findall(r"^ *(\S+)  +\S", text, re.MULTILINE))
    assert listed == entries, f"{folder.name}/__init__.py: not listed {entries - listed}, not there {listed - entries}"


def test_nothing_pure_imports_torch_numpy_or_numba() -> None:
    for path in FILES:
        heavy = {name.split(".")[0] for name in imported(path)} & {"torch", "numpy", "numba", "ortools"}
        if layer(path) in TORCH:
            heavy -= {"torch"}
        assert not heavy or path in LOADED_ON_DEMAND, f"{path} imports {heavy}"


def test_the_plain_path_loads_nothing_heavy() -> None:
    code = (
        "import sys, contextlib, meshwright, meshwright.cli.main as command\n"
        "s = meshwright.schedules.build('chimera', workers=4, microbatches=4)\n"
        "assert meshwright.check(s).ok\n"
        "meshwright.simulate(s, meshwright.even_costs(stages=4, workers=4))\n"
        "sys.argv = ['meshwright', 'show', 'chimera', '--workers', '4']\n"
        "with contextlib.suppress(SystemExit): command.main()\n"
        "print([n for n in ('torch', 'numpy', 'numba', 'ortools', 'networkx', 'pydantic') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "makespan" in done.stdout and done.stdout.splitlines()[-1] == "[]"


@cache
def source_files() -> tuple[str, ...]:
    """All Python files of the repository, from its root."""
    root = README.parent
    return tuple(f"/{path.relative_to(root)}" for folder in CODE for path in (root / folder).rglob("*.py"))


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda p: p.name)
def test_pages_name_files_that_exist(page: Path) -> None:
    """A file is named from the root, from the package, or by its last folders (`transport/base.py`)."""
    named = set(re.findall(r"`([\w/]+/\w+\.py)`", page.read_text())) - MADE_BY_PAGES
    assert sorted(name for name in named if not any(path.endswith(f"/{name}") for path in source_files())) == []


def test_public_names_have_docstrings() -> None:
    for path in FILES:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            named = isinstance(node, ast.ClassDef) or (isinstance(node, ast.FunctionDef) and node in tree.body)
            if named and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path}: {node.name}"
