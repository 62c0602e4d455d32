"""`MeshwrightError`, the one exception that users catch. It says what is wrong, with the numbers, and what to do."""

from __future__ import annotations

from collections.abc import Iterable


class MeshwrightError(Exception):
    """An error that a user can cause and fix.

    Everything that Meshwright refuses is raised as this one type. The message says what is wrong, with the numbers; `fix`
    says what to do instead.

    Args:
        what: What is wrong, with the numbers.
        fix: What to write instead; None if there is no single answer.

    Attributes:
        what: The same text.
        fix: The same text.

    Examples:
        >>> import meshwright as mw
        >>> try:
        ...     mw.schedules.build("chimera", workers=4, microbatches=6)
        ... except mw.MeshwrightError as error:
        ...     print(error)
        chimera runs whole units of 4 microbatches, or fewer in multiples of 2, got 6
          try: --microbatches 8
    """

    def __init__(self, what: str, *, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return self.what if self.fix is None else f"{self.what}\n  try: {self.fix}"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns "; did you mean NAME?" for the closest known name, to end an error text with; empty if no name is close."""
    from difflib import get_close_matches  # imported here because errors are rare and every verb loads this file

    wanted, names = _spelled(str(name)), {_spelled(each): each for each in known}
    found = get_close_matches(wanted, names, n=1, cutoff=0.6)
    return f"; did you mean {names[found[0]]}?" if found else ""


def _spelled(name: str) -> str:
    """Normalize a name: drop case, dashes and underscores, and spell out the leading 1 of 1F1B."""
    plain = name.lower().replace("-", "").replace("_", "")
    return f"one{plain[1:]}" if plain.startswith("1") else plain
