"""From an ordinary model to stages: what it is made of, where it may be cut, and its weights where they are needed.

The package is also the function of its name: `meshwright.capture(model, example_batch)` gives the model's `ModelGraph`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from meshwright.ir.model import ModelGraph


class _Callable(ModuleType):
    """A package that can be called."""

    def __call__(self, model: nn.Module, example_batch: Any) -> ModelGraph:
        """The chain of layers of a model, on any device and on meta."""
        from meshwright.capture.model_graph import capture

        return capture(model, example_batch)


sys.modules[__name__].__class__ = _Callable
