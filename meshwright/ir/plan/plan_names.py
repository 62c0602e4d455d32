"""Defaults that a user did not set, told apart from equal values that a user did set."""

from __future__ import annotations


class Unsaid(int):
    """A default count that the user did not set; the plan's own schedule may replace it."""


class UnsaidName(str):
    """A default name that the user did not set."""
