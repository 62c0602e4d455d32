"""`torch.export` of a whole model, labels inside, written down as a flat graph.

Batch and sequence lengths stay open where the model allows it. The model's weights are looked at by name only, so a model on
the meta device, without any memory, gives the same graph.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, export

from meshwright.capture.arguments import Columns, columns_of
from meshwright.capture.flat import Flat, Kind, Node, Ref, Size
from meshwright.capture.hollow import standing
from meshwright.capture.modes import both_modes
from meshwright.capture.operations import is_inplace, is_random, name_of
from meshwright.errors import MeshwrightError

_INNER = "model"
_SCORES = "logits"
_HIDDEN = ("hidden_state", "hidden_states", "past_key_values")


class _Plain(nn.Module):
    """The model with its columns in one mapping, and its results in one tuple."""

    def __init__(self, model: nn.Module, columns: Columns, seen: Callable[[Iterable[str]], None]) -> None:
        super().__init__()
        self.model, self.columns, self.seen = model, columns, seen

    def forward(self, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Loss first."""
        rows = _hint(next(iter(given.values())).shape[0])
        every = enumerate(results(self.columns.call(self.model, given)).items())
        found = {name: t for at, (name, t) in every if not at or name == _SCORES or _hint(t.shape[0]) == rows}
        self.seen(found)  # a trace undoes what a forward sets on its module
        return tuple(found.values())


def flatten(model: nn.Module, example: Any, *, own_loss: bool = False) -> Flat:
    """The flat graph of a model in training mode, for batches like this one; without labels where the loss is another's."""
    columns = columns_of(model, example, own_loss=own_loss)
    outputs: list[str] = []
    plain = _Plain(model, columns, lambda names: outputs.__setitem__(slice(None), names))
    given = {name: _two_rows(t) for name, t in columns.given(example).items()}
    modes = {module: module.training for module in model.modules()}
    try:
        if not model.training:
            model.train()
        with standing(model), both_modes(model):
            program = _exported(plain, given)
    finally:
        for module, training in modes.items():
            module.training = training
    graph = program.module(check_guards=False).graph
    known = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))}
    return _written(graph, tuple(outputs), tuple(given), known)


def _two_rows(tensor: Tensor) -> Tensor:
    """One row would be taken for a size that never changes."""
    if not tensor.dim():
        raise MeshwrightError("a column of the batch is a single number", fix="tensors with one row per sample")
    return torch.cat([tensor, tensor]) if tensor.shape[0] == 1 else tensor


def _exported(plain: _Plain, given: Mapping[str, Tensor]) -> Any:
    """Exported with as many open sizes as the model allows."""
    problem: Exception | None = None
    for lengths in (True, False):
        shapes = ({name: _open_sizes(t, lengths) for name, t in given.items()},)
        try:
            with _quiet():
                return export(plain, (dict(given),), dynamic_shapes=shapes, strict=False)
        except MeshwrightError:
            raise
        except Exception as error:  # whatever the model or the tracer raises is the reason
            problem = problem or error
    assert problem is not None
    raise _unexportable(problem) from problem


def _open_sizes(tensor: Tensor, lengths: bool) -> dict[int, Any]:
    """Rows are open; so are the lengths of columns that hold numbers of tokens, or of sequences of vectors."""
    is_text = not tensor.is_floating_point() or tensor.dim() == 3
    more = range(1, tensor.dim() if not tensor.is_floating_point() else 2) if lengths and is_text else ()
    return {0: Dim.AUTO, **{dim: Dim.AUTO for dim in more if tensor.shape[dim] > 1}}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What torch says about a trace on its way is none of the user's business; what fails is said as an error."""
    logger = logging.getLogger("torch")
    level = logger.level
    names = [n for n in logging.root.manager.loggerDict if n.startswith("torch.")]
    levels = {name: logging.getLogger(name).level for name in names}
    nowhere = io.StringIO()
    try:
        for name in ("torch", *names):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        for name, before in levels.items():
            logging.getLogger(name).setLevel(before)


def _unexportable(error: Exception) -> MeshwrightError:
    """The reason, and the line of the model that it comes from."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    if isinstance(error, TypeError) and "missing" in text and "argument" in text:
        return MeshwrightError(
            f"the batch lacks a column that the model needs: {first}", fix="a mapping with that column, or a longer tuple"
        )
    where = ""
    if found := re.search(r'File "([^"]+)", line (\d+), in (\w+)\s*\n\s*(.+)', text):
        where = f"{found[1]}:{found[2]}, in {found[3]}: {found[4].strip()}"
    else:
        at = error.__traceback__
        while at is not None:
            code = at.tb_frame.f_code
            if "/torch/" not in code.co_filename and not code.co_filename.endswith(("capture/export.py", "capture/arguments.py")):
                where = f"{code.co_filename}:{at.tb_lineno}, in {code.co_name}"
            at = at.tb_next
    return MeshwrightError(
        f"the model cannot be captured: {type(error).__name__}: {first}" + (f"\n  at {where}" if where else ""),
        fix="no branches on values and no numpy in forward, or a list of layers, which is not captured",
    )


def results(output: Any) -> dict[str, Tensor]:
    """What a model returned, its loss first, then its scores, then what else it says of its rows; hidden states are left out."""
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
        fix="a batch with labels, or a model that returns a tensor, or an object with .loss",
    )


def _written(graph: torch.fx.Graph, outputs: tuple[str, ...], columns: tuple[str, ...], known: Collection[str]) -> Flat:
    """A traced graph as data."""
    nodes: list[Node] = []
    result: Any = None
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    names = dict(zip((node.name for node in inputs), columns, strict=True))
    for node in graph.nodes:
        if node.op == "output":
            result = _tree(node.args[0])
        else:
            nodes.append(_node(node, names, known))
    return Flat(tuple(nodes), tuple(_flattened(result)), outputs, columns, _fixed(inputs, names))


def _flattened(tree: Any) -> Iterator[Any]:
    if isinstance(tree, tuple | list):
        for part in tree:
            yield from _flattened(part)
    else:
        yield tree


def _fixed(inputs: list[torch.fx.Node], names: Mapping[str, str]) -> tuple[tuple[str, int, int], ...]:
    found = []
    for node in inputs:
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, int):
                found.append((names[node.name], dim, size))
    return tuple(found)


def _node(node: torch.fx.Node, columns: Mapping[str, str], known: Collection[str]) -> Node:
    value = node.meta.get("val")
    size, several = _size(value), isinstance(value, tuple | list)
    if node.op == "placeholder":
        return Node(node.name, Kind.COLUMN, columns.get(node.name, node.name), size=size)
    if node.op == "get_attr":
        owner: Any = node.graph.owning_module
        for part in str(node.target).split("."):
            owner = getattr(owner, part)
        if isinstance(owner, torch.fx.GraphModule):
            return Node(node.name, Kind.REGION, str(node.target), body=_region(owner.graph, known))
        name = str(node.target).removeprefix(f"{_INNER}.")
        value = None if name in known or owner.is_meta else owner.detach().tolist()
        return Node(node.name, Kind.STATE, name, size=_size(owner), constant=value)
    assert node.op == "call_function", f"{node.op} in an exported graph"
    return Node(
        node.name,
        Kind.CALL,
        name_of(node.target),
        _tree(tuple(node.args)),
        tuple((key, _tree(part)) for key, part in node.kwargs.items()),
        size,
        several,
        is_random(node.target, node.args, dict(node.kwargs)),
        is_inplace(node.target),
        _path(node),
    )


def _region(graph: torch.fx.Graph, known: Collection[str]) -> Flat:
    nodes, result = [], None
    for node in graph.nodes:
        if node.op == "output":
            result = _tree(node.args[0])
        else:
            nodes.append(_node(node, {}, known))
    return Flat(tuple(nodes), result)


def _tree(tree: Any) -> Any:
    """Arguments with references in place of nodes."""
    if isinstance(tree, torch.fx.Node):
        return Ref(tree.name)
    if isinstance(tree, tuple | list):
        parts = [_tree(part) for part in tree]
        return tuple(parts) if isinstance(tree, tuple) else parts
    if isinstance(tree, dict):
        return {key: _tree(part) for key, part in tree.items()}
    if isinstance(tree, slice):
        return slice(_tree(tree.start), _tree(tree.stop), _tree(tree.step))
    return tree


def _size(value: Any) -> Size | None:
    if not isinstance(value, Tensor):
        return None
    shape = tuple(_hint(size) for size in value.shape)
    count = 1
    for size in shape:
        count *= size
    return Size(shape, count * value.element_size(), str(value.dtype).removeprefix("torch."))


def _hint(size: Any) -> int:
    """An open size as it is in the example; one that depends on the data counts as 1."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return 1 if hint is None else int(hint)


def _path(node: torch.fx.Node) -> str:
    """The module that an operation stands in, as the model names it."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return path.removeprefix(_INNER).removeprefix(".") if path.startswith(_INNER) else ""
