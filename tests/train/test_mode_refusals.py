"""Refusals of a data-parallel mode speak of the mode and its options, not of the schedule that the mode chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwright import MeshwrightError
from meshwright.ir.plan.plan import Parallel
from meshwright.train.prepared import RunRequest, prepare
from meshwright.train.setup.build_schedule import lists_for
from meshwright.train.setup.settled_plan import settled

CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"dp_mode": "zero-3", "options": {"chunks": 0}}, 'dp_mode="zero-3" gathers', 'options={"chunks": 4}'),
    ({"dp_mode": "zero-3", "options": {"chunks": "0"}}, 'dp_mode="zero-3" gathers', 'options={"chunks": 4}'),
    ({"dp_mode": "cyclic-zero", "options": {"rule": "v1"}}, 'dp_mode="cyclic-zero" hands', 'dp_mode="cyclic"'),
    ({"dp_mode": "cyclic-zero", "options": {"chunks": 1}}, 'dp_mode="cyclic-zero" needs as many', ""),
    ({"dp_mode": "cyclic-mp", "options": {"chunks": 3}}, 'dp_mode="cyclic-mp" needs at least one microbatch per stage', ""),
    ({"dp_mode": "cyclic-mp", "options": {"chunks": 0}}, 'dp_mode="cyclic-mp" needs at least 1 stage, got', "chunks=2"),
    ({"dp_mode": "cyclic", "options": {"stages": 2}}, "cyclic has no option 'stages'", "stagger=auto|turns|starts"),
    ({"dp_mode": "zero-1", "sync": "ring"}, 'but sync="ring" sums', 'sync="eager"'),
    ({"dp_mode": "zero-3", "sync": "ring"}, 'but sync="ring" sums', 'sync="eager"'),
]


@pytest.mark.parametrize(("plan", "what", "fix"), CASES, ids=str)
def test_a_refusal_names_the_mode(plan: dict[str, Any], what: str, fix: str) -> None:
    for start in (settled, lists_for) if "no option" in what else (lists_for,):
        with pytest.raises(MeshwrightError) as error:
            start(Parallel(dp=2, **plan))
        assert what in error.value.what and fix in (error.value.fix or "")
        for word in ("form=", "interleaved", "onef1b"):
            assert word not in str(error.value)


@pytest.mark.parametrize("listed", [True, False])
def test_too_few_layers_for_zero_3_name_the_option(listed: bool) -> None:
    layers = [nn.Linear(3, 3) for _ in range(3)]
    batch = (torch.ones(4, 3), torch.zeros(4, 3))
    model: Any = layers if listed else nn.Sequential(*layers)
    with pytest.raises(MeshwrightError, match=r"cannot be cut into 4 stages, which dp_mode=.zero-3. gathers") as error:
        prepare(RunRequest(model, batch, Parallel(dp=2, dp_mode="zero-3")))
    assert error.value.fix == 'options={"chunks": 3}'
    prepare(RunRequest(model, batch, Parallel(dp=2, dp_mode="zero-3", options={"chunks": 3})))
    with pytest.raises(MeshwrightError) as other:
        prepare(RunRequest(model, batch, Parallel(pp=4, microbatches=4)))
    assert "chunks" not in str(other.value)


@pytest.mark.parametrize(
    ("mode", "fix"), [("cyclic", 'options={"chunks": 3}'), ("cyclic-zero", "dp=3"), ("cyclic-pp", 'options={"chunks": 3}')]
)
def test_too_few_layers_for_a_cyclic_mode_name_what_to_change(mode: str, fix: str) -> None:
    layers, batch = [nn.Linear(3, 3) for _ in range(3)], (torch.ones(4, 3), torch.zeros(4, 3))
    with pytest.raises(
        MeshwrightError, match=rf'cannot be cut into 4 stages, which dp_mode="{mode}" runs on dp=4 copies'
    ) as error:
        prepare(RunRequest(nn.Sequential(*layers), batch, Parallel(dp=4, dp_mode=mode)))
    assert error.value.fix == fix


@pytest.mark.parametrize("sync", ["lazy", "eager-opt", "ring"])
@pytest.mark.parametrize("mode", ["cyclic", "cyclic-zero", "cyclic-mp", "cyclic-pp"])
def test_a_cyclic_mode_says_itself_when_gradients_are_summed(mode: str, sync: str) -> None:
    with pytest.raises(MeshwrightError, match=f"sync='{sync}' and dp_mode=\"{mode}\" cannot be combined") as error:
        Parallel(dp=2, dp_mode=mode, sync=sync)
    assert error.value.fix == "leave out sync"
    Parallel(dp=2, dp_mode=mode, sync="eager")
