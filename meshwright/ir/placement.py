"""Where stages are placed: (replica, stage) -> teams of workers.

Microbatch m of a stage runs on team m mod len(teams). The workers of a team split its rows: worker k of w takes
rows [b k // w, b (k + 1) // w). A plain pipeline has one team of one worker per stage. A replica is one pipeline of a
bidirectional schedule; data-parallel copies are not part of a placement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import NamedTuple

Team = tuple[int, ...]


class Rows(NamedTuple):
    """A range of rows. Plans and runs split rows with these methods only."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of rows."""
        return self.stop - self.start

    def cut(self, index: int, count: int) -> Rows:
        """Returns part `index` of `count`."""
        size = self.stop - self.start
        return Rows(self.start + size * index // count, self.start + size * (index + 1) // count)

    def piece(self, piece: int, source: int, target: int) -> Rows:
        """Returns the rows that worker i of a team of `source` sends to worker j of a team of `target`.

        `piece` is i * target + j.
        """
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
        rows: How many rows a microbatch has; 0 means any number that every team can divide.

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
        """Places stage s on worker s."""
        return cls.of(lambda _, stage: stage, stages=workers)

    @classmethod
    def looped(cls, workers: int, *, chunks: int) -> Placement:
        """Places stage s on worker s mod D, so that the stages go around the workers `chunks` times."""
        return cls.of(lambda _, stage: stage % workers, stages=workers * chunks)

    @classmethod
    def zigzag(cls, workers: int, *, legs: int) -> Placement:
        """Places stages down the workers, back up, and so on; two legs make a V."""

        def worker(_: int, stage: int) -> int:
            leg, step = divmod(stage, workers)
            return step if leg % 2 == 0 else workers - 1 - step

        return cls.of(worker, stages=workers * legs)

    @classmethod
    def mirrored(cls, workers: int) -> Placement:
        """Two replicas in opposite directions: stage s of replica 1 is on worker D - 1 - s."""
        return cls.of(lambda replica, stage: workers - 1 - stage if replica else stage, stages=workers, replicas=2)

    @property
    def replicas(self) -> int:
        """The number of replicas of the pipeline."""
        return len(self.teams)

    @property
    def stages(self) -> int:
        """The number of stages of a replica."""
        return len(self.teams[0])

    @cached_property
    def workers(self) -> int:
        """The number of workers."""
        return 1 + max(worker for replica in self.teams for teams in replica for team in teams for worker in team)

    @cached_property
    def narrow(self) -> bool:
        """Whether every team is one worker, so that no rows are shared."""
        return all(len(team) == 1 for replica in self.teams for teams in replica for team in teams)

    @cached_property
    def single(self) -> bool:
        """Whether one worker runs all microbatches of a stage of a replica."""
        return all(len(teams) == 1 == len(teams[0]) for replica in self.teams for teams in replica)

    def team(self, replica: int, stage: int, mb: int) -> Team:
        """Returns the workers that share microbatch `mb` of a stage."""
        teams = self.teams[replica][stage]
        return teams[mb % len(teams)]

    @cached_property
    def held(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each worker, the (replica, stage) pairs that it holds, in order."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.workers)]
        for replica, stages in enumerate(self.teams):
            for stage, teams in enumerate(stages):
                for worker in sorted({worker for team in teams for worker in team}):
                    found[worker].append((replica, stage))
        return tuple(tuple(pairs) for pairs in found)

    @cached_property
    def shares(self) -> int:
        """The number of rows used for splitting: `rows` if given, else the smallest number that every team divides."""
        return self.rows or lcm(*(len(team) for replica in self.teams for teams in replica for team in teams))

    def rows_of(self, index: int, width: int) -> Rows:
        """Returns the rows of worker `index` in a team of `width`, out of `shares` rows."""
        return Rows(0, self.shares).cut(index, width)

    def pieces(self, source: Team, target: Team) -> tuple[tuple[int, int, int], ...]:
        """Returns what one team sends to the next: (piece, source worker, target worker), without empty pieces."""
        if len(source) == len(target) == 1:
            return ((-1, source[0], target[0]),)
        known = self._pieces.get((source, target))  # asked for every action of a widened schedule
        if known is None:
            whole = Rows(0, self.shares)
            ends = [(i * len(target) + j, a, b) for i, a in enumerate(source) for j, b in enumerate(target)]
            known = tuple(end for end in ends if whole.piece(end[0], len(source), len(target)).size)
            self._pieces[source, target] = known
        return known

    @cached_property
    def _pieces(self) -> dict[tuple[Team, Team], tuple[tuple[int, int, int], ...]]:
        return {}

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_pieces"}

    def piece_share(self, piece: int, source: Team, target: Team) -> float:
        """Returns the fraction of a microbatch's rows that a piece carries."""
        return 1.0 if piece < 0 else Rows(0, self.shares).piece(piece, len(source), len(target)).size / self.shares
