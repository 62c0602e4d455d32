"""What a user changes on a model after it was captured: its layers go on as they were, so it is named.

a parameter that is frozen or freed, added or replaced      refused: another model would be trained
a number of a module (`model.alpha = 0.3`)                  a warning, once: captured layers keep the value of the capture
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from meshwright.capture.check.untouched import plain_attributes
from meshwright.errors import MeshwrightError

log = logging.getLogger(__name__)


class Unchanged:
    """Looks whether a model is still the one that was captured; None is a list of layers, which runs as it is."""

    def __init__(self, model: Any) -> None:
        self.model = model if isinstance(model, nn.Module) else None
        self.parameters = self._parameters()
        self.attributes = {} if self.model is None else plain_attributes(self.model)

    def _parameters(self) -> dict[str, tuple[int, bool]]:
        return {} if self.model is None else {name: (id(p), p.requires_grad) for name, p in self.model.named_parameters()}

    def refuse(self) -> None:
        """Raise on parameters that are others, warn about numbers that are."""
        if self.model is None:
            return
        now = self._parameters()
        if now != self.parameters:
            name = next(n for n in {**self.parameters, **now} if self.parameters.get(n) != now.get(n))
            before, after = self.parameters.get(name), now.get(name)
            what = "frozen" if before and after and before[0] == after[0] and before[1] else "changed"
            raise MeshwrightError(
                f"{name} was {what} after the model was captured: its layers would train on as before",
                fix="a new session, or a new Trainer, with the model as it is now",
            )
        for name, value in plain_attributes(self.model).items():
            if name in self.attributes and self.attributes[name] is not value and self.attributes[name] != value:
                log.warning(
                    "%s was %r when the model was captured and is %r now: captured layers go on with the first",
                    name, self.attributes[name], value,
                )  # fmt: skip
                self.attributes[name] = value
