"""`meshwright check`: proves a schedule file before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from meshwright import schedules
from meshwright.cli._parts import inputs
from meshwright.passes import check as proof


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A schedule file (.json, .csv), lowered or not.")],
    as_json: inputs.Json = False,
) -> None:
    """Prove that a schedule is complete, in order and free of deadlocks; otherwise show the shortest counter-example.

    Exit code 0: every law holds. 2: the file cannot be read. 3: a law is broken.
    """
    result = proof.check(schedules.read(file))
    if as_json:
        keys = ("ok", "law", "worker", "action", "reason")
        shown = {key: getattr(result, key) for key in keys}
        typer.echo(json.dumps({**shown, "peak_activations": result.peak_activations, "receive_depth": result.receive_depth}))
    else:
        typer.echo(str(result))
    raise typer.Exit(0 if result.ok else 3)
