"""Handles casts of modules inside a forward (`self.classifier.to(torch.float32)`): allowed if they change nothing.

A trace cannot replace a parameter. If dtype and device are already as requested, nothing has to be replaced; the routers of
Switch Transformers and NLLB do this. Otherwise the forward would change the model in its first step, and an error names the
tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from meshwright.capture.trace.patches.replaced_attribute import replaced
from meshwright.capture.trace.patches.user_lines import asking
from meshwright.errors import MeshwrightError
from meshwright.torch_internals import cast_method


@contextmanager
def casts_pass(model: nn.Module) -> Iterator[None]:
    """While a model is traced, `.to`, `.float` and similar calls on its modules do nothing, or raise if a tensor would change."""
    names = {module: name for name, module in model.named_modules()}
    method = cast_method()
    apply = getattr(nn.Module, method)

    def looked(module: nn.Module, change: Any, *args: Any, **kwargs: Any) -> Any:
        if module not in names:
            return apply(module, change, *args, **kwargs)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if (found := _changed(tensor, change(tensor.detach()))) is not None:
                where = f"{names[module]}.{name}".removeprefix(".")
                raise MeshwrightError(
                    f"the forward changes {where!r} {found} at {asking()}, which a captured graph cannot do",
                    fix="make that change once, before training",
                )
        return module

    with replaced(nn.Module, method, looked):
        yield


def _changed(before: Tensor, after: Tensor) -> str | None:
    for what in ("dtype", "device"):
        if (a := getattr(before, what)) != (b := getattr(after, what)):
            return f"from {a} to {b}"
    return None
