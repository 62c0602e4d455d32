"""Where stages live: (replica, stage) -> teams of workers.

Microbatch m of a stage runs on team m mod len(teams); the workers of a team share its rows, worker k of w taking
rows [b k // w, b (k + 1) // w). A plain pipeline has one team of one worker per stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import NamedTuple

Team = tuple[int, ...]


class Rows(NamedTuple):
    """A range of rows; how it is cut is said here, for plans and for runs."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many they are."""
        return self.stop - self.start

    def cut(self, index: int, count: int) -> Rows:
        """Part `index` of `count`."""
        size = self.stop - self.start
        return Rows(self.start + size * index // count, self.start + size * (index + 1) // count)

    def piece(self, piece: int, source: int, target: int) -> Rows:
        """What goes from worker i of a team of `source` to worker j of a team of `target`; its number is i * target + j."""
        i, j = divmod(piece, target)
        mine, theirs = self.cut(i, source), self.cut(j, target)
        start = max(mine.start, theirs.start)
        return Rows(start, max(start, min(mine.stop, theirs.stop)))


@dataclass(frozen=True)
class Placement:
    """Which workers serve each stage of each replica.

    Microbatch m of a stage runs on team `m mod len(teams)`. The workers of a team share its rows.

    Args:
        teams: `teams[replica][stage]` is the tuple of teams that serve the stage; a team is a tuple of workers.
        rows: How many rows a microbatch has; 0 stands for a number that every team can divide.

    Examples:
        >>> from meshwright import Placement
        >>> Placement.zigzag(2, legs=2).held
        (((0, 0), (0, 3)), ((0, 1), (0, 2)))
    """

    teams: tuple[tuple[tuple[Team, ...], ...], ...]
    rows: int = 0

    @classmethod
    def of(cls, worker: Callable[[int, int], int], *, stages: int, replicas: int = 1) -> Placement:
        """One worker per stage: `worker(replica, stage)`."""
        return cls(tuple(tuple(((worker(replica, stage),),) for stage in range(stages)) for replica in range(replicas)))

    @classmethod
    def line(cls, workers: int) -> Placement:
        """Stage s on worker s."""
        return cls.of(lambda _, stage: stage, stages=workers)

    @classmethod
    def looped(cls, workers: int, *, chunks: int) -> Placement:
        """Stages go round the workers `chunks` times: stage s on worker s mod D."""
        return cls.of(lambda _, stage: stage % workers, stages=workers * chunks)

    @classmethod
    def zigzag(cls, workers: int, *, legs: int) -> Placement:
        """Stages run down the workers, back up, and so on: two legs make a V."""

        def worker(_: int, stage: int) -> int:
            leg, step = divmod(stage, workers)
            return step if leg % 2 == 0 else workers - 1 - step

        return cls.of(worker, stages=workers * legs)

    @classmethod
    def mirrored(cls, workers: int) -> Placement:
        """Two replicas in opposite directions: stage s of replica 1 on worker D - 1 - s."""
        return cls.of(lambda replica, stage: workers - 1 - stage if replica else stage, stages=workers, replicas=2)

    @property
    def replicas(self) -> int:
        """How many copies of the pipeline there are."""
        return len(self.teams)

    @property
    def stages(self) -> int:
        """How many stages a copy has."""
        return len(self.teams[0])

    @cached_property
    def workers(self) -> int:
        """How many workers there are."""
        return 1 + max(worker for copy in self.teams for teams in copy for team in teams for worker in team)

    def team(self, replica: int, stage: int, mb: int) -> Team:
        """The workers that share microbatch `mb` of a stage."""
        teams = self.teams[replica][stage]
        return teams[mb % len(teams)]

    @cached_property
    def held(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each worker the (replica, stage) pairs that it holds, in order."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.workers)]
        for replica, copy in enumerate(self.teams):
            for stage, teams in enumerate(copy):
                for worker in sorted({worker for team in teams for worker in team}):
                    found[worker].append((replica, stage))
        return tuple(tuple(pairs) for pairs in found)

    @cached_property
    def shares(self) -> int:
        """A row count that every team can split: the given one, or the least that divides evenly."""
        return self.rows or lcm(*(len(team) for copy in self.teams for teams in copy for team in teams))

    def rows_of(self, index: int, width: int) -> Rows:
        """The rows of worker `index` in a team of `width`, of as many as every team can split."""
        return Rows(0, self.shares).cut(index, width)

    def pieces(self, source: Team, target: Team) -> tuple[tuple[int, int, int], ...]:
        """What crosses from one team to the next: (piece, source worker, target worker), empty pieces left out."""
        if len(source) == len(target) == 1:
            return ((-1, source[0], target[0]),)
        whole = Rows(0, self.shares)
        ends = [(i * len(target) + j, a, b) for i, a in enumerate(source) for j, b in enumerate(target)]
        return tuple(end for end in ends if whole.piece(end[0], len(source), len(target)).size)

    def piece_share(self, piece: int, source: Team, target: Team) -> float:
        """Which fraction of a microbatch's rows a piece carries."""
        return 1.0 if piece < 0 else Rows(0, self.shares).piece(piece, len(source), len(target)).size / self.shares
