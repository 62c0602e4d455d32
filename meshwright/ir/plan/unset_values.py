"""Marks default values of a plan, so that a value that the user set can be told apart from an equal default."""

from __future__ import annotations


class Unset(int):
    """A default count that the user did not set; the plan's own schedule may replace it."""


class UnsetName(str):
    """A default name that the user did not set."""
