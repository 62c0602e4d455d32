"""Lists of cyclic data parallelism: workers side by side that run all stages, or the same order with stages on their own workers.

    mp   stage j of K has K - j + 1 workers, K (K + 1) / 2 in all; they take microbatches in turn, each holds one at a time
    pp   stage j has one worker, which holds up to K - j + 1 microbatches: 1F1B without a flush, with up to two versions

Microbatch m runs F of stage j (from 0) at time step 2m + j and B at 2m + 2K - 1 - j, as in the replicated form. A worker runs
its actions in the order of these steps, and updates a stage right before the first forward that reads the new version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isqrt

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Action, Op
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import Schedule
from meshwright.schedules._orders.cyclic_turns import Turn, even_turns

Version = Callable[[int, int], int]
"""Returns the version that a microbatch reads of a stage."""


def placement_of(form: str, workers: int, microbatches: int, chunks: int | None) -> Placement:
    """Returns where the stages of a form are. Raises if the number of workers, microbatches or stages is not possible."""
    stages = workers if form == "pp" else (isqrt(8 * workers + 1) - 1) // 2
    needed = stages if form == "pp" else stages * (stages + 1) // 2
    if needed != workers:
        raise MeshwrightError(
            f"cyclic: form=mp has K (K + 1) / 2 workers for K stages, got {workers} workers",
            fix=f"--workers {needed} for {stages} stages, or --workers {needed + stages + 1} for {stages + 1} stages",
        )
    if chunks not in (None, stages):
        raise MeshwrightError(
            f"cyclic: form={form} has {stages} stages on {workers} workers, got chunks={chunks}", fix=f"chunks={stages}"
        )
    if microbatches < stages:
        raise MeshwrightError(
            f"cyclic: form={form} needs at least one microbatch per stage: {stages} stages, got {microbatches} microbatches",
            fix=f"--microbatches {stages}",
        )
    if form == "pp":
        return Placement.line(stages)
    first = [sum(stages - k for k in range(stage)) for stage in range(stages)]
    return Placement((tuple(tuple((first[s] + k,) for k in range(stages - s)) for s in range(stages)),))


def side_by_side(
    workers: int, stages: int, rounds: range, version: Callable[[int, int, int], int], turns: Sequence[Turn]
) -> Schedule:
    """Builds some rounds on workers that run all stages; `version` is what a worker reads of a stage in a round."""
    first, settled = rounds.start, rounds.start + min(len(rounds), 2)

    def round_list(worker: int, round_: int) -> list[Action]:
        mb, entries = workers * round_ + worker, []
        for stage in range(stages):
            wanted = version(worker, stage, round_)
            if wanted > first and wanted > version(worker, stage, round_ - 1):
                entries.append(Action(Op.U, stage, version=wanted - 1))
            entries.append(Action(Op.F, stage, mb, version=wanted))
        return entries + [Action(Op.B, s, mb, version=version(worker, s, round_)) for s in reversed(range(stages))]

    def updates_left(worker: int, end: int) -> list[Action]:
        return [
            Action(Op.U, s, version=k)
            for k in range(first, end)
            for s in reversed(range(stages))
            if k >= version(worker, s, end - 1)
        ]

    prologue = [[a for t in range(first, settled) for a in round_list(w, t)] for w in range(workers)]
    exact = {(a.op, a.stage, a.mb): a for w in range(workers) for t in range(first, settled + 2) for a in round_list(w, t)}
    edges = [(exact[a.op, a.stage, a.mb], exact[b.op, b.stage, b.mb]) for a, b in turns]
    return Schedule(
        "cyclic",
        Placement(((tuple((worker,) for worker in range(workers)),) * stages,)),
        workers,
        period=tuple(tuple(round_list(w, first + 2)) for w in range(workers)) if settled == first + 2 else (),
        prologue=tuple(map(tuple, prologue)),
        drain=tuple(tuple(updates_left(w, settled)) for w in range(workers)),
        repeats=rounds.stop - settled,
        turns=tuple(edge for edge in edges if edge[1].mb < (first + 3) * workers),
        flush=False,
        ring=True,
        first=first,
    )


def placed(placement: Placement, *, microbatches: int, rounds: range, version: Version, turns: bool = False) -> Schedule:
    """Builds some rounds on any placement. With `turns`, workers wait for each other so that the steps above hold exactly."""
    stages, mbs = placement.stages, range(rounds.start * microbatches, rounds.stop * microbatches)
    steps = [(2 * mb + stage, Action(Op.F, stage, mb, version=version(mb, stage))) for mb in mbs for stage in range(stages)]
    steps += [(2 * a.mb + 2 * stages - 1 - a.stage, a._replace(op=Op.B)) for _, a in steps]
    lists: list[list[Action]] = [[] for _ in range(placement.workers)]
    newest = {(worker, stage): rounds.start for worker, held in enumerate(placement.held) for _, stage in held}

    def update(worker: int, stage: int, wanted: int) -> None:
        for k in range(newest[worker, stage], wanted):
            lists[worker].append(Action(Op.U, stage, version=k))
            newest[worker, stage] = k + 1

    for _, action in sorted(steps, key=lambda step: step[0]):
        (worker,) = placement.team(0, action.stage, action.mb)
        if action.op is Op.F:
            update(worker, action.stage, action.version)
        lists[worker].append(action)
    for worker, stage in reversed(list(newest)):
        update(worker, stage, rounds.stop)
    edges = _between_workers(placement, even_turns(stages, range(len(mbs))), mbs.start, version) if turns else []
    return Schedule(
        "cyclic",
        placement,
        microbatches,
        period=(),
        prologue=tuple(map(tuple, lists)),
        repeats=0,
        turns=tuple(edges),
        flush=False,
        ring=True,
        first=rounds.start,
    )


def _between_workers(placement: Placement, turns: Sequence[Turn], start: int, version: Version) -> list[Turn]:
    """Returns the turns from one worker to another, counted from microbatch `start`; the order of a list is enough for others."""
    found = []
    for pair in turns:
        writer, reader = (a._replace(mb=a.mb + start, version=version(a.mb + start, a.stage)) for a in pair)
        if placement.team(0, writer.stage, writer.mb) != placement.team(0, reader.stage, reader.mb):
            found.append((writer, reader))
    return found
