"""Random legal schedules that no paper has, with random costs and clusters: what the laws are tried on.

A schedule is drawn by running it: of all actions whose inputs exist, one is picked and goes to the end of its worker's
list, so the lists never wait for each other in a ring. Placements have several stages per worker in any order, several
replicas, teams of uneven width and several teams per stage; backwards are whole, split or halved; there may be ties,
recompute inside or early, cells and turns. Every generator takes a `random.Random`, so a seed names a case, and the
hypothesis strategies below draw the same cases in a form that shrinks.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from math import lcm
from random import Random
from typing import NamedTuple

from hypothesis import strategies as st

from meshwright import Action, Cell, Cluster, Duplex, Link, MeshwrightError, Op, Placement, Recompute, Schedule, StageCost
from meshwright import schedules as by_name
from tests.support.cases import usual_steps

NONE = -1
SYNCS = ("eager", "lazy", "eager-opt")


class Case(NamedTuple):
    """A schedule and all that its simulation needs."""

    schedule: Schedule
    costs: tuple[StageCost, ...]
    cluster: Cluster | None
    sync: str
    overlap: float


class Task(NamedTuple):
    """An action on one worker of its team."""

    worker: int
    action: Action


def random_case(rng: Random, **limits: int | bool) -> Case:
    """Everything at random; `limits` are those of `random_schedule`."""
    schedule = random_schedule(rng, **limits)
    costs = random_costs(rng, schedule.stages)
    cluster = random_cluster(rng, schedule.workers)
    return Case(schedule, costs, cluster, rng.choice(SYNCS), rng.choice((0.0, 0.5, 1.0)))


def random_schedule(
    rng: Random,
    *,
    workers: int = 4,
    stages: int = 4,
    microbatches: int = 4,
    replicas: int = 3,
    wide: bool = True,
    cells: bool = True,
    recomputes: bool = True,
) -> Schedule:
    """A legal schedule with a flush; sizes are at most those given."""
    placement = random_placement(
        rng,
        workers=rng.randint(1, workers),
        stages=rng.randint(1, stages),
        replicas=rng.randint(1, replicas),
        wide=wide and rng.random() < 0.5,
    )
    count = rng.randint(1, microbatches)
    replica_of = [rng.randrange(placement.replicas) for _ in range(count)]
    recompute = _random_recompute(rng, placement.stages) if recomputes and rng.random() < 0.5 else None
    parts = rng.choice((1, 1, 2))
    if parts > 1:  # rows that all teams can share in either half
        placement = Placement(placement.teams)
    needs = _needs(rng, placement, replica_of, parts, recompute)
    order = _random_order(rng, needs, cells=cells and rng.random() < 0.5)
    lists: list[list[Action | Cell]] = [[] for _ in range(placement.workers)]
    for worker, entry in order:
        lists[worker].append(entry)
    ties = _random_ties(rng, placement.stages)
    turns = _random_turns(rng, placement, order)
    period = tuple(map(tuple, lists))
    return Schedule("random", placement, count, period, parts=parts, ties=ties, recompute=recompute, turns=turns)


def random_placement(rng: Random, *, workers: int, stages: int, replicas: int, wide: bool) -> Placement:
    """Stages anywhere; `wide` has teams of up to three workers over rows that they may not share evenly, or not at all."""

    def team() -> tuple[int, ...]:
        width = rng.randint(1, min(3, workers)) if wide else 1
        return tuple(rng.sample(range(workers), width))

    several = rng.random() < 0.4
    teams = tuple(
        tuple(tuple(team() for _ in range(rng.randint(1, 3) if several else 1)) for _ in range(stages)) for _ in range(replicas)
    )
    return Placement(teams, rows=rng.choice((0, 0, 1, 2, 3, 5, 7)) if wide else 0)


def random_costs(rng: Random, stages: int, *, recompute: bool = True) -> tuple[StageCost, ...]:
    """One row per stage; zeros, equal numbers (ties in time) and uneven ones."""
    again = recompute and rng.random() < 0.3

    def number() -> float:
        return rng.choice((0.0, 1.0, 2.0, float(rng.randint(1, 5)), 3.0 * rng.random()))

    return tuple(
        StageCost(
            forward_s=number(),
            input_s=number(),
            weight_s=number(),
            recompute_s=number() if again else 0.0,
            sync_s=number(),
            activation_bytes=number(),
            output_bytes=number(),
            gradient_bytes=number(),
            parameter_bytes=number(),
        )
        for _ in range(stages)
    )


def random_cluster(rng: Random, workers: int) -> Cluster | None:
    """Free messages, one kind of link, or links that differ by pair and by direction."""
    if rng.random() < 0.2:
        return None

    def link() -> Link:
        return Link(rng.choice((0.0, 0.25, rng.random())), rng.choice((float("inf"), 1.0, 0.5 + 4.0 * rng.random())))

    links = {}
    if rng.random() < 0.6:
        pairs = [(a, b) for a in range(workers) for b in range(workers) if a != b]
        links = {pair: link() for pair in pairs if rng.random() < 0.5}
    return Cluster(link(), links, rng.choice((Duplex.FULL, Duplex.HALF)))


def rows_of(placement: Placement, team: tuple[int, ...], worker: int) -> frozenset[int]:
    """The rows of a microbatch that a worker of a team has: counted out row by row."""
    return frozenset(row for row in range(row_count(placement)) if worker == team[_owner(placement, team, row)])


def row_count(placement: Placement) -> int:
    """The rows of a microbatch: as given, or as few as all teams can share."""
    return placement.rows or lcm(*(len(team) for copy in placement.teams for teams in copy for team in teams))


def _owner(placement: Placement, team: tuple[int, ...], row: int) -> int:
    rows, width = row_count(placement), len(team)
    return next(k for k in range(width) if rows * k // width <= row < rows * (k + 1) // width)


def _random_recompute(rng: Random, stages: int) -> tuple[Recompute, ...]:
    return tuple(Recompute(rng.choice((0.0, 0.25, 1.0, 1.0)), early=rng.random() < 0.5) for _ in range(stages))


def _random_ties(rng: Random, stages: int) -> tuple[tuple[int, ...], ...]:
    if stages < 2 or rng.random() < 0.6:
        return ()
    groups = (tuple(sorted(rng.sample(range(stages), rng.randint(2, stages)))) for _ in range(rng.randint(1, 2)))
    return tuple(dict.fromkeys(groups))


def _random_turns(rng: Random, placement: Placement, order: list[tuple[int, Action | Cell]]) -> tuple[tuple[Action, Action], ...]:
    """Control edges along the drawn order, at most one into each action; only where an action has one worker."""
    narrow = all(len(team) == 1 for copy in placement.teams for teams in copy for team in teams)
    if not narrow or len(order) < 2 or rng.random() < 0.7:
        return ()
    turns = {}
    for _ in range(rng.randint(1, 3)):
        first, second = sorted(rng.sample(range(len(order)), 2))
        turns[_one(rng, order[second][1])] = _one(rng, order[first][1])
    return tuple((writer, reader) for reader, writer in turns.items())


def _one(rng: Random, entry: Action | Cell) -> Action:
    return rng.choice(entry) if isinstance(entry, Cell) else entry


def _needs(
    rng: Random, placement: Placement, replica_of: list[int], parts: int, recompute: tuple[Recompute, ...] | None
) -> dict[Task, set[Task]]:
    """Every task with the tasks whose output it reads: rows that two neighbours share, and what is its own."""
    needs: dict[Task, set[Task]] = {}
    split = rng.choice((0.0, 1.0, 0.5))
    last = placement.stages - 1
    for mb, replica in enumerate(replica_of):
        halves = (NONE,) if parts == 1 else (0, 1)
        forward_halves = halves if rng.random() < 0.5 else (NONE,)
        teams = [placement.team(replica, stage, mb) for stage in range(placement.stages)]
        back: dict[tuple[int, int, int], Task] = {}
        for stage in reversed(range(placement.stages)):
            early = recompute is not None and recompute[stage].early and recompute[stage].share > 0
            for worker in teams[stage]:
                mine = rows_of(placement, teams[stage], worker)

                def near(other: int, mine: frozenset[int] = mine, teams: list[tuple[int, ...]] = teams) -> list[int]:
                    return [w for w in teams[other] if mine & rows_of(placement, teams[other], w)]

                for part in forward_halves:
                    task = Task(worker, Action(Op.F, stage, mb, replica, part=part))
                    before = near(stage - 1) if stage else []
                    needs[task] = {Task(w, task.action._replace(stage=stage - 1)) for w in before}
                for part in halves:
                    kept = part if part in forward_halves else NONE
                    own = Task(worker, Action(Op.F, stage, mb, replica, part=kept))
                    if early:
                        again = Task(worker, Action(Op.R, stage, mb, replica, part=part))
                        needs[again] = {own}
                        own = again
                    halved = rng.random() < split
                    task = Task(worker, Action(Op.I if halved else Op.B, stage, mb, replica, part=part))
                    behind = near(stage + 1) if stage < last else []
                    needs[task] = {own} | {back[stage + 1, w, part] for w in behind}
                    back[stage, worker, part] = task
                    if halved:
                        needs[Task(worker, task.action._replace(op=Op.W))] = {task}
    return needs


def _random_order(rng: Random, needs: dict[Task, set[Task]], *, cells: bool) -> list[tuple[int, Action | Cell]]:
    """Run the tasks in a random order that keeps all needs: new ones first, old ones first, or any."""
    opens: dict[Task, list[Task]] = defaultdict(list)
    for task, before in needs.items():
        for need in before:
            opens[need].append(task)
    left = {task: len(before) for task, before in needs.items()}
    ready = [task for task, count in left.items() if not count]
    newest, oldest = rng.choice(((0.0, 0.0), (0.8, 0.0), (0.0, 0.8), (0.4, 0.4)))
    order: list[tuple[int, Action | Cell]] = []
    while ready:
        dice = rng.random()
        task = ready[-1] if dice < newest else ready[0] if dice < newest + oldest else rng.choice(ready)
        pair = [task]
        if cells and rng.random() < 0.5:
            pair += [other for other in ready if _overlaps(task, other)][:1]
        order.append((task.worker, task.action if len(pair) == 1 else Cell(task.action, pair[1].action)))
        for done in pair:
            ready.remove(done)
            for later in opens[done]:
                left[later] -= 1
                if not left[later]:
                    ready.append(later)
    return order


def _overlaps(task: Task, other: Task) -> bool:
    """May two ready tasks form a cell: a forward and a backward of one worker?"""
    ops = {task.action.op, other.action.op}
    return task.worker == other.worker and Op.F in ops and bool(ops & {Op.B, Op.I})


def cases(**limits: int | bool) -> st.SearchStrategy[Case]:
    """Random cases that hypothesis can shrink."""
    return st.randoms(use_true_random=False).map(lambda rng: random_case(rng, **limits))


def schedules(**limits: int | bool) -> st.SearchStrategy[Schedule]:
    """Random legal schedules."""
    return st.randoms(use_true_random=False).map(lambda rng: random_schedule(rng, **limits))


def costs(stages: int) -> st.SearchStrategy[tuple[StageCost, ...]]:
    """Random rows of costs."""
    return st.randoms(use_true_random=False).map(lambda rng: random_costs(rng, stages))


def clusters(workers: int) -> st.SearchStrategy[Cluster | None]:
    """Random clusters."""
    return st.randoms(use_true_random=False).map(lambda rng: random_cluster(rng, workers))


def named() -> list[tuple[str, dict[str, object]]]:
    """Every schedule by name with every set of options worth comparing."""
    return [(name, options) for name in by_name.names() for options in by_name.compared(name)]


def label(value: object) -> str | None:
    """How a parameter of a test prints: options as key=value."""
    return ",".join(f"{key}={option}" for key, option in value.items()) or "default" if isinstance(value, dict) else None


def build(name: str, options: dict[str, object], *, workers: int = 4, steps: int | None = None, times: int = 2) -> Schedule:
    """A named schedule with `times` as many microbatches as workers, or as many where it takes no more."""
    steps = steps or usual_steps(name)
    try:
        return by_name.build(name, workers=workers, microbatches=times * workers, steps=steps, **options)
    except MeshwrightError:
        return by_name.build(name, workers=workers, microbatches=workers, steps=steps, **options)


def built(name: str, options: dict[str, object], sizes: tuple[int, ...]) -> list[Schedule]:
    """A named schedule at those of some numbers of workers that it takes; at least at one."""
    found = []
    for workers in sizes:
        with suppress(MeshwrightError):
            found.append(build(name, options, workers=workers))
    assert found, f"{name} takes none of {sizes} workers"
    return found
