"""The one exception that users of Meshwright catch: what is wrong, with the numbers, and what to do."""

from __future__ import annotations


class MeshwrightError(Exception):
    """Something a user can cause and mend; `fix` says how."""

    def __init__(self, what: str, *, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return self.what if self.fix is None else f"{self.what}\n  try: {self.fix}"
