"""The inputs of `verify`, in a form that can be sent to workers, and the checks before any worker starts."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture.shard.wide_casts import wide_casts, widened
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
from meshwright.train.inputs.eval_submodules import stay_in_evaluation
from meshwright.train.inputs.user_arguments import refuse_loss, refuse_seed
from meshwright.train.optimizer.coupled_parameters import refuse_closure, wants_more
from meshwright.train.prepared import PreparedRun, RunRequest, captured, prepare
from meshwright.train.session.refuse_optimizer import refuse_optimizer
from meshwright.train.setup.build_schedule import splits_rows, stages_of
from meshwright.train.setup.captured_layers import LISTS, Uncut
from meshwright.train.setup.settled_plan import settled

TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 3e-2, "float16": 3e-3}
"""The largest relative error that passes, by dtype."""


@dataclass(frozen=True)
class Case:
    """One comparison. All its fields can be sent to a worker."""

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
    """The graph of a captured model. It is captured once for all workers."""
    scheduler: Scheduler | None = None
    rules: Rules = field(default_factory=Rules)
    splits_rows: bool = False
    """Whether the plan shares the rows of one microbatch among workers or actions."""

    @property
    def tolerance(self) -> float:
        """The largest relative error that passes, for the dtype that layers compute in."""
        dtype = self.precision.dtype
        return TOLERANCE[self.dtype if dtype is None else str(dtype).removeprefix("torch.")]

    @property
    def widens(self) -> bool:
        """Whether casts to float32 inside the model become casts to float64, in the run and in the reference alike.

        Where tensors or the rows of a microbatch are shared, sums have another order, and float32 inside a float64 model (the
        losses of transformers) would round it differently.
        """
        shares = self.parallel.tp > 1 or self.splits_rows
        return shares and self.dtype == "float64" and self.precision.dtype is None

    def wide_casts(self) -> AbstractContextManager[object]:
        """Returns a context in which the user's model casts to float64 instead of float32, if `widens`."""
        return wide_casts() if self.widens else nullcontext()

    def model(self) -> Any:
        """Builds the user's model from the seed, in the dtype."""
        torch.manual_seed(self.seed)
        built = _call("build()", self.build)
        for module in built if isinstance(built, LISTS) else [built]:
            if isinstance(module, nn.Module):
                module.to(getattr(torch, self.dtype))
        if isinstance(built, nn.Module):
            stay_in_evaluation(built)
        return built

    def data(self, step: int) -> Given:
        """Returns the batch of a step in the dtype. Raises if an id is outside the model's vocabulary."""
        found = self._cast(step)
        if self.flat is not None:
            refuse_ids(vocabularies(self.flat), found, self.flat.columns)
        return found

    def _cast(self, step: int) -> Given:
        given = _call(f"batch({step})", self.batch, step)
        dtype = getattr(torch, self.dtype)

        def cast(name: object, t: object) -> Tensor:
            if not isinstance(t, Tensor):
                raise _not_a_tensor(f"batch({step}) has {_type_name(t)} at {name!r}, not a tensor", t)
            return t.to(dtype) if t.is_floating_point() else t

        if isinstance(given, Tensor):
            return (cast(0, given),)
        if isinstance(given, Mapping) and given:
            return {name: cast(name, t) for name, t in given.items()}
        if isinstance(given, tuple | list) and given:
            return tuple(cast(index, t) for index, t in enumerate(given))
        raise _not_a_tensor(f"batch(step) returned {_type_name(given)}", given)


def _call(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a user's function. Its error becomes a MeshwrightError with the traceback, here and on a worker."""
    try:
        return function(*args)
    except MeshwrightError:
        raise
    except Exception as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        lines = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        raise MeshwrightError(f"{what} raised {type(error).__name__}: {error}\n{lines}") from error


def _type_name(given: object) -> str:
    """Returns the name of an object's type, with its package if it is not a builtin."""
    kind = type(given)
    if isinstance(given, Sized) and not isinstance(given, str) and kind.__module__ == "builtins" and not len(given):
        return f"an empty {kind.__name__}"
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _not_a_tensor(what: str, given: object) -> MeshwrightError:
    """Returns the error for a batch, or a part of one, that is not a tensor."""
    array = type(given).__module__.partition(".")[0] == "numpy"
    return MeshwrightError(what, fix="torch.from_numpy" if array else "a tuple or a mapping of tensors")


def prepare_case(case: Case) -> tuple[Case, Layers, PreparedRun]:
    """Returns the case with its captured graph, the layers of this process, and the prepared run.

    Raises here, before any worker starts, if the user's model, data or plan cannot be used.
    """
    if not isinstance(case.dtype, str) or case.dtype not in TOLERANCE:
        raise MeshwrightError(f"there is no tolerance for {case.dtype!r}", fix=", ".join(TOLERANCE))
    if isinstance(case.steps, bool) or not isinstance(case.steps, int) or case.steps < 1:
        raise MeshwrightError(f"steps must be a whole number of at least 1, got {case.steps!r}", fix="steps=5")
    refuse_seed(case.seed)
    refuse_loss(case.loss)
    case = replace(case, parallel=settled(case.parallel))
    case = replace(case, splits_rows=splits_rows(case.parallel))
    refuse_crowd(case.parallel.started)
    _refuse_local(case)
    stages = stages_of(case.parallel)
    built = case.model()
    kind, precision = case.loss_kind, case.precision
    request = RunRequest(built, case.data(0), case.parallel, case.loss, loss_kind=kind, precision=precision, steps=case.steps)
    request = replace(request, stages=stages)
    flat = captured(request)
    case = replace(case, flat=widened(flat) if flat is not None and case.widens else flat)
    _refuse_random(case)
    _refuse_frozen(case, built)
    _refuse_rows(case)
    with case.wide_casts():
        _refuse_dtype(case, built)
        run = prepare(request, case.flat)
    layers, schedule = run.open(built), run.schedule
    refuse_optimizer(lambda params, _: case.optimizer(params), run, layers)
    refuse(case.precision, {name: p.dtype for p, name in layers.names.items()}, norm=schedule.norm, name=schedule.name)
    refuse_rules(case.rules, schedule)
    require(case.precision.dtype, torch.device("cpu"))
    for stage, how in enumerate(schedule.recompute or ()):
        require_layers(layers.of_stage(stage), how.share, stage)
    return case, layers, run


def _refuse_random(case: Case) -> None:
    """Raises if devices that share the rows of a microbatch draw random numbers: one process draws others."""
    if case.splits_rows and case.flat is not None and case.flat.random:
        raise MeshwrightError(
            "the model draws random numbers (dropout), and this plan cuts the rows of a microbatch: each device draws its own, "
            "so no single process is comparable",
            fix="set dropout to 0 in the model's configuration, or use a plan without width and without halving",
        )


def _refuse_frozen(case: Case, built: Any) -> None:
    """Raises if no parameter is trained, or if the optimizer cannot train them."""
    modules = list(built) if isinstance(built, LISTS) else [built]
    if not all(isinstance(module, nn.Module) for module in modules):
        return  # refused when the model is cut
    trained = [p for module in modules for p in module.parameters() if p.requires_grad]
    if not trained:
        raise MeshwrightError(
            "no parameter of the model requires a gradient: there is nothing to compare", fix="requires_grad_(True)"
        )
    _refuse_optimizer(case, list(dict.fromkeys(trained)))


def _refuse_local(case: Case) -> None:
    """Refuses arguments that workers cannot import by name: lambdas, models and batches."""
    for what, made in (("build", "the model"), ("batch", "the data of a step")):
        found = getattr(case, what)
        if isinstance(found, nn.Module) or not callable(found):
            raise MeshwrightError(
                f"{what} must be a function that returns {made}, got {_type_name(found)}",
                fix=f"def {what}({'step' if what == 'batch' else ''}): ... at the top level of a module, and {what}={what}",
            )
    for what in ("build", "batch", "loss", "optimizer", "scheduler"):
        try:
            pickle.dumps(getattr(case, what))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise MeshwrightError(
                f"{what} cannot be sent to workers, which must import it by name: {error}",
                fix="a function at the top level of a module, or functools.partial of one",
            ) from error


def _refuse_optimizer(case: Case, params: list[nn.Parameter]) -> None:
    """Refuses optimizers that need a closure to compute gradients again, and schedules that need more than the step count."""
    found = _call("optimizer(params)", case.optimizer, params)
    step = getattr(found, "step", None)
    if not callable(step):
        raise MeshwrightError(
            f"optimizer(params) returned {_type_name(found)}, which has no step()", fix="a torch.optim.Optimizer"
        )
    refuse_closure(found)
    if case.scheduler is not None and not callable(case.scheduler):
        raise MeshwrightError(
            f"scheduler must be a function that returns a schedule for an optimizer, got {case.scheduler!r}",
            fix="scheduler=StepLR",
        )
    rates = None if case.scheduler is None else _call("scheduler(optimizer)", case.scheduler, found)
    if rates is not None and (not callable(getattr(rates, "step", None)) or wants_more(rates.step)):
        raise MeshwrightError(
            f"scheduler(optimizer) returned {_type_name(rates)}, which has no step() without arguments",
            fix="a schedule that depends only on the number of updates: StepLR, CosineAnnealingLR, LambdaLR",
        )


def _refuse_rows(case: Case) -> None:
    """Raises if a microbatch of the first batch would have no row. Later batches may have fewer rows."""
    parallel = case.parallel
    cuts = parallel.microbatches * parallel.copies
    first = case.data(0)
    if not _same(first, case.data(0)):
        raise MeshwrightError(
            "batch(0) returns other tensors when it is called again, but every worker calls it",
            fix="random numbers from torch.Generator().manual_seed(step)",
        )
    names = None if case.flat is None else case.flat.columns
    batch = Batch(first, microbatches=parallel.microbatches, copies=parallel.copies, names=names)
    rows = batch.size
    if rows < cuts:
        copies = f" on each of {parallel.copies} data-parallel copies" if parallel.copies > 1 else ""
        raise MeshwrightError(
            f"a batch of {rows} rows cannot be cut into {parallel.microbatches} microbatches{copies}",
            fix=f"batches of at least {cuts} rows, or fewer microbatches",
        )


def _refuse_dtype(case: Case, model: nn.Module) -> None:
    """Raises if the model does not run in the dtype. It runs once in evaluation mode before workers start.

    Some operations exist only for some dtypes.
    """
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
    """Returns whether two batches are equal. NaN equals NaN here."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and _same(tuple(a.values()), tuple(b.values()))
    return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))


def _equal(x: Any, y: Any) -> bool:
    return x.shape == y.shape and x.dtype is y.dtype and bool(((x == y) | ((x != x) & (y != y))).all())
