"""Own schedules and costs in a plan: as files, objects and functions, what follows from them, and that they run as drawn."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import meshwright as mw
from meshwright import MeshwrightError, Parallel, Schedule, StageCost, schedules
from meshwright.ir.plan.plan_file import asked, plan_table, read_plan
from meshwright.passes.widen import widen
from meshwright.report.terminal import timeline_text
from meshwright.train.models import small_models as models
from meshwright.train.setup.build_schedule import built_for, lists_for, stages_of
from meshwright.train.setup.settled_plan import settled
from tests.conftest import Pool
from tests.support.command import app
from tests.support.trainers import gpt2, ours, text

UNEVEN = (
    StageCost(4.0, 4.0, 0.5),
    StageCost(2.0, 4.0, 4.0),
    StageCost(2.5, 4.0, 2.0),
    StageCost(1.0, 1.0, 2.0),
)
SHAPED: list[tuple[str, dict[str, Any]]] = [
    ("zero_bubble", {"variant": "auto", "memory": 4}),
    ("onef1b", {"memory": 4}),
    ("chimera", {"split": True}),
    ("listed", {"memory": 4}),
    ("listed", {"strict": False}),
]


def fresh(name: str = "onef1b", workers: int = 2, microbatches: int = 4, **options: object) -> Schedule:
    return schedules.build(name, workers=workers, microbatches=microbatches, **options)


def turned(schedule: Schedule) -> Schedule:
    """The same work in another order: forwards of the first worker two by two the other way round."""
    first = list(schedule.period[0])
    forwards = [i for i, entry in enumerate(first) if str(entry).startswith("0F")]
    first[forwards[0]], first[forwards[1]] = first[forwards[1]], first[forwards[0]]
    return replace(schedule, name="turned", period=(tuple(first), *schedule.period[1:]))


def own(*, workers: int = 2, microbatches: int = 4, extra: int = 0) -> Schedule:
    """A user's builder, with an option."""
    assert extra >= 0
    return replace(fresh("gpipe", workers, microbatches), name="mine")


def bare() -> Schedule:
    """A builder that takes nothing."""
    return replace(fresh("onef1b", 3, 6), name="bare")


def by_costs(workers: int, microbatches: int, costs: Sequence[StageCost] | None = None) -> Schedule:
    """A builder that looks at costs."""
    found = fresh("onef1b", workers, microbatches)
    return replace(found, name="+".join(f"{c.forward_s:.2f}" for c in costs or ()) or "unit")


def loud() -> Schedule:
    """A builder with a mistake."""
    raise KeyError("mistake")


def wrong() -> int:
    """No schedule."""
    return 5


# -- what follows from an order


def test_sizes_follow_from_an_order_or_are_refused() -> None:
    schedule = fresh("zbv", 4, 8)
    plan = Parallel.of({"schedule": schedule, "dp": 2})
    assert (plan.pp, plan.microbatches, plan.processes, plan.schedule, plan.order) == (4, 8, 8, "zbv", schedule)
    assert stages_of(plan) == 8
    for given, said in (
        ({"pp": 1}, "pp is 1, but zbv is for 4 workers"),
        ({"microbatches": 6}, "microbatches is 6, but zbv has 8 per round"),
        ({"schedule": "gpipe"}, "the schedule is 'gpipe', but the order is called 'zbv'"),
        ({"options": {"x": 1}}, "options are"),
    ):
        with pytest.raises(MeshwrightError, match=said):
            Parallel.of({"order": schedule, **given})
    with pytest.raises(MeshwrightError, match="both a schedule"):
        Parallel.of({"order": schedule, "schedule": schedule})


def test_widths_follow_from_teams() -> None:
    line = fresh("onef1b", 2, 4)
    wide = widen(line, (2, 1))
    plan = Parallel(order=wide)
    assert (plan.pp, plan.width, plan.processes) == (2, (2, 1), 3)
    assert lists_for(plan).lists == lists_for(Parallel(order=line, width=(2, 1))).lists
    assert Parallel(order=wide, pp=2, width=(2, 1)) == plan
    with pytest.raises(MeshwrightError, match=r"width is \(1, 2\), but the teams of onef1b have \(2, 1\)"):
        Parallel(order=wide, width=(1, 2))


@pytest.mark.parametrize("name", schedules.names())
def test_any_schedule_is_a_plan_that_a_file_holds(name: str, tmp_path: Path) -> None:
    schedule = fresh(name, 4, 4, **({"steps": 4} if "steps" in schedules.parameters(name) else {}))
    for order in (schedule, mw.lower(schedule)):
        plan = Parallel(order=order, costs=UNEVEN[:1] * order.stages)
        (tmp_path / "plan.json").write_text(mw.plan_to_json(plan))
        again = Parallel.of(read_plan(tmp_path / "plan.json"))
        assert again == plan and again.order == order and again.costs == plan.costs
        assert Parallel.of(plan_table(plan)) == plan == Parallel.of(asked(plan))
        assert settled(again) == plan
    assert json.loads(mw.plan_to_json(Parallel(order=schedule)))["order"] == json.loads(mw.schedule_to_json(schedule))


def test_files_and_functions_become_orders(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(mw.schedule_to_json(own(workers=3, microbatches=6)))
    (tmp_path / "torch.csv").write_text(mw.to_csv(fresh("zbv", 2, 4)))
    for given, found in (
        ({"schedule": str(tmp_path / "own.json")}, own(workers=3, microbatches=6)),
        ({"schedule": tmp_path / "torch.csv"}, replace(fresh("zbv", 2, 4), name="torch")),
        ({"schedule": f"{__name__}:bare"}, bare()),
        ({"schedule": f"{__name__}:own"}, own()),
        ({"schedule": f"{__name__}:own", "pp": 4, "microbatches": 8}, own(workers=4, microbatches=8)),
        ({"schedule": f"{__name__}:own", "options": {"extra": "2"}}, replace(own(), options=(("extra", 2),))),
    ):
        for plan in (settled(Parallel.of(given)), settled(Parallel(**given)), settled(Parallel.of(asked(Parallel(**given))))):
            assert plan.order == found and (plan.pp, plan.microbatches) == (found.workers, found.microbatches)
            assert settled(plan) == plan


def test_own_functions_that_cannot_be_used() -> None:
    for name, given, said in (
        ("bare", {"pp": 2}, "pp is 2, but bare is for 3 workers"),
        ("bare", {"options": {"x": 1}}, "has no option 'x'"),
        ("own", {"options": {"extra": "many"}}, "option extra cannot be 'many'"),
        ("loud", {}, "raised KeyError: 'mistake'"),
        ("wrong", {}, "returned int"),
        ("nothing", {}, "cannot import"),
    ):
        with pytest.raises(MeshwrightError, match=said):
            settled(Parallel.of({"schedule": f"{__name__}:{name}", **given}))
    with pytest.raises(MeshwrightError, match=r"cannot read the schedule nowhere\.json"):
        settled(Parallel(schedule="nowhere.json"))


def test_an_order_is_proved_before_anything_runs() -> None:
    good = fresh("onef1b", 2, 2)
    stuck = replace(good, period=((good.period[0][0], *reversed(good.period[0][1:])), good.period[1]))
    with pytest.raises(MeshwrightError, match="breaks the law of order"):
        settled(Parallel(order=replace(good, period=(good.period[0][::-1], good.period[1]))))
    with pytest.raises(MeshwrightError, match="breaks the law of"):
        settled(Parallel(order=stuck))
    with pytest.raises(MeshwrightError, match="only forwards"):
        settled(Parallel(order=mw.forward_only(good)))
    with pytest.raises(MeshwrightError, match="2 rounds of 1 microbatches between two flushes"):
        settled(Parallel(order=replace(good, microbatches=1)))
    low = mw.lower(good)
    with pytest.raises(MeshwrightError, match="is already lowered: sync="):
        settled(Parallel(order=low, sync="lazy"))
    with pytest.raises(MeshwrightError, match="is already lowered: recompute="):
        settled(Parallel(order=low, recompute="inline"))
    with pytest.raises(MeshwrightError, match=r"is lowered for the ties \(\), but the stages of the model share"):
        lists_for(Parallel(order=low), ties=((0, 1),))
    with pytest.raises(MeshwrightError, match=r"has the ties \(\(0, 1\),\)"):
        lists_for(Parallel(order=replace(good, ties=((0, 1),))))


def test_an_order_without_a_flush_has_as_many_rounds_as_steps() -> None:
    order = fresh("pipedream_2bw", 2, 4, steps=4)
    plan = Parallel(order=order)
    for steps in (3, 5, 9):
        assert (
            lists_for(plan, steps=steps).lists
            == lists_for(Parallel(pp=2, microbatches=4, schedule="pipedream_2bw"), steps=steps).lists
        )
    rounds = fresh("pipedream", 2, 3, steps=4)
    assert (rounds.microbatches, Parallel(order=rounds, microbatches=3).microbatches) == (1, 3)
    with pytest.raises(MeshwrightError, match=r"at least \d+ rounds"):
        lists_for(Parallel(order=fresh("pipedream_2bw", 4, 4, steps=8)), steps=1)
    with pytest.raises(
        MeshwrightError, match="has lists for 4 rounds of 4 microbatches, but 5 steps of 4 microbatches need 5 rounds"
    ):
        lists_for(Parallel(order=order.with_lists(order.lists)), steps=5)


# -- costs


@pytest.mark.parametrize(("name", "options"), SHAPED)
def test_costs_of_a_plan_shape_what_runs(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """What `show --costs` draws and writes is, list by list, what a plan with these costs or this order runs."""
    (tmp_path / "costs.json").write_text(mw.costs_to_json(UNEVEN))
    flags = [word for key, value in options.items() for word in ("--option", f"{key}={value}")]
    costs = ["--costs", str(tmp_path / "costs.json")]
    for lowered in ([], ["--lowered"]):
        path = tmp_path / "drawn.json"
        done = CliRunner().invoke(app, ["show", name, "-n", "8", *flags, *costs, "--format", "json", "-o", str(path), *lowered])
        assert done.exit_code == 0, done.output
        drawn = mw.schedule_from_json(path.read_text())
        plan = settled(Parallel.of({"schedule": name, "pp": 4, "microbatches": 8, "options": options, "costs": UNEVEN}))
        stored = mw.plan_from_json(mw.plan_to_json(Parallel(order=drawn, costs=UNEVEN)))
        run = lists_for(plan), lists_for(stored)
        if lowered:
            assert run[0].lists == run[1].lists == drawn.lists
        else:
            assert built_for(plan).lists == built_for(stored).lists == drawn.lists
            assert drawn.lists != built_for(replace(plan, costs=())).lists, "costs that change nothing test nothing"


def test_costs_for_another_number_of_stages_are_refused() -> None:
    plan = Parallel(pp=2, microbatches=4, costs=UNEVEN)
    with pytest.raises(MeshwrightError, match="there are 2 stages, the costs have 4"):
        lists_for(plan)


@pytest.mark.parametrize("name", ["by_costs", "own"])
def test_captured_costs_reach_builders(name: str) -> None:
    plan = settled(Parallel.of({"schedule": f"{__name__}:{name}", "pp": 4, "microbatches": 4}))
    built = built_for(plan, costs=UNEVEN)
    assert built.name == ("4.00+2.00+2.50+1.00" if name == "by_costs" else "mine")
    assert built_for(replace(plan, costs=UNEVEN[::-1])).name == ("1.00+2.50+2.00+4.00" if name == "by_costs" else "mine")


def test_hostile_orders_and_costs_are_refused() -> None:
    schedule = json.loads(mw.schedule_to_json(fresh()))
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    for order in (
        5,
        "x",
        [],
        True,
        {},
        {**schedule, "microbatches": 10**400},
        {**schedule, "period": deep},
        {**schedule, "x": 1},
    ):
        with pytest.raises(MeshwrightError):
            Parallel.of({"order": order})
    for costs in (5, "x", True, {}, [5], [{}, {"forward_s": -1}], [{"forward_s": 10**400}], deep, [{"forward_s": "1"}], [None]):
        with pytest.raises(MeshwrightError):
            Parallel.of({"costs": costs})
    with pytest.raises(MeshwrightError, match="an order in 'parallel' and another one next to it"):
        mw.plan_from_json(json.dumps({"schema": 1, "parallel": {"order": schedule}, "order": schedule}))


# -- runs


def test_verify_runs_own_schedules(pool: Pool, tmp_path: Path) -> None:
    build, data = partial(models.mlp, layers=6), partial(models.mlp_batch, rows=8)
    (tmp_path / "own.json").write_text(mw.schedule_to_json(turned(fresh("gpipe", 2, 4))))
    for given in (
        {"schedule": str(tmp_path / "own.json")},
        {"order": mw.lower(bare())},
        {"schedule": f"{__name__}:own", "pp": 3},
    ):
        certificate = pool.verify(build, data, steps=2, **given)
        assert certificate.passed
        assert certificate.parallel["order"]["name"] == certificate.schedule in ("turned", "bare", "mine")
        json.loads(certificate.to_json())


def test_captured_operations_shape_what_a_trainer_runs(pool: Pool, tmp_path: Path) -> None:
    """Stages of unequal work are not built as equal ones, and every rank has the same lists."""
    plan = {
        "pp": 4,
        "microbatches": 8,
        "schedule": f"{__name__}:by_costs",
        "stages": ["transformer.h.1", "transformer.h.2", "lm_head"],
    }
    trainer = ours(gpt2(), tmp_path, text(), workers=pool.started(), parallel=plan, max_steps=1)
    job = trainer.job(trainer.train_dataset, trains=True)
    names = trainer.run_on_ranks(_schedule_name, job)
    assert len(set(names)) == 1 and len(set(names[0].split("+"))) > 2
    costs = job.run.open(trainer.module).costs
    assert costs is not None and names[0] == "+".join(f"{c.forward_s:.2f}" for c in costs)


def _schedule_name(job: Any) -> str:
    from meshwright.train.loop.on_rank import session_for

    session = session_for(job)
    session.close()
    return session.engine.schedule.name


def test_a_trainer_runs_an_order(pool: Pool, tmp_path: Path) -> None:
    order = turned(fresh("gpipe", 2, 4))
    trainer = ours(gpt2(), tmp_path, text(), workers=pool.started(), parallel={"schedule": order}, max_steps=2)
    assert trainer.args.plan.order == order and trainer.args.plan.microbatches == 4
    assert json.loads(trainer.args.to_json_string())["parallel"]["order"]["name"] == "turned"
    trainer.train()
    plain = ours(gpt2(), tmp_path, text(), workers=pool.started(), parallel={"pp": 2, "microbatches": 4}, max_steps=2)
    plain.train()
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (trainer, plain)]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-5)
    with pytest.raises(MeshwrightError, match="microbatches=4 is not a multiple of gradient_accumulation_steps=3"):
        ours(gpt2(), tmp_path, text(), parallel={"order": order}, gradient_accumulation_steps=3)
    endless = fresh("pipedream_2bw", 2, 4, steps=4)
    with pytest.raises(MeshwrightError, match="a step never ends"):
        ours(gpt2(), tmp_path, text(), parallel={"order": endless}, max_steps=1).train()


def test_a_function_builds_for_the_microbatches_of_the_arguments(tmp_path: Path) -> None:
    more = {"gradient_accumulation_steps": 8, "parallel": {"schedule": f"{__name__}:by_costs", "pp": 2}}
    assert ours(gpt2(), tmp_path, text(), **more).args.plan.microbatches == 8


def test_parallelize_takes_an_order() -> None:
    import torch

    order = replace(fresh("gpipe", 1, 3), name="alone")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    batch = (torch.ones(6, 4), torch.zeros(6, 4))
    with mw.parallelize(model, batch, {"schedule": order}, loss=torch.nn.functional.mse_loss) as session:
        assert session.engine.schedule.name == "alone" and session.parallel.microbatches == 3
        assert session.step(batch).loss > session.step(batch).loss > 0


# -- what a user sees


def test_a_measured_timeline_is_drawn() -> None:
    schedule = fresh("onef1b", 2, 4)
    predicted = mw.simulate(schedule, mw.even_costs(stages=2, workers=2))
    measured = replace(predicted, workers=4, memory=(), parameter_copies=(), lower_bound_s=0.0)
    shown = timeline_text(schedule, measured)
    assert "busy" in shown and "peak activations" not in shown and "lower bound" not in shown
    assert "peak activations" in timeline_text(schedule, predicted) and "lower bound" in timeline_text(schedule, predicted)


def test_code_that_a_plan_file_names_is_announced_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(f'schema = 1\n[parallel]\nschedule = "{__name__}:bare"\n')
    caplog.set_level(logging.WARNING)
    assert ours(gpt2(), tmp_path, text(), parallel=str(path)).args.plan.order == bare()
    assert [r.getMessage() for r in caplog.records] == [
        f"{path} names {__name__}:bare: training imports and runs this code with your rights"
    ]


def test_compare_and_verify_on_the_command_line(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    schedule = turned(fresh("gpipe", 4, 8))
    good.write_text(mw.schedule_to_json(schedule))
    bad.write_text(mw.schedule_to_json(replace(schedule, period=(schedule.period[0][::-1], *schedule.period[1:]))))
    low = mw.lower(schedule)
    (tmp_path / "costs.json").write_text(mw.costs_to_json(UNEVEN))
    words = ["compare", str(good), str(bad), f"{__name__}:own", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    rows = {row["schedule"]: row for row in json.loads(done.output)["rows"]}
    assert rows[str(good)]["step_s"] > 0 and rows[f"{__name__}:own"]["step_s"] == rows["gpipe"]["step_s"]
    assert "breaks the law of order" in rows[str(bad)]["refused"]
    for words, said in (
        (["verify", "mlp", "--schedule", str(bad)], "breaks the law of order"),
        (["verify", "mlp", "--schedule", str(good), "--pp", "2"], "pp is 2, but turned is for 4 workers"),
        (["verify", "mlp", "--schedule", str(good), "-n", "6"], "microbatches is 6, but turned has 8 per round"),
        (["verify", "mlp", "--costs", str(tmp_path / "costs.json")], "there are 2 stages, the costs have 4"),
        (["train", "gpt-tiny", "--schedule", str(bad)], "breaks the law of order"),
        (["train", "gpt-tiny", "--schedule", str(good), "--pp", "2"], "pp is 2, but turned is for 4 workers"),
    ):
        failed = CliRunner().invoke(app, words)
        assert isinstance(failed.exception, MeshwrightError) and said in str(failed.exception), (words, failed.output)
    assert low.lowered
