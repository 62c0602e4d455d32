"""The mesh: every rank has one place, groups and channels are the same on all ranks and stay inside a coordinate."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import lower, schedules
from meshwright.runtime.mesh import Mesh, channels, group_ranks
from meshwright.runtime.program import program

NAMES = ("onef1b", "chimera", "zero_bubble", "hanayo")
SIZES = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))


@given(SIZES)
def test_a_rank_has_one_place(sizes: tuple[int, int, int]) -> None:
    workers, copies, box = sizes
    places = set()
    for rank in range(workers * copies * box):
        mesh = Mesh(workers, copies, rank, box)
        assert mesh.processes == workers * copies * box
        assert mesh.rank_of(mesh.worker) == rank
        assert [at.rank for at in mesh.every_coordinate()] == list(range(mesh.seat * box, (mesh.seat + 1) * box))
        places.add((mesh.worker, mesh.copy, mesh.coordinate))
    assert places == {(w, j, c) for w in range(workers) for j in range(copies) for c in range(box)}


def test_one_rank_counts_the_rows_of_a_copy() -> None:
    counting = [rank for rank in range(12) if Mesh(2, 3, rank, 2).is_first_worker]
    assert counting == [0, 4, 8]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("copies", "box"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_groups_and_channels_stay_at_a_coordinate(name: str, copies: int, box: int) -> None:
    schedule = lower(schedules.build(name, workers=4, microbatches=8))
    first = Mesh(schedule.workers, copies, 0, box)
    groups, lines = group_ranks(first, schedule), channels(first, schedule)
    for rank in range(first.processes):
        mesh = replace(first, rank=rank)
        assert (group_ranks(mesh, schedule), channels(mesh, schedule)) == (groups, lines), "all ranks compute the same"
        for unit in range(schedule.units):
            assert mesh.holders(schedule, unit) in groups
            assert not (ranks := mesh.adding(schedule, unit)) or (rank in ranks and ranks in groups)
        used = {i.channel for i in program(schedule, mesh.worker, mesh.rank_of).instructions if i.channel is not None}
        assert used == {line for line in lines if rank in (line.source, line.target)}
    assert all(len({rank % box for rank in ranks}) == 1 for ranks in groups)
    assert all(line.source % box == line.target % box for line in lines) and len(set(lines)) == len(lines)


@pytest.mark.parametrize("box", [2, 3])
def test_a_box_repeats_the_groups_of_one_rank(box: int) -> None:
    schedule = lower(schedules.build("chimera", workers=4, microbatches=4))
    alone = group_ranks(Mesh(4, 2, 0), schedule)
    assert group_ranks(Mesh(4, 2, 0, box), schedule) == {tuple(r * box + c for r in ranks) for ranks in alone for c in range(box)}


@st.composite
def shuffled(draw: st.DrawFn) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """Sizes of a mesh, and ranks for its places: in any order, with idle ranks between them."""
    sizes = draw(SIZES)
    places = sizes[0] * sizes[1] * sizes[2]
    started = draw(st.permutations(range(places + draw(st.integers(0, 5)))))
    return sizes, tuple(started[:places])


@settings(deadline=None)
@given(shuffled())
def test_ranks_give_every_place_to_the_process_that_they_name(case: tuple[tuple[int, int, int], tuple[int, ...]]) -> None:
    (workers, copies, box), ranks = case
    found = {}
    for rank in range(len(ranks)):
        mesh = Mesh(workers, copies, rank, box, ranks)
        found[(mesh.copy, mesh.worker, mesh.coordinate)] = mesh.started(rank)
        assert mesh.rank_of(mesh.worker) == rank
        assert mesh.shares_seat(rank) and mesh.coordinate_of(rank) == mesh.coordinate
        assert mesh.boxes[mesh.seat][mesh.coordinate] == rank
    expected = [(j, w, c) for j in range(copies) for w in range(workers) for c in range(box)]
    assert found == dict(zip(expected, ranks, strict=True))
    order = [Mesh(workers, copies, rank, box, ranks).started(rank) for rank in range(len(ranks))]
    assert order == sorted(ranks), "the process group counts the ranks in their order"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("copies", "box"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_groups_and_channels_of_shuffled_ranks_are_those_of_the_same_places(name: str, copies: int, box: int) -> None:
    schedule = lower(schedules.build(name, workers=4, microbatches=8))
    count = schedule.workers * copies * box
    ranks = tuple(2 * ((7 * place + 3) % count) for place in range(count))
    ranks = ranks if len(set(ranks)) == count else tuple(2 * (count - 1 - place) for place in range(count))
    plain, mesh = Mesh(schedule.workers, copies, 0, box), Mesh(schedule.workers, copies, 0, box, ranks)
    at = [sorted(ranks).index(rank) for rank in ranks]  # the rank of a place in the process group
    moved = {tuple(sorted(at[place] for place in group)) for group in group_ranks(plain, schedule)}
    assert group_ranks(mesh, schedule) == moved
    lines = {(at[line.source], at[line.target], line.kind) for line in channels(plain, schedule)}
    assert {(line.source, line.target, line.kind) for line in channels(mesh, schedule)} == lines
    for rank in range(count):
        here = replace(mesh, rank=rank)
        assert (group_ranks(here, schedule), channels(here, schedule)) == (group_ranks(mesh, schedule), channels(mesh, schedule))
        for unit in range(schedule.units):
            assert set(here.writers(schedule, unit)) == {at[p] for p in replace(plain, rank=0).writers(schedule, unit)}
            assert list(here.holders(schedule, unit)) == sorted(here.holders(schedule, unit)), "as torch numbers a group"
