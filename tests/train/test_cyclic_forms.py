"""`dp_mode="cyclic-pp"` and `"cyclic-mp"` train by the delayed rule, bit for bit, however their steps are cut into segments.

A pipeline adds gradients in the order of microbatches, as one process does. Where several devices hold a parameter (all stages
but the last of the model-parallel form, and tied parameters), each device adds its own gradients first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import Parallel, lower
from meshwright.ir.action import Op, walk
from meshwright.ir.placement import Placement
from meshwright.passes.check import prove
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.stage.stage import Record
from meshwright.schedules._orders.cyclic_forms import placed
from meshwright.train.prepared import RunRequest, prepare
from tests.conftest import Pool
from tests.support.delayed_rule import Delayed, labelled, language
from tests.support.thin import slow
from tests.train.test_cyclic_training import MODELS, RULES, STEPS, batch, cuts_of, equal, stage_of, tools, trained


def device_of(form: str, stages: int, stage: int, microbatch: int) -> int:
    """Where a stage runs a microbatch: stage j of K has one device, or K - j + 1 of them that take turns."""
    return stage if form == "pp" else 100 * stage + microbatch % (stages - stage)


def expected(name: str, form: str, dp: int, stages: int, margin: int | None, *, clip: float | None = None) -> Any:
    model = MODELS[name]()
    optimizer, scheduler = tools(model)
    stage = lambda parameter: stages - 1 if parameter == "lm_head.weight" else stage_of(name, stages, parameter)  # noqa: E731
    rule = Delayed(model, dp, stages, stage, language if name == "gpt2" else labelled, margin)
    rule.device_of = lambda stage, microbatch: device_of(form, stages, stage, microbatch)
    if name == "gpt2":
        rule.aliases = {"lm_head.weight": "transformer.wte.weight"}
    losses = rule.train([batch(name, step, 4 * dp) for step in range(STEPS)], optimizer, scheduler, clip)
    return {n: p.detach() for n, p in model.named_parameters()}, losses


def plan_for(name: str, form: str, stages: int, dp: int, **options: Any) -> dict[str, Any]:
    return {"dp": dp, "dp_mode": f"cyclic-{form}", "options": {**options, "chunks": stages}, "stages": cuts_of(name, stages)}


def ranks_of(form: str, stages: int) -> int:
    return stages if form == "pp" else stages * (stages + 1) // 2


CASES = [
    ("mlp", "pp", 2, 2, "v1"),
    ("convolutions", "pp", 3, 3, "v2"),
    ("gpt2", "pp", 2, 2, "v2"),
    ("mlp", "mp", 3, 3, "v2"),
    *(
        slow(case, several=True)
        for case in [
            *(("mlp", "pp", n, n, rule) for n in (2, 3, 4) for rule in RULES if (n, rule) != (2, "v1")),
            ("mlp", "pp", 4, 2, "v2"),
            ("mlp", "pp", 3, 2, "margin 1"),
            ("convolutions", "pp", 4, 4, "v1"),
            ("convolutions", "pp", 4, 4, "margin 1"),
            ("deep", "pp", 6, 6, "v1"),
            ("deep", "pp", 6, 6, "v2"),
            ("gpt2", "pp", 3, 3, "v1"),
            ("gpt2", "pp", 4, 4, "v2"),
            ("mlp", "mp", 2, 2, "v1"),
            ("mlp", "mp", 3, 3, "v1"),
            ("mlp", "mp", 3, 3, "margin 1"),
            ("mlp", "mp", 4, 3, "v2"),
            ("convolutions", "mp", 3, 3, "v2"),
            ("gpt2", "mp", 2, 2, "v2"),
            ("gpt2", "mp", 3, 3, "v1"),
        ]
    ),
]


@pytest.mark.parametrize(("name", "form", "dp", "stages", "rule"), CASES)
def test_training_equals_the_delayed_rule_in_one_process(
    name: str, form: str, dp: int, stages: int, rule: str, pool: Pool
) -> None:
    options, margin = RULES[rule]
    plan, ranks = plan_for(name, form, stages, dp, **options), ranks_of(form, stages)
    wanted, losses = expected(name, form, dp, stages, margin)
    whole = pool.run(trained, name, plan, [STEPS], 4 * dp, None, ranks=ranks)
    for weights, found, rates, _ in whole:
        equal(weights, wanted)
        assert found == pytest.approx(losses, rel=1e-6)
        assert rates == pytest.approx([0.05] * 2 + [0.015] * 3 + [0.0045] * 3)
    for segments in ([3, 1, 4], [1] * STEPS):
        again = pool.run(trained, name, plan, segments, 4 * dp, None, ranks=ranks)
        assert again[0][1:3] == whole[0][1:3]
        equal(again[0][0], wanted)


@pytest.mark.slow
def test_four_stages_on_ten_workers() -> None:
    plan, wanted = plan_for("mlp", "mp", 4, 4), expected("mlp", "mp", 4, 4, 0)[0]
    workers = Workers(10)
    try:
        for segments in ([STEPS], [3, 1, 4]):
            for weights, *_ in workers.run(trained, "mlp", plan, segments, 16, None, ranks=10):
                equal(weights, wanted)
    finally:
        workers.close()


def on_one_device(n: int) -> tuple[dict[str, torch.Tensor], int]:
    """On the only rank: the weights after training with n microbatches at once, and how many stage activations were alive."""
    plan = Parallel(dp=n, dp_mode="cyclic", stages=tuple(cuts_of("mlp", n)))
    model = MODELS["mlp"]()
    asked = RunRequest(model, batch("mlp", 0, 4 * n), plan, loss=nn.functional.cross_entropy, steps=STEPS, check_capture=False)
    run = prepare(asked)
    read = {(a.mb, a.stage): a.version for entries in run.schedule.lists for a in walk(entries) if a.op is Op.F}
    everything = Placement.of(lambda _, stage: 0, stages=n)
    one = placed(everything, microbatches=n, rounds=range(STEPS), version=lambda mb, stage: read[mb, stage])
    run = replace(run, schedule=prove(lower(one)))
    settings = run.settings(optimizer=lambda params: tools(nn.ParameterList(params))[0], scheduler=lambda o: milestones(o))
    engine = Engine(run.schedule, run.open(model), settings)
    alive = 0

    def counted(forward: Any) -> Any:
        def counts(record: Record) -> Any:
            nonlocal alive
            alive = max(alive, 1 + sum(isinstance(value, Record) for value in engine.actions.store.slots))
            return forward(record)

        return counts

    for stage in engine.stages.values():
        stage.forward = counted(stage.forward)  # type: ignore[method-assign]
    engine.run(lambda step: batch("mlp", step, 4 * n))
    engine.close()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, alive


def milestones(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.3)


def test_one_device_with_all_microbatches_at_once(pool: Pool) -> None:
    """The same bits, and (N + 1) / 2 of the activations of a microbatch, which are those of N stages."""
    ((weights, alive),) = pool.run(on_one_device, 3, ranks=1)
    equal(weights, expected("mlp", "pp", 3, 3, 0)[0])
    assert alive == 3 * (3 + 1) // 2
