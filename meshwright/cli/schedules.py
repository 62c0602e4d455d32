"""`meshwright schedules`: every schedule by name, with one line about it and its options."""

from __future__ import annotations

import json
from typing import Any

import typer

from meshwright import schedules as known
from meshwright.cli._parts import inputs


def schedules(as_json: inputs.Json = False) -> None:
    """List the schedules by name, with a description and the options of each (--option KEY=VALUE)."""
    found = [about(name) for name in known.names()]
    if as_json:
        typer.echo(json.dumps(found))
        return
    for each in found:
        typer.secho(each["name"], bold=True)
        typer.echo(f"  {each['about']}")
        for option in each["options"]:
            typer.echo(f"  --option {option['name']}={option['values']}   default: {option['default']}")


def about(name: str) -> dict[str, Any]:
    """Returns one schedule as data."""
    options = [
        {"name": key, "values": known.values_of(parameter), "default": str(parameter.default).lower()}
        for key, parameter in known.options(name).items()
    ]
    return {"name": name, "about": known.summary(name), "options": options}
