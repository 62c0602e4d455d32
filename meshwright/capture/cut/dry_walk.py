"""Runs layers on tensors without values, to find what they keep for the backward, pass on, and need for a while.

Each layer runs alone, as the first of a stage would. Kernels and formats are chosen as on the device: fused attention keeps no
scores, mixed precision keeps copies of weights. Equal layers run once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from meshwright.capture.cut.equal_layers import layer_kinds
from meshwright.capture.cut.gpu_kernels import as_on_gpu
from meshwright.capture.cut.liveness import Line
from meshwright.capture.cut.stage_modules import Captured, States, layer
from meshwright.capture.trace.graph import NodeKind
from meshwright.torch_internals import DispatchMode, without_values

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TensorSize:
    """A tensor that crosses a cut."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size in memory."""
        return int(torch.Size(self.shape).numel() * self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class DryLayer:
    """What a layer keeps, takes and passes on. `given` and `passed` tell which inputs and outputs it saves."""

    kind: str
    inputs: tuple[TensorSize, ...]
    outputs: tuple[TensorSize, ...]
    saved: int
    given: tuple[bool, ...]
    passed: tuple[bool, ...]
    transient: int = 0
    """The most that it needs at one time beyond what it keeps, with gradients of its parameters."""


@dataclass(frozen=True, slots=True)
class WalkOptions:
    """How layers run: the number of rows (None: that of the example), the format of mixed precision, whose kernels."""

    rows: int | None = None
    mixed: torch.dtype | None = None
    gpu: bool = False
    transients: bool = False


def dry_walk(line: Line, places: Sequence[int], model: nn.Module, options: WalkOptions | None = None) -> list[DryLayer]:
    """Run all layers. `saved` of a layer leaves out parameters, and inputs that the layer before saves too."""
    options = options or WalkOptions()
    kinds, known = layer_kinds(line, places, model), dict[Any, DryLayer]()
    found: list[DryLayer] = []
    with without_values():
        states, columns = states_like(model, _like), _columns(line, options.rows)
        inputs: tuple[TensorSize, ...] = ()
        for kind, (first, last) in zip(kinds, pairwise(places), strict=True):
            if (kind, inputs) not in known:
                module = layer(line, first, last, states, CPU)
                module = as_on_gpu(module) if options.gpu else module
                own = {name: columns[name] for name in module.batch_columns}
                known[kind, inputs] = _run(module, kind, inputs, own, options, is_last=last == len(line.work))
            one = known[kind, inputs]
            found.append(_without_shared(one, found[-1] if found else None))
            inputs = one.outputs
    return found


def _without_shared(one: DryLayer, before: DryLayer | None) -> DryLayer:
    """Leave out inputs that are counted for the layer before."""
    twice = zip(one.given, before.passed, one.inputs, strict=True) if before is not None else ()
    size = sum(value.bytes for mine, other, value in twice if mine and other)
    return DryLayer(one.kind, one.inputs, one.outputs, one.saved - size, one.given, one.passed, one.transient)


def _run(
    module: Captured,
    kind: str,
    sizes: tuple[TensorSize, ...],
    columns: dict[str, Tensor],
    options: WalkOptions,
    *,
    is_last: bool,
) -> DryLayer:
    weights = [p.untyped_storage() for p in module.parameters()]
    own = set(map(id, weights))
    seen: dict[int, UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # kept so that its id stays unique; the tensor would keep the whole graph alive
        if id(storage) not in own:
            seen.setdefault(id(storage), storage)
        return tensor

    given = [torch.empty(size.shape, dtype=size.dtype, device=CPU) for size in sizes]
    given = [t.requires_grad_() if t.is_floating_point() else t for t in given]
    cast = nullcontext() if options.mixed is None else torch.autocast("cpu", dtype=options.mixed)
    live = LiveBytes((*given, *module.parameters(), *module.buffers(), *columns.values())) if options.transients else None
    inputs = tuple(t + 0 for t in given) if module.inplace else tuple(given)  # a leaf cannot be changed in place
    with live or nullcontext(), torch.enable_grad(), cast, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        outputs = module(*inputs, **columns)
    places = [[id(t.untyped_storage()) in seen for t in tensors] for tensors in (inputs, outputs)]
    saved = sum(storage.nbytes() for storage in seen.values())
    seen.clear()
    transient = 0
    if live is not None:
        leaves = [t for t in (*given, *module.parameters()) if t.requires_grad]
        transient = max(live.peak - live.now, _backward(live, outputs[:1] if is_last else outputs, leaves))
    known = tuple(TensorSize(tuple(t.shape), t.dtype) for t in outputs)
    return DryLayer(kind, sizes, known, saved, tuple(places[0]), tuple(places[1]), transient)


def _backward(live: LiveBytes, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> int:
    """Runs a backward. Returns the peak of the memory that it needs in addition to what exists when it starts."""
    before = live.peak = live.now
    learning = [t for t in outputs if t.requires_grad]
    if learning and leaves:
        with live:
            torch.autograd.grad(learning, leaves, [torch.empty_like(t) for t in learning], allow_unused=True)
    return live.peak - before


class LiveBytes(DispatchMode):
    """Counts the bytes of the tensors that operations make, and the largest sum at one time. What was there before is free."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._before = {id(storage): storage for storage in map(Tensor.untyped_storage, before)}
        self._known: dict[int, weakref.ref[UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note its results."""
        found = function(*args, **(kwargs or {}))
        for tensor in _tensors(found):
            self._note(tensor.untyped_storage())
        return found

    def _note(self, storage: UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key not in self._known and key not in self._before:
            self._known[key] = weakref.ref(storage, lambda _: self._gone(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def _gone(self, key: int, size: int) -> None:
        del self._known[key]
        self.now -= size


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for part in tree:
            yield from _tensors(part)


def states_like(model: nn.Module, like: Callable[[str, Tensor], Tensor]) -> States:
    """Returns the states of a model with other tensors: `like` makes each from its first name and the tensor of the model.

    No operation may take the model's own tensors here: a mode without values would keep references to them.
    """
    states = States(model)
    made = {p: nn.Parameter(like(name, p), p.requires_grad) for p, name in states.first.items()}
    states.parameters = {name: made[p] for name, p in states.parameters.items()}
    states.first = {made[p]: name for p, name in states.first.items()}
    states.buffers = {name: like(name, buffer) for name, buffer in states.buffers.items()}
    return states


def _like(_: str, tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=CPU)


def _columns(line: Line, rows: int | None) -> dict[str, Tensor]:
    found = {}
    for node in line.flat.nodes:
        if node.kind is NodeKind.COLUMN:
            assert node.size is not None
            shape = node.size.shape if rows is None else (rows, *node.size.shape[1:])
            found[node.target] = torch.empty(shape, dtype=getattr(torch, node.size.dtype), device=CPU)
    return found
