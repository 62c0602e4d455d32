"""Candidates by their bounds, the lowest first. One whose bound was raised goes back to its new place."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush, merge

from meshwright.planners._search.candidate_plans import Candidate


class BoundQueue:
    """Takes candidates in the order of their bounds. Among equal bounds those that come back are first."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._fresh, self._next = candidates, 0
        self._back: list[tuple[float, int, Candidate]] = []

    def lowest(self) -> Candidate | None:
        """Returns the candidate with the lowest bound, which stays in the queue; None if there are no more."""
        fresh = self._fresh[self._next] if self._next < len(self._fresh) else None
        if self._back and (fresh is None or self._back[0][0] <= fresh.bound_s):
            return self._back[0][2]
        return fresh

    def pop(self) -> None:
        """Removes the candidate with the lowest bound."""
        if self._back and self.lowest() is self._back[0][2]:
            heappop(self._back)
        else:
            self._next += 1

    def put_back(self, candidate: Candidate) -> None:
        """Adds a candidate; among equal bounds the first that was added comes first."""
        heappush(self._back, (candidate.bound_s, self._next, candidate))

    def rest(self) -> list[Candidate]:
        """Returns what was not removed, the lowest bound first."""
        back = [candidate for _, _, candidate in sorted(self._back, key=lambda item: item[:2])]
        return list(merge(back, self._fresh[self._next :], key=lambda candidate: candidate.bound_s))
