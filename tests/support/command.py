"""The command with all of its verbs, for typer's runner."""

from __future__ import annotations

from meshwright.cli._verbs import command_line

app = command_line()
