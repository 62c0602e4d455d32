"""What `verify` and `simulate` are given and cannot use: refused with what is wrong, before a worker starts."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import MeshwrightError, Parallel, verify
from meshwright.cli import verify as verb
from meshwright.cli.simulate import simulate
from meshwright.runtime.tracing.clock import Timing
from meshwright.train.models import small_models as models
from meshwright.train.verify import verify as module
from meshwright.train.verify.certificate import certify
from meshwright.train.verify.rank_differences import RankTrace, digest
from meshwright.train.verify.serial_reference import SerialTrace
from meshwright.train.verify.verify_case import Case, prepare_case

BUILD, DATA = partial(models.mlp, layers=6), partial(models.mlp_batch, rows=8)


def given(step: int, *, batch: Any) -> Any:
    """A batch as it was given."""
    return batch


def broken(*args: int, good: int = 0) -> Any:
    """Raises, at a step that is not among the first `good`."""
    if args and args[0] < good:
        return DATA(*args)
    raise ValueError("no such file")


class Returns(nn.Module):
    """A layer that computes, and returns something else."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.linear, self.output = nn.Linear(16, 16), output

    def forward(self, x: Tensor) -> Any:
        """What was asked for."""
        self.linear(x)
        return self.output


def returning(output: Any) -> list[nn.Module]:
    """A model whose second layer returns this."""
    return [nn.Linear(16, 16), Returns(output), nn.Linear(16, 16)]


@pytest.fixture(autouse=True)
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts workers here fails."""
    monkeypatch.setattr(module, "Workers", lambda count: pytest.fail("workers were started"))


def refused(text: str, parallel: Any = None, **more: Any) -> None:
    """This plan, or these arguments, are refused with a text."""
    with pytest.raises(MeshwrightError, match=text):
        verify(**{"build": BUILD, "batch": DATA, "parallel": {"pp": 2} if parallel is None else parallel, **more})


def test_what_makes_a_model_and_its_data_are_functions() -> None:
    refused("build must be a function that returns the model, got torch.nn", build=nn.Linear(16, 16))
    refused("build must be a function that returns the model, got int", build=3)
    refused("batch must be a function that returns the data of a step, got dict", batch={"x": torch.zeros(8, 16)})
    refused("workers must be a pool of running workers, got 5", workers=5)


@pytest.mark.parametrize("recompute", [[2, 3], [nan, 1], [inf, 0], [2, -1], [True, 1], ["1", 0], 0.5, 1, True, {0: 1.0}, {1.0}])
def test_shares_are_between_0_and_1(recompute: Any) -> None:
    refused("a share of its layers between 0 and 1", {"pp": 2, "recompute": recompute})


@pytest.mark.parametrize("width", [3, (2, 1.0), (True, 1), "21", {2: 1}])
def test_a_width_that_is_none(width: Any) -> None:
    refused("width must list the workers of each stage", {"pp": 2, "width": width})


@pytest.mark.parametrize("options", [3, "chunks=2", {1: 2}, ["chunks"]])
def test_options_that_are_none(options: Any) -> None:
    refused("options must be a mapping", {"pp": 2, "options": options})


def test_none_is_the_default() -> None:
    assert Parallel.of({"pp": 2, "options": None, "width": None, "recompute": None}) == Parallel(pp=2)
    assert Parallel(pp=2, recompute=[0, 1]).recompute == (0.0, 1.0)


@pytest.mark.parametrize("parallel", [3, "pp=2", ["pp"]])
def test_a_plan_that_is_none(parallel: Any) -> None:
    refused("parallel must be a Parallel or a mapping", parallel)


def test_names_that_a_plan_has_not() -> None:
    refused("parallel has no '1', 'cp'", {1: 2, "cp": 2})


@pytest.mark.parametrize(
    ("text", "found"),
    [(None, None), ("inline", "inline"), ("", ""), (".5,1", [0.5, 1.0]), ("-1,0", [-1.0, 0.0]), (" 1, 0", [1.0, 0.0])],
)
def test_shares_on_the_command_line(text: str | None, found: Any) -> None:
    assert verb._recompute(text) == found


@pytest.mark.parametrize("text", ["1,often", "1,", ",.5", "0.5;1,1"])
def test_shares_with_something_else_among_them(text: str) -> None:
    with pytest.raises(MeshwrightError, match="--recompute takes numbers with commas"):
        verb._recompute(text)


@pytest.mark.parametrize("text", ["2,3", "-1,0", "nan,1", "0,inf"])
def test_shares_on_the_command_line_have_a_range(text: str) -> None:
    with pytest.raises(MeshwrightError, match="between 0 and 1"):
        verb.verify(model="mlp", recompute=text)


X = torch.zeros(8, 16)
BATCHES: list[tuple[Any, str]] = [
    ({"input": X, "mask": None, "y": X}, r"batch\(0\) has NoneType at 'mask'"),
    ({"input": X, "y": [1.0] * 8}, r"batch\(0\) has list at 'y'(.|\n)*mapping of tensors"),
    ((X, None), r"batch\(0\) has NoneType at 1"),
    (None, r"batch\(step\) returned NoneType"),
    ({}, r"batch\(step\) returned an empty dict"),
    ((), r"batch\(step\) returned an empty tuple"),
]


@pytest.mark.parametrize(("batch", "text"), BATCHES, ids=[text for _, text in BATCHES])
def test_a_batch_of_something_else_than_tensors(batch: Any, text: str) -> None:
    refused(text, batch=partial(given, batch=batch))


def test_arrays_are_no_tensors() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros((8, 16))
    refused(r"batch\(0\) has numpy.ndarray at 0(.|\n)*torch.from_numpy", batch=partial(given, batch=(array, X)))
    refused(r"batch\(0\) has numpy.ndarray at 'y'(.|\n)*torch.from_numpy", batch=partial(given, batch={"x": X, "y": array}))
    refused(r"batch\(step\) returned numpy.ndarray(.|\n)*torch.from_numpy", batch=partial(given, batch=array))


@pytest.mark.parametrize("seed", [-1, 1 << 63, 99999999999999999999999, 1.0, True, None, "0"])
def test_seeds_that_no_generator_takes(seed: Any) -> None:
    refused("a seed must be a whole number of at least 0 and below", seed=seed)


@pytest.mark.parametrize(("more", "what"), [({"build": broken}, "build"), ({"batch": broken}, "batch")])
def test_functions_that_raise(more: dict[str, Any], what: str) -> None:
    refused(what + r"\(0?\) raised ValueError: no such file(.|\n)*in broken", **more)


def test_a_batch_function_that_raises_later_says_the_same() -> None:
    case = Case(BUILD, partial(broken, good=1), Parallel(pp=2), 3, "float64", 0, None, module.momentum)
    _, _, run = prepare_case(case)
    with pytest.raises(MeshwrightError, match=r"batch\(1\) raised ValueError: no such file(.|\n)*in broken"):
        module.serial_trace(case, run)


@pytest.mark.parametrize(
    ("output", "kind"), [(None, "NoneType"), ({"x": X}, "dict"), (3.0, "float"), ((), "tuple"), ((X, None), "tuple")]
)
def test_layers_that_return_no_tensors(output: Any, kind: str) -> None:
    case = Case(partial(returning, output), DATA, Parallel(pp=2), 1, "float64", 0, None, module.momentum)
    _, _, run = prepare_case(case)
    with pytest.raises(MeshwrightError, match=f"layer 1 returned {kind}, but stages exchange a tensor"):
        module.serial_trace(case, run)


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (torch.optim.LBFGS, "LBFGS needs a closure"),
        (partial(torch.optim.SGD, lr=-1.0), r"optimizer\(params\) raised ValueError: Invalid learning rate"),
        (len, r"optimizer\(params\) returned int, which has no step"),
    ],
)
def test_optimizers_that_cannot_step(optimizer: Any, text: str) -> None:
    refused(text, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Rprop])
def test_optimizers_that_can(optimizer: Any) -> None:
    prepare_case(Case(BUILD, DATA, Parallel(pp=2), 1, "float64", 0, None, optimizer))


def test_a_certificate_is_strict_json() -> None:
    case = Case(BUILD, DATA, Parallel(pp=2), 2, "float64", 0, None, module.momentum)
    _, layers, run = prepare_case(case)
    found = certify(case, layers, run.schedule, SerialTrace(losses=[inf, -inf]), [RankTrace(), RankTrace()])
    text = replace(found, worst="NaN").to_json()
    written = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert written["losses"] == ["NaN", "NaN"] and written["reference_losses"] == ["Infinity", "-Infinity"]
    assert written["loss_error"] == "Infinity" and not written["passed"] and written["worst"] == "NaN"
    assert written["tolerance"] == 1e-9


@pytest.mark.parametrize(
    "flag", [{"repeat": 3}, {"repeat": 5}, {"transport": "strict"}, {"limit": 9.0}, {"trace": Path("x.json")}], ids=str
)
def test_flags_of_an_emulation_that_is_not_asked_for(flag: dict[str, Any]) -> None:
    (name,) = flag
    with pytest.raises(MeshwrightError, match=f"--{name}(.|\\n)*--emulate wall"):
        simulate(name="onef1b", **flag)


@pytest.mark.parametrize("plan", [{"pp": 2, "dp": 9999}, {"pp": 1, "dp": 257}, {"pp": 2, "width": (250, 7)}], ids=str)
def test_more_workers_than_one_host_takes(plan: dict[str, Any]) -> None:
    ranks = Parallel.of(plan).processes
    refused(f"{ranks} workers exceed the limit of 256(.|\\n)*torchrun on more hosts", plan)


def test_the_verbs_count_workers_first() -> None:
    with pytest.raises(MeshwrightError, match="19998 workers exceed the limit of 256"):
        verb.verify(model="mlp", dp=9999)
    with pytest.raises(MeshwrightError, match="300 workers exceed the limit of 256"):
        simulate(name="onef1b", workers=300, microbatches=4, emulate=Timing.WALL)


def unseeded(step: int) -> tuple[Tensor, Tensor]:
    """Another batch each time."""
    x = torch.randn(8, 16)
    return x, x


def without_numbers(step: int) -> dict[str, Tensor]:
    """The same batch each time, of what does not equal itself."""
    return {"input": torch.full((8, 16), nan), "labels": torch.zeros(8, dtype=torch.long)}


def test_a_batch_that_is_another_each_time() -> None:
    refused("batch\\(0\\) returns other tensors when it is called again(.|\\n)*manual_seed", batch=unseeded)
    prepare_case(Case(BUILD, without_numbers, Parallel(pp=2), 1, "float64", 0, None, module.momentum))


@pytest.mark.parametrize(
    ("text", "said"), [("1 / 0", "ZeroDivisionError"), ("def f(:", "SyntaxError"), ("raise SystemExit(5)", "SystemExit")]
)
def test_a_module_that_cannot_be_imported(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"broken_{said.lower()}"
    (tmp_path / f"{name}.py").write_text(text + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MeshwrightError, match=f"{name} raised {said} while it was imported") as found:
        verb.verify(model=f"{name}:build", batch=f"{name}:batch")
    assert "importlib" not in str(found.value) and f"{name}.py" in str(found.value)


def test_no_microbatches_on_the_command_line() -> None:
    with pytest.raises(MeshwrightError, match="--microbatches must be at least 1, got 0"):
        verb.verify(model="mlp", microbatches=0)


def test_what_is_no_number_equals_itself_bit_by_bit() -> None:
    case = Case(BUILD, DATA, Parallel(pp=1, dp=2), 1, "float64", 0, None, module.momentum)
    _, layers, run = prepare_case(case)
    one, other = ({name: torch.full_like(p, nan) for p, name in layers.names.items()} for _ in range(2))
    same = certify(case, layers, run.schedule, SerialTrace([0.0], [], one), [RankTrace(weights=one), RankTrace(weights=other)])
    assert same.replicas_equal and not same.passed
    other["0.0.bias"] = -other["0.0.bias"]
    unlike = certify(case, layers, run.schedule, SerialTrace([0.0], [], one), [RankTrace(weights=one), RankTrace(weights=other)])
    assert not unlike.replicas_equal


def test_weights_that_are_others_on_each_worker_are_named() -> None:
    case = Case(BUILD, DATA, Parallel(pp=1), 1, "float64", 0, None, module.momentum)
    _, layers, run = prepare_case(case)
    built = {name: digest(p) for p, name in layers.names.items()}
    for digests, told in ((built, False), ({**built, "1.0.weight": 1}, True)):
        found = certify(case, layers, run.schedule, SerialTrace([0.0]), [RankTrace(digests={0: digests})])
        assert any("rank 0 starts with other values of 1.0.weight" in problem for problem in found.problems) is told


def test_a_loss_that_is_no_function() -> None:
    refused("loss must be a function of output and target, got 3", loss=3)


class Dropped(nn.Module):
    """Two layers with dropout between them, and a loss."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(16, 16), nn.Dropout(rate), nn.Linear(16, 16)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The mean squared error."""
        return nn.functional.mse_loss(self.second(self.drop(self.first(x))), labels)


def named_rows(step: int) -> dict[str, Tensor]:
    """Inputs and targets by name."""
    return dict(zip(("x", "labels"), DATA(step), strict=True))


@pytest.mark.parametrize("plan", [{"pp": 2, "width": [1, 2]}, {"pp": 2, "schedule": "chimera", "options": {"mode": "halving"}}])
def test_random_numbers_of_shared_rows_are_comparable_to_none(plan: dict[str, Any]) -> None:
    plan = {"microbatches": 4, **plan}
    refused("each device draws its own", plan, build=partial(Dropped, 0.1), batch=named_rows)
    case = Case(partial(Dropped, 0.0), named_rows, Parallel.of(plan), 1, "float64", 0, None, module.momentum)
    assert prepare_case(case)[2].flat is not None, "without dropout the plan is prepared"
