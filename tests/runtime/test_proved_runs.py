"""What runs is proved, and what is proved runs right: hand-made lists on real workers, compared with one process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from meshwright import MeshwrightError, Parallel, Placement, Recompute, Schedule, check, lower, schedules
from meshwright.ir.action import parse
from meshwright.passes import check as proofs
from meshwright.passes.check import prove
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.parameters.parameters import Rules
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.stage.precision import Precision
from meshwright.train.models import small_models as models
from meshwright.train.prepared import PreparedRun
from meshwright.train.setup.build_schedule import lists_for
from meshwright.train.verify.certificate import Certificate, certify
from meshwright.train.verify.verify import momentum, rank_trace, serial_trace
from meshwright.train.verify.verify_case import Case
from tests.conftest import Pool
from tests.support.mutations import handmade, low
from tests.support.thin import thinned

BUILD = partial(models.mlp, layers=6, width=6)


def trained(pool: Pool, schedule: Schedule, *, steps: int = 2, rows: int = 12, transport: str = "auto") -> Certificate:
    """A lowered schedule of one's own on workers, against one process; lists of several rounds are walked once."""
    rounds = schedule.steps if schedule.flush else 1
    steps = schedule.steps if not schedule.flush else steps if rounds == 1 else 1
    plan = Parallel(pp=schedule.workers, microbatches=schedule.microbatches * rounds, transport=transport)
    batch = partial(models.mlp_batch, rows=rows, width=6)
    case = Case(BUILD, batch, plan, steps, "float64", 0, None, momentum, Precision())
    run = PreparedRun(plan, schedule, None, None)
    (reference,) = pool.run(serial_trace, case, run, ranks=1)
    traces = pool.run(rank_trace, case, run, ranks=schedule.workers)
    return certify(case, run.open(case.model()), schedule, reference, traces)


CROSSED = low(
    "0F0 0F1 0act0>1 0act1>1 0grad0<1 0B0 0grad1<1 0B1 0S N 0U",
    "0act1<0 0act0<0 1F0 1F1 1B0 0grad0>0 1B1 0grad1>0 1S N 1U",
    microbatches=2,
)


def test_an_engine_refuses_what_the_proof_refuses(pool: Pool) -> None:
    assert check(CROSSED).law == "channel order"
    with pytest.raises(MeshwrightError, match="breaks the law of channel order at 0act0>1 on worker 0"):
        trained(pool, CROSSED)
    stale = replace(CROSSED, proof=prove(lower(schedules.build("onef1b", workers=2, microbatches=2))).proof)
    with pytest.raises(MeshwrightError, match="breaks the law of channel order"):
        trained(pool, stale)


def test_a_proof_travels_and_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    proved = lists_for(Parallel(pp=2, microbatches=4))
    again = pickle.loads(pickle.dumps(proved))
    assert again.proof == proved.proof == proved.digest == again.digest and proved == replace(proved, proof="")

    def unwanted(schedule: Schedule) -> None:
        pytest.fail("proved twice")

    monkeypatch.setattr(proofs, "check", unwanted)
    assert prove(proved) is proved and prove(again) is again
    monkeypatch.undo()
    other = replace(proved, microbatches=2)
    assert other.proof and other.proof != other.digest
    assert prove(replace(other, microbatches=4)).proof == proved.proof


MUTABLE = [
    lambda s: replace(s, period=tuple(map(list, s.period))),
    lambda s: replace(s, period=list(s.period)),
    lambda s: replace(s, ties=[(0, 1)]),
    lambda s: replace(s, ties=([0, 1],)),
    lambda s: replace(s, turns=([parse("0F0"), parse("1F0")],)),
    lambda s: replace(s, recompute=[Recompute(0.0), Recompute(0.0)]),
    lambda s: replace(s, placement=Placement([*s.placement.teams])),
    lambda s: replace(s, placement=Placement(tuple(tuple(tuple(map(list, t)) for t in copy) for copy in s.placement.teams))),
    lambda s: replace(s, norm=[True]),
]


@pytest.mark.parametrize("change", thinned(MUTABLE))
def test_what_could_change_after_its_proof_is_not_proved(change: Callable[[Schedule], Schedule]) -> None:
    """Neither afresh nor with the proof of equal lists that cannot change."""
    proved = prove(lower(schedules.build("onef1b", workers=2, microbatches=2)))
    loose = change(proved)
    assert not check(loose).ok and loose.digest != proved.digest
    for given in (loose, replace(loose, proof="")):
        with pytest.raises(MeshwrightError, match=r"must|are"):
            prove(given)


def test_a_pickle_brings_no_digest_of_its_own() -> None:
    """A proof is compared with the lists that came, not with what the sender had computed of its own."""
    proved = prove(lower(schedules.build("onef1b", workers=2, microbatches=2)))
    vars(proved)["digest"] = "of other lists"
    assert pickle.loads(pickle.dumps(proved)).digest == replace(proved).digest != proved.digest


def test_digests_differ_where_schedules_do() -> None:
    base = lower(schedules.build("chimera", workers=2, microbatches=2))
    others = [
        replace(base, name="x"),
        replace(base, ring=True),
        replace(base, ties=((0, 1),)),
        replace(base, period=base.period[::-1]),
        replace(base, period=(), prologue=base.period),
        base.with_lists((base.lists[0][:-1], base.lists[1])),
        base.with_lists(((*base.lists[0], base.lists[1][0]), base.lists[1][1:])),
        lower(schedules.build("dualpipe", workers=2, microbatches=2)),
    ]
    assert len({schedule.digest for schedule in (base, *others)}) == 1 + len(others)
    assert replace(base).digest == base.digest


WIDE = {
    "teams of two and one": (((0, 1),), ((2,),)),
    "one and two": (((0,),), ((1, 2),)),
    "two and two": (((0, 1),), ((2, 3),)),
    "two and two, the same": (((0, 1),), ((1, 0),)),
}


@pytest.mark.parametrize("rows", [12, 7, 3])
@pytest.mark.parametrize("what", WIDE)
def test_halved_backwards_on_a_team_are_right(pool: Pool, what: str, rows: int) -> None:
    """Whole forwards: a team shares each half, so that forwards and backwards mean the same rows."""
    placement = Placement((WIDE[what],))
    lists: list[list[str]] = [[] for _ in range(placement.workers)]
    for stage, (team,) in enumerate(WIDE[what]):
        for worker in team:
            lists[worker] += [f"{stage}F{mb}" for mb in (0, 1)]
    for stage, (team,) in reversed(list(enumerate(WIDE[what]))):
        for worker in team:
            lists[worker] += [f"{stage}B{mb}.{half}" for mb in (0, 1) for half in (1, 0)]
    schedule = handmade(*map(" ".join, lists), placement=placement, microbatches=2, parts=2)
    found = trained(pool, lower(schedule), rows=rows)
    assert found.passed, (found.max_relative_error, found.problems)


def test_halves_of_forwards_and_backwards_on_teams_are_right(pool: Pool) -> None:
    placement = Placement(((((0, 1),), ((2, 0, 1),)),))
    first = "0F0.0 0F0.1 1F0.0 1F0.1 1B0.0 1B0.1 0B0.0 0B0.1"
    schedule = handmade(first, first, "1F0.0 1F0.1 1B0.0 1B0.1", placement=placement, parts=2)
    assert trained(pool, lower(schedule), rows=11).passed


@pytest.mark.parametrize("transport", ["torch", "shared"])
@pytest.mark.parametrize("sync", ["eager", "ring"])
def test_two_rounds_in_one_list_are_right(pool: Pool, sync: str, transport: str) -> None:
    """With a flush, updates in the middle of the lists; in a ring sums are still handed on when the next round has begun."""
    teams = Placement(((((0,), (1,)), ((1,), (0,))),))
    rows = []
    for worker in (0, 1):
        parts = []
        for k in (0, 1):
            mbs = (2 * k, 2 * k + 1)
            forward = [f"0F{mbs[worker]}#{k}", f"1F{mbs[1 - worker]}#{k}"]
            back = [f"1B{mbs[1 - worker]}#{k}", f"0B{mbs[worker]}#{k}"]
            parts += [*forward, *back, f"0S#{k}", f"1S#{k}", f"0U#{k}", f"1U#{k}"]
        rows.append(" ".join(text.replace("#0", "") for text in parts))
    schedule = lower(handmade(*rows, placement=teams, microbatches=2), sync=sync)
    assert check(schedule).ok, str(check(schedule))
    found = trained(pool, schedule, transport=transport)
    assert found.passed, (found.max_relative_error, found.problems)


def test_weight_gradients_that_come_late_go_to_their_own_round(pool: Pool) -> None:
    """Without a flush: W of round 0 after the backward of round 1 on the same version."""
    schedule = handmade("0F0 0F1 0I0 0B1 0W0 0U 0U#1", "1F0 1I0 1F1 1B1 1W0 1U 1U#1", flush=False)
    lowered = lower(schedule)
    lowered = lowered.with_lists(lowered.lists)
    found = trained(pool, lowered)
    assert found.passed, (found.max_relative_error, found.problems)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Half of the rate after each update."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


class Squeezed(torch.optim.SGD):
    """An optimizer that changes the gradients it is given."""

    def step(self, closure: object = None) -> None:
        """Halve them first."""
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        super().step()


def squeezed(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Squeezed(params, lr=0.05, momentum=0.9)


RINGS = [("cyclic", 3, "eager"), ("cyclic", 2, "eager"), ("chimera", 2, "ring"), ("chimera", 4, "ring"), ("onef1b", 2, "eager")]


@pytest.mark.parametrize(("schedule", "pp", "sync"), RINGS)
def test_clipping_and_rates_equal_one_process(pool: Pool, schedule: str, pp: int, sync: str) -> None:
    """The copies of a ring stay equal to the bit, though each update shortens the gradient that is handed on."""
    batch = partial(models.mlp_batch, rows=12, width=6)
    plan = {"schedule": schedule, "pp": pp, "microbatches": pp, "sync": sync}
    found = pool.verify(BUILD, batch, **plan, steps=3, clip=0.01, scheduler=decay)
    assert found.passed and found.replicas_equal, (found.max_relative_error, found.problems)
    assert found.clip == 0.01
    plain = pool.verify(BUILD, batch, **plan, steps=3)
    assert plain.losses[-1] != found.losses[-1], "both change what is trained"


def test_an_optimizer_may_change_its_gradients_in_a_ring(pool: Pool) -> None:
    batch = partial(models.mlp_batch, rows=12, width=6)
    found = pool.verify(BUILD, batch, schedule="cyclic", pp=3, microbatches=3, steps=3, optimizer=squeezed)
    assert found.passed and found.replicas_equal, (found.max_relative_error, found.problems)


def plateau(optimizer: torch.optim.Optimizer) -> object:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"clip": 0.0}, "norm above 0"),
        ({"clip": "1"}, "norm above 0, got '1'"),
        ({"clip": [1]}, "norm above 0"),
        ({"clip": torch.ones(2)}, "norm above 0"),
        ({"dtype": ["a"]}, "no tolerance for"),
        ({"scheduler": 3}, "scheduler must be a function that returns a schedule for an optimizer, got 3"),
        ({"scheduler": plateau}, "ReduceLROnPlateau, which has no step"),
    ],
)
def test_what_verify_cannot_follow_is_refused(pool: Pool, more: dict[str, object], text: str) -> None:
    batch = partial(models.mlp_batch, rows=12, width=6)
    with pytest.raises(MeshwrightError, match=text):
        pool.verify(BUILD, batch, pp=2, microbatches=2, **more)


def opened(schedule: Schedule, microbatches: int, clip: float | None) -> None:
    """An engine of these settings, closed again."""
    layers = Layers.of([layer.double() for layer in BUILD()], schedule.stages)
    Engine(schedule, layers, Settings(momentum, microbatches, rules=Rules(clip=clip))).close()


@pytest.mark.parametrize(("found", "fix"), [(1, "2"), (3, "2"), (4, "2"), (0, "2"), (2.0, "2")])
def test_steps_of_data_that_are_no_whole_rounds_are_refused(pool: Pool, found: int, fix: str) -> None:
    """The lists would leave out rows of every batch, or take a batch in two updates."""
    schedule = prove(lower(schedules.build("onef1b", workers=2, microbatches=2)))
    with pytest.raises(
        MeshwrightError, match=f"1 rounds of 2 microbatches, but a step of data has {found}(?s:.*)microbatches={fix}"
    ):
        pool.run(opened, schedule, found, None, ranks=2)


def test_steps_of_data_that_are_whole_rounds_are_taken(pool: Pool) -> None:
    schedule = lower(handmade("0F0 0F1 0B0 0B1 0S 0U 0F2#1 0F3#1 0B2#1 0B3#1 0S#1 0U#1", microbatches=2))
    for found in (2, 4):
        pool.run(opened, schedule, found, None, ranks=1)
    with pytest.raises(
        MeshwrightError, match=r"2 rounds of 2 microbatches, but a step of data has 6(?s:.*)microbatches=2 or micro"
    ):
        pool.run(opened, schedule, 6, None, ranks=1)


def test_what_has_a_flush_and_no_norm_does_not_clip(pool: Pool) -> None:
    """Clipping unit by unit would be another rule than that of one process."""
    own = lower(handmade("0F0 0F1 0B0 0B1 0U", "1F0 1B0 1F1 1B1 1U", microbatches=2))
    assert check(own).ok and own.flush and not own.norm
    pool.run(opened, own, 2, None, ranks=2)
    with pytest.raises(MeshwrightError, match=r"without its reduction N: .* clip=0\.05"):
        pool.run(opened, own, 2, 0.05, ranks=2)


def test_lists_for_rows_that_a_batch_has_not_are_refused(pool: Pool) -> None:
    """Pieces that are empty for the given number of rows are not sent, so that other numbers would lose rows."""
    placement = Placement(((((0, 1),), ((2,),)),), rows=1)
    schedule = lower(handmade("0F0 0B0", "0F0 0B0", "1F0 1B0", placement=placement))
    assert trained(pool, schedule, rows=1).passed
    with pytest.raises(MeshwrightError, match="share microbatches of 1 rows, microbatch 0 has 4"):
        trained(pool, schedule, rows=4)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("more", [{}, {"clip": 0.01}], ids=["plain", "clipped"])
def test_a_holder_that_adds_nothing_to_a_ring_takes_the_mean(pool: Pool, dp: int, more: dict[str, float]) -> None:
    """One microbatch runs on one of two replicas; the other only receives the sum, and the weight to divide it by."""
    batch = partial(models.mlp_batch, rows=12, width=6)
    found = pool.verify(BUILD, batch, schedule="gems", pp=2, dp=dp, microbatches=1, sync="ring", steps=2, **more)
    assert found.passed and found.replicas_equal, (found.max_relative_error, found.problems)


@pytest.mark.parametrize("transport", ["torch", "shared"])
def test_two_sums_of_one_unit_may_be_under_way_at_once(pool: Pool, transport: str) -> None:
    """A worker that adds nothing to the next round may start its sum before it takes up the last one."""
    lists = "0F0 0B0 0S 0S#1 0U 0U#1", "0S 0U 0F1#1 0B1#1 0S#1 0U#1"
    schedule = lower(handmade(*lists, placement=Placement(((((0,), (1,)),),))))
    assert check(schedule).ok and schedule.steps == 2
    found = trained(pool, schedule, transport=transport)
    assert found.passed, found
