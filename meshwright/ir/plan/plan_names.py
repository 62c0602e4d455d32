"""Marks default values of a plan, so that a value that the user set can be told apart from an equal default."""

from __future__ import annotations


class Unsaid(int):
    """A default count that the user did not set; the plan's own schedule may replace it."""


class UnsaidName(str):
    """A default name that the user did not set."""
