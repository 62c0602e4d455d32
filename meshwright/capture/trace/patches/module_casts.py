"""Casts of modules inside a forward (`self.classifier.to(torch.float32)`): they pass where they change nothing.

A trace cannot swap a parameter for another. Where dtype and device are as asked for, there is nothing to swap (routers of
Switch Transformers and NLLB); where not, the forward would change the model in its first step, and is refused by name.
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
    """While a model is traced: `.to`, `.float` and the like of its modules do nothing, or are refused where they would."""
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
                    fix="that change before training, once for all",
                )
        return module

    with replaced(nn.Module, method, looked):
        yield


def _changed(before: Tensor, after: Tensor) -> str | None:
    for what in ("dtype", "device"):
        if (a := getattr(before, what)) != (b := getattr(after, what)):
            return f"from {a} to {b}"
    return None
