"""Finds the first module that differs: looks up the output of each module among the values of the captured graph.

A module has no counterpart in the graph, but its output does: an operation of the graph computes the same value. The first module
whose output is not found is where the captured layers differ from the model. If all outputs are found, gradients are looked up in
the same way, starting at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from meshwright.capture.check.fingerprints import Mark, apart, mark
from meshwright.capture.check.paired_runs import Run, one_number

LOOSE = 10.0
"""A value counts as found within this many tolerances."""


class _Noting(fx.Interpreter):
    """Runs a layer and reports the result of each operation."""

    def __init__(self, body: fx.GraphModule, note: Callable[[Any], None]) -> None:
        super().__init__(body)
        self.note = note

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        self.note(found)
        return found


class _Values:
    """Marks of values, and of their gradients."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.values: list[Mark] = []
        self.gradients: dict[int, Mark] = {}

    def note(self, found: Any, name: str = "") -> None:
        """Mark the tensors of a result, and their gradients when they arrive."""
        for t in found if isinstance(found, tuple | list) else [found]:
            if isinstance(t, Tensor) and t.is_floating_point() and t.numel():
                number = len(self.values)
                self.names.append(name)
                self.values.append(mark(t))
                if t.requires_grad:
                    t.register_hook(lambda gradient, number=number: self._arrived(number, gradient))

    def _arrived(self, number: int, gradient: Tensor) -> None:
        self.gradients[number] = mark(gradient)


def first_difference(
    model: nn.Module,
    own: Run,
    layers: Sequence[Any],
    given: Mapping[str, Tensor],
    *,
    begin: Callable[[], None],
    tolerance: float,
    outputs: bool,
) -> str:
    """Return a phrase for the first layer that differs; empty if all module outputs and their gradients agree.

    `begin` is called before each run. `outputs` is true if the outputs of the whole model differ, and not only its gradients.
    """
    theirs, ours = _Values(), _Values()
    begin()
    hooks = [m.register_forward_hook(_shown(ours, name)) for name, m in model.named_modules() if name]
    try:
        own(given).backward(1.0)
    finally:
        for hook in hooks:
            hook.remove()
    begin()
    try:
        _run_noting(layers, given, theirs)
    except Exception as error:  # the graph cannot run this size; the operation that raised is the place
        return f"an operation that raises {type(error).__name__}"
    finally:
        for p in model.parameters():
            p.grad = None
    lost = [name for name, value in zip(ours.names, ours.values, strict=True) if not _is_among(value, theirs.values, tolerance)]
    if lost:
        return f"the output of {lost[0]}"
    known = list(theirs.gradients.values())
    wrong = [ours.names[n] for n, g in sorted(ours.gradients.items()) if not _is_among(g, known, tolerance)]
    if not wrong:
        return ""
    return f"an operation after the output of {wrong[-1]}" if outputs else f"the gradient that reaches the output of {wrong[-1]}"


def _shown(values: _Values, name: str) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, given: Any, output: Any) -> None:
        values.note(_first_tensor(output), name)

    return hook


def _first_tensor(tree: Any) -> Tensor | None:
    if isinstance(tree, Tensor):
        return tree
    parts = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, tuple | list) else ()
    return next((found for part in parts if (found := _first_tensor(part)) is not None), None)


def _run_noting(layers: Sequence[Any], given: Mapping[str, Tensor], values: _Values) -> None:
    """Run all layers operation by operation, then their backward."""
    crossing: tuple[Any, ...] = ()
    made_again: dict[int, Any] = {}
    for layer in layers:
        columns = {name: given[name].clone() for name in layer.batch_columns}
        free: list[Any] = []
        if layer.prelude is not None:
            if id(layer.prelude) not in made_again:
                made_again[id(layer.prelude)] = layer.prelude(columns)
            free = [made_again[id(layer.prelude)][name] for name in layer.free]
        crossing = _Noting(layer.body, values.note).run(*crossing, *(columns[name] for name in layer.direct), *free)
    if crossing[0].requires_grad:
        one_number(crossing[0]).backward()  # type: ignore[no-untyped-call]


def _is_among(value: Mark, others: Sequence[Mark], tolerance: float) -> bool:
    bar = LOOSE * tolerance
    return any(apart(value, other) <= bar for other in others if abs(value.norm - other.norm) <= bar * max(value.norm, 1e-30))
