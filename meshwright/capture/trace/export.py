"""Runs `torch.export` on a whole model, including its loss, and records the result as a flat graph.

Batch and sequence lengths stay dynamic where the model allows it. Weights are referred to by name only, so a model on the meta
device, which has no memory, gives the same graph.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, export

from meshwright.capture.trace.autograd_functions import Call, functions_whole
from meshwright.capture.trace.batch_columns import Columns, columns_of
from meshwright.capture.trace.failure_reasons import refuse_transforms, unexportable
from meshwright.capture.trace.from_fx import transcribe
from meshwright.capture.trace.graph import Flat
from meshwright.capture.trace.meta_stand_ins import standing
from meshwright.capture.trace.packed_sequences import refuse_flash_columns
from meshwright.capture.trace.patches.ctc_loss import ctc_whole
from meshwright.capture.trace.patches.kept_attributes import kept_attributes
from meshwright.capture.trace.patches.module_casts import casts_pass
from meshwright.capture.trace.patches.python_random import nothing_frozen
from meshwright.capture.trace.patches.random_rates import certain_draws
from meshwright.capture.trace.patches.refuse import nothing_dropped
from meshwright.capture.trace.patches.torch_transformer import nothing_asked
from meshwright.capture.trace.patches.train_eval_modes import both_modes
from meshwright.capture.trace.patches.value_checks import checks_pass
from meshwright.capture.trace.size_conditions import Condition, about_rows, fixed, parsed
from meshwright.capture.trace.unsupported_modules import require_ready
from meshwright.errors import MeshwrightError
from meshwright.torch_internals import size_guards, size_in_example

log = logging.getLogger(__name__)

_SCORES = "logits"
_HIDDEN = ("hidden_state", "hidden_states", "past_key_values")


class _Plain(nn.Module):
    """Wraps the model: takes its columns as one mapping and returns its results as one tuple."""

    def __init__(self, model: nn.Module, columns: Columns, seen: Callable[[Iterable[str]], None]) -> None:
        super().__init__()
        self.model, self.columns, self.seen = model, columns, seen

    def forward(self, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Call the model. The loss is the first result."""
        rows = size_in_example(next(iter(given.values())).shape[0])
        every = enumerate(results(self.columns.call(self.model, given)).items())
        found = {name: t for at, (name, t) in every if not at or name == _SCORES or size_in_example(t.shape[0]) == rows}
        self.seen(found)  # a callback, because a trace reverts attributes that a forward sets on its module
        return tuple(found.values())


def flatten(model: nn.Module, example: Any, *, own_loss: bool = False, training: bool = True) -> Flat:
    """Trace a model for batches like this one. With `own_loss` the labels are left out, because a loss function takes them."""
    columns = columns_of(model, example, own_loss=own_loss)
    return trace(model, columns, columns.given(example), training=training)


def trace(
    model: nn.Module, columns: Columns, example: Mapping[str, Tensor], *, training: bool = True, one_row: bool = False
) -> Flat:
    """Trace a model with columns by name. With `one_row` the graph is valid only for batches of one row."""
    require_ready([model])
    outputs: list[str] = []
    plain = _Plain(model, columns, lambda names: outputs.__setitem__(slice(None), names))
    refuse_flash_columns(example)
    given = {name: two_rows(t, one_row).detach().clone() for name, t in example.items()}
    refuse_uneven(given)
    with traceable(model, training=training) as calls:
        program, lengths = _exported(plain, given)
    graph = program.module(check_guards=False).graph
    refuse_transforms(graph)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known = parameters | {name for name, _ in model.named_buffers(remove_duplicate=False)}
    flat = transcribe(graph, tuple(outputs), tuple(given), known, calls)
    conditions = tuple(fixed(name, 0, 1) for name in given if one_row) + _conditions(program, given, lengths)
    flat = replace(flat, conditions=tuple(dict.fromkeys(conditions)), training=training)
    _refuse_changed(flat, parameters, known)
    if not one_row:
        _refuse_rows(flat, given)
    return flat


@contextlib.contextmanager
def traceable(model: nn.Module, *, training: bool) -> Iterator[dict[str, Call]]:
    """While a model is traced, put it into training or evaluation mode and apply all patches. Afterwards it is as before."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.train(training)  # as a trainer does; a model may override train() to keep parts in evaluation mode
        with kept_attributes(model), _patched(model) as calls, torch.set_grad_enabled(training):
            yield calls
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def _patched(model: nn.Module) -> Iterator[dict[str, Call]]:
    """Apply all patches: they show the trace what a graph can hold, and raise for the rest."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(standing(model))
        generators = stack.enter_context(nothing_frozen(model))
        stack.enter_context(both_modes(model, generators.harmless))
        for part in (
            nothing_dropped(model),
            casts_pass(model),
            certain_draws(),
            checks_pass(),
            ctc_whole(),
            nothing_asked(model),
        ):
            stack.enter_context(part)
        yield stack.enter_context(functions_whole())


def _conditions(program: Any, given: Mapping[str, Tensor], lengths: bool) -> tuple[Condition, ...]:
    """Return what the trace assumed about sizes: the sizes that were static, and torch's own guards for the dynamic ones."""
    shapes = {name: tuple(t.shape) for name, t in given.items()}
    guards = size_guards(program)
    opened = {name: open_sizes(t, lengths and guards is not None) for name, t in given.items()}
    closed = [fixed(name, dim, s) for name, shape in shapes.items() for dim, s in enumerate(shape) if dim not in opened[name]]
    return tuple(dict.fromkeys((*closed, *parsed(guards or (), shapes))))


def refuse_uneven(given: Mapping[str, Tensor]) -> None:
    """Raise if columns have different numbers of rows: a batch is cut into microbatches by rows."""
    rows = {name: len(t) for name, t in given.items()}
    if len(set(rows.values())) > 1:
        (a, b), *_ = [(x, y) for x in rows for y in rows if rows[x] < rows[y]]
        raise MeshwrightError(
            f"the columns of the batch have different numbers of rows: {a!r} has {rows[a]}, {b!r} has {rows[b]}; a batch is cut "
            "into microbatches by rows",
            fix=f"give {b!r} one row per row of {a!r}, for example (rows, images, ...) instead of (rows x images, ...)",
        )


def _refuse_rows(flat: Flat, given: Mapping[str, Tensor]) -> None:
    """Raise if the forward depends on the number of rows: microbatches would compute something other than the whole batch."""
    if found := about_rows(flat.conditions, {name: tuple(t.shape) for name, t in given.items()}):
        raise MeshwrightError(
            "the forward depends on the number of rows (it branches on it, loops over it, divides by it, or compares rows with "
            f"each other, as contrastive losses do): it was traced for {found}, and microbatches change that number",
            fix="use a mean over rows instead of a division by their number, and batched operations instead of a loop over rows",
        )


def _refuse_changed(flat: Flat, parameters: Collection[str], known: Collection[str]) -> None:
    """Raise if the forward writes into a parameter, or into a tensor that is neither a parameter nor a buffer.

    Only the optimizer may change parameters. A plain tensor attribute would change on one stage only, and no checkpoint saves it.
    """
    for name in (name for node in flat.nodes for name in node.changes):
        if name in parameters:
            raise MeshwrightError(
                f"the forward writes into the parameter {name!r}: copies of it on other ranks, and other versions, would differ",
                fix="clip or renormalise weights after the optimizer step (on_step_end), or use a parametrization",
            )
        if name not in known:
            raise MeshwrightError(
                f"the forward changes {name!r} in place, a tensor that is neither a parameter nor a buffer",
                fix="use register_buffer(name, tensor) in its module",
            )


def two_rows(tensor: Tensor, one_row: bool = False) -> Tensor:
    """Double a single row, because torch.export treats a size of 1 as static; `one_row` keeps it. A meta column becomes zeros."""
    if not tensor.dim():
        raise MeshwrightError("a column of the batch is a single number", fix="use tensors with one row per sample")
    tensor = torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor
    return torch.cat([tensor, tensor]) if tensor.shape[0] == 1 and not one_row else tensor


def _exported(plain: _Plain, given: Mapping[str, Tensor]) -> tuple[Any, bool]:
    """Export with as many dynamic sizes as the model allows. The second result is true if sequence lengths are dynamic."""
    problem: Exception | None = None
    for lengths in (True, False):
        shapes = ({name: open_sizes(t, lengths) for name, t in given.items()},)
        try:
            with _quiet():
                return export(plain, (dict(given),), dynamic_shapes=shapes, strict=False), lengths
        except MeshwrightError:
            raise
        except Exception as error:  # the model or the tracer may raise anything
            problem = problem or error
            log.info("a trace with dynamic %s failed: %s: %s", "lengths" if lengths else "rows", type(error).__name__, error)
    assert problem is not None
    raise unexportable(plain.model, problem, list(given), lambda: _run(plain, given)) from problem


def _run(plain: _Plain, given: Mapping[str, Tensor]) -> None:
    with _quiet():
        plain.columns.call(plain.model, dict(given))


def open_sizes(tensor: Tensor, lengths: bool) -> dict[int, Any]:
    """Return the dynamic dimensions of a column: rows, and also the lengths of token columns and of sequences of vectors."""
    is_text = not tensor.is_floating_point() or tensor.dim() == 3
    more = range(1, tensor.dim() if not tensor.is_floating_point() else 2) if lengths and is_text else ()
    return {0: Dim.AUTO, **{dim: Dim.AUTO for dim in more if tensor.shape[dim] > 1}}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence libraries while tracing. Users do not need their messages; a failure is raised as an error."""
    # A copy: if a thread makes a logger meanwhile, the trace would fail, and the next one has static lengths.
    known = list(logging.root.manager.loggerDict)
    names = ["torch", "transformers", *(n for n in known if n.startswith(("torch.", "transformers.")))]
    levels = {name: logging.getLogger(name).level for name in names}
    nowhere = io.StringIO()
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, before in levels.items():
            logging.getLogger(name).setLevel(before)


def results(output: Any) -> dict[str, Tensor]:
    """Return the outputs of a model by name: loss, scores, then outputs with one row per sample. Hidden states are left out."""
    if isinstance(output, Tensor):
        return {"output": output}
    if isinstance(output, Mapping):
        named = {str(name): value for name, value in output.items() if not str(name).endswith(_HIDDEN)}
    else:
        named = {name: getattr(output, name, None) for name in ("loss", _SCORES)}
    known = [(name, named.pop(name, None)) for name in ("loss", _SCORES)]
    first = {name: value for name, value in known if isinstance(value, Tensor)}
    if found := first | {name: value for name, value in named.items() if isinstance(value, Tensor) and value.dim()}:
        return found
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        more = output[1:] if not output[0].dim() else ()
        beside = {f"output_{at}": value for at, value in enumerate(more, 1) if isinstance(value, Tensor) and value.dim()}
        return {"output": output[0], **beside}
    raise MeshwrightError(
        f"the model returned {type(output).__name__} without a loss",
        fix="pass a batch with labels, or let the model return a tensor or an object with .loss",
    )
