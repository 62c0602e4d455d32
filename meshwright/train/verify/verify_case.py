"""What `verify` compares, in a form that workers can be sent, and what is refused before any of them is started."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture.trace.graph import Flat
from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import Parallel, refuse_crowd
from meshwright.runtime.parameters.parameters import Rules, refuse_rules
from meshwright.runtime.parameters.unit import Optimizer, Scheduler
from meshwright.runtime.stage.batch import Batch, Given
from meshwright.runtime.stage.cpu_formats import require
from meshwright.runtime.stage.layers import Layers, require_layers
from meshwright.runtime.stage.objective import Loss, LossKind
from meshwright.runtime.stage.precision import Precision, refuse
from meshwright.train.data.vocabulary import refuse_ids, vocabularies
from meshwright.train.optimizer.coupled_parameters import refuse_closure, refuse_coupled, wants_more
from meshwright.train.prepared import PreparedRun, RunRequest, captured, prepare
from meshwright.train.setup.build_schedule import stages_of
from meshwright.train.setup.captured_layers import LISTS, Uncut
from meshwright.train.setup.eval_submodules import stay_in_evaluation
from meshwright.train.setup.settled_plan import settled
from meshwright.train.setup.user_arguments import refuse_loss, refuse_seed

TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 3e-2, "float16": 3e-3}
"""The largest relative error that passes."""


@dataclass(frozen=True)
class Case:
    """What is verified; everything in it can be sent to a worker."""

    build: Callable[[], Any]
    batch: Callable[[int], Given]
    parallel: Parallel
    steps: int
    dtype: str
    seed: int
    loss: Loss | None
    optimizer: Optimizer
    precision: Precision = field(default_factory=Precision)
    loss_kind: LossKind = LossKind.MEAN
    flat: Flat | None = None
    """The graph of a model that is captured, once for all workers."""
    scheduler: Scheduler | None = None
    rules: Rules = field(default_factory=Rules)

    @property
    def tolerance(self) -> float:
        """The largest relative error that passes: that of what is computed in."""
        dtype = self.precision.dtype
        return TOLERANCE[self.dtype if dtype is None else str(dtype).removeprefix("torch.")]

    def model(self) -> Any:
        """What the user built, from the seed, in the dtype."""
        torch.manual_seed(self.seed)
        built = _called("build()", self.build)
        for module in built if isinstance(built, LISTS) else [built]:
            if isinstance(module, nn.Module):
                module.to(getattr(torch, self.dtype))
        if isinstance(built, nn.Module):
            stay_in_evaluation(built)
        return built

    def data(self, step: int) -> Given:
        """A batch in the dtype; ids that the model does not know are refused."""
        found = self._cast(step)
        if self.flat is not None:
            refuse_ids(vocabularies(self.flat), found, self.flat.columns)
        return found

    def _cast(self, step: int) -> Given:
        given = _called(f"batch({step})", self.batch, step)
        dtype = getattr(torch, self.dtype)

        def cast(name: object, t: object) -> Tensor:
            if not isinstance(t, Tensor):
                raise _no_tensor(f"batch({step}) has {_kind(t)} at {name!r}", t)
            return t.to(dtype) if t.is_floating_point() else t

        if isinstance(given, Tensor):
            return (cast(0, given),)
        if isinstance(given, Mapping) and given:
            return {name: cast(name, t) for name, t in given.items()}
        if isinstance(given, tuple | list) and given:
            return tuple(cast(index, t) for index, t in enumerate(given))
        raise _no_tensor(f"batch(step) returned {_kind(given)}", given)


def _called(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """What a user's function returns; what it raises is said with its traceback, the same here and on a worker."""
    try:
        return function(*args)
    except MeshwrightError:
        raise
    except Exception as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        lines = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        raise MeshwrightError(f"{what} raised {type(error).__name__}: {error}\n{lines}") from error


def _kind(given: object) -> str:
    """The type of what is no tensor, with its package where that says more."""
    kind = type(given)
    if isinstance(given, Sized) and not isinstance(given, str) and kind.__module__ == "builtins" and not len(given):
        return f"an empty {kind.__name__}"
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _no_tensor(what: str, given: object) -> MeshwrightError:
    """The refusal of a batch, or of a part of one."""
    array = type(given).__module__.partition(".")[0] == "numpy"
    return MeshwrightError(what, fix="torch.from_numpy" if array else "a tuple or a mapping of tensors")


def prepare_case(case: Case) -> tuple[Case, Layers, PreparedRun]:
    """The case with its captured graph, the layers of this process, and the prepared run; what a user can mend is said here."""
    if not isinstance(case.dtype, str) or case.dtype not in TOLERANCE:
        raise MeshwrightError(f"there is no tolerance for {case.dtype!r}", fix=", ".join(TOLERANCE))
    if isinstance(case.steps, bool) or not isinstance(case.steps, int) or case.steps < 1:
        raise MeshwrightError(f"steps must be a whole number of at least 1, got {case.steps!r}", fix="steps=5")
    refuse_seed(case.seed)
    refuse_loss(case.loss)
    case = replace(case, parallel=settled(case.parallel))
    refuse_crowd(case.parallel.processes)
    _refuse_local(case)
    stages_of(case.parallel)
    built = case.model()
    kind, precision = case.loss_kind, case.precision
    request = RunRequest(built, case.data(0), case.parallel, case.loss, loss_kind=kind, precision=precision, steps=case.steps)
    case = replace(case, flat=captured(request))
    _refuse_frozen(case, built)
    _refuse_rows(case)
    _refuse_dtype(case, built)
    run = prepare(request, case.flat)
    layers, schedule = run.open(built), run.schedule
    refuse_coupled(lambda pair, _: case.optimizer(pair), [layers.unit(u) for u in range(schedule.units)])
    refuse(case.precision, {name: p.dtype for p, name in layers.names.items()}, norm=schedule.norm, name=schedule.name)
    refuse_rules(case.rules, schedule)
    require(case.precision.dtype, torch.device("cpu"))
    for stage, how in enumerate(schedule.recompute or ()):
        require_layers(layers.of_stage(stage), how.share, stage)
    return case, layers, run


def _refuse_frozen(case: Case, built: Any) -> None:
    """There is something to compare, and an optimizer that can train it."""
    modules = list(built) if isinstance(built, LISTS) else [built]
    if not all(isinstance(module, nn.Module) for module in modules):
        return  # refused where it is cut
    trained = [p for module in modules for p in module.parameters() if p.requires_grad]
    if not trained:
        raise MeshwrightError(
            "no parameter of the model takes a gradient: there is nothing to compare", fix="requires_grad_(True)"
        )
    _refuse_optimizer(case, list(dict.fromkeys(trained)))


def _refuse_local(case: Case) -> None:
    """Workers import functions by name; a lambda has none, and neither has a model or a batch."""
    for what, made in (("build", "the model"), ("batch", "the data of a step")):
        found = getattr(case, what)
        if isinstance(found, nn.Module) or not callable(found):
            raise MeshwrightError(
                f"{what} is a function that makes {made}, got {_kind(found)}",
                fix=f"def {what}({'step' if what == 'batch' else ''}): ... at the top level of a module, and {what}={what}",
            )
    for what in ("build", "batch", "loss", "optimizer", "scheduler"):
        try:
            pickle.dumps(getattr(case, what))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise MeshwrightError(
                f"{what} cannot be sent to workers, which import it by name: {error}",
                fix="a function at the top level of a module, or functools.partial of one",
            ) from error


def _refuse_optimizer(case: Case, params: list[nn.Parameter]) -> None:
    """A step is taken with the gradients that are there; an optimizer that wants to compute them again cannot."""
    found = _called("optimizer(params)", case.optimizer, params)
    step = getattr(found, "step", None)
    if not callable(step):
        raise MeshwrightError(f"optimizer(params) returned {_kind(found)}, which has no step()", fix="a torch.optim.Optimizer")
    refuse_closure(found)
    if case.scheduler is not None and not callable(case.scheduler):
        raise MeshwrightError(f"scheduler makes a schedule for an optimizer, got {case.scheduler!r}", fix="scheduler=StepLR")
    rates = None if case.scheduler is None else _called("scheduler(optimizer)", case.scheduler, found)
    if rates is not None and (not callable(getattr(rates, "step", None)) or wants_more(rates.step)):
        raise MeshwrightError(
            f"scheduler(optimizer) returned {_kind(rates)}, which has no step() without arguments",
            fix="a schedule that follows the number of updates: StepLR, CosineAnnealingLR, LambdaLR",
        )


def _refuse_rows(case: Case) -> None:
    """Every microbatch of the first batch has a row; later batches may be shorter."""
    parallel = case.parallel
    cuts = parallel.microbatches * parallel.dp
    first = case.data(0)
    if not _same(first, case.data(0)):
        raise MeshwrightError(
            "batch(0) gives other tensors when it is called again, and every worker calls it",
            fix="draw from torch.Generator().manual_seed(step)",
        )
    names = None if case.flat is None else case.flat.columns
    batch = Batch(first, microbatches=parallel.microbatches, copies=parallel.dp, names=names)
    rows = batch.size
    if rows < cuts:
        copies = f" on each of {parallel.dp} copies" if parallel.dp > 1 else ""
        raise MeshwrightError(
            f"a batch of {rows} rows cannot be cut into {parallel.microbatches} microbatches{copies}",
            fix=f"batches of at least {cuts} rows, or fewer microbatches",
        )


def _refuse_dtype(case: Case, model: nn.Module) -> None:
    """Some operations exist in some dtypes only: what will be captured is tried once, in evaluation, before workers start."""
    if case.flat is None or case.dtype == "float32":
        return
    whole, training = Uncut.of(model, case.data(0), own_loss=case.loss is not None), model.training
    try:
        with torch.no_grad():
            model.eval()
            whole({}, {name: t[:2] for name, t in whole.columns.given(case.data(0)).items()})
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MeshwrightError(f"the model does not run in {case.dtype}: {reason}", fix='dtype="float32"') from error
    finally:
        model.train(training)


def _same(a: Given, b: Given) -> bool:
    """Whether two batches are equal; what is no number equals itself here."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and _same(tuple(a.values()), tuple(b.values()))
    return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))


def _equal(x: Any, y: Any) -> bool:
    return x.shape == y.shape and x.dtype is y.dtype and bool(((x == y) | ((x != x) & (y != y))).all())
