"""What a user changes on a model after it was captured: its layers go on as they were, so it is named.

a parameter that is frozen or freed, added or replaced          refused: another model would be trained
a number of a module, or in a config, dict or list of it        a warning, once: captured layers keep the value of the capture
a buffer, or another tensor, replaced by another tensor         the same
a tensor that is no buffer, changed in place                    the same; buffers that are changed in place are followed
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.train.session.model_values import AttachedValue, Nested

log = logging.getLogger(__name__)

TOLD = 20
"""So many names at most: an object that counts for itself is no reason for a long log."""


REST = 16
"""Where a value is another at every step, the others are looked at this often: the look is as long as a small step."""


class Unchanged:
    """Looks whether a model is still the one that was captured; None is a list of layers, which runs as it is."""

    def __init__(self, model: Any) -> None:
        self.model = model if isinstance(model, nn.Module) else None
        self.parameters = self._parameters()
        self.trained = [] if self.model is None else list(self.model.parameters())
        self.frozen = [p.requires_grad for p in self.trained]
        self.attached = AttachedValue() if self.model is None else AttachedValue.of(self.model)
        self.first, self.told, self.rest = self.attached.values, set[str](), 0
        self.written = self.attached.written

    def _parameters(self) -> dict[str, tuple[int, bool]]:
        return {} if self.model is None else {name: (id(p), p.requires_grad) for name, p in self.model.named_parameters()}

    def refuse(self) -> None:
        """Raise on parameters that are others, warn about values that are."""
        if self.model is None or (self.attached.same() and [p.requires_grad for p in self.trained] == self.frozen):
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
        self.rest -= 1
        if self.rest > 0:
            return
        self.attached, self.rest = AttachedValue.of(self.model), REST if self.told else 0
        self._tell_written()
        for name, value in self.attached.values.items():
            if name in self.first and name not in self.told and len(self.told) < TOLD and not _equal(self.first[name], value):
                self.told.add(name)
                log.warning(
                    "%s was %s when the model was captured and is %s now: captured layers go on with the first",
                    name, _shown(self.first[name]), _shown(value, other=isinstance(self.first[name], Tensor)),
                )  # fmt: skip

    def _tell_written(self) -> None:
        """Warn about tensors that were changed in place and are no buffers: their values are constants of captured layers."""
        for name, times in self.attached.written.items():
            is_same = name in self.written and self.first[name] is self.attached.values[name]
            if is_same and times != self.written[name] and name not in self.told and len(self.told) < TOLD:
                self.told.add(name)
                log.warning(
                    "%s is a tensor that was changed in place after the model was captured: captured layers go on with its first "
                    "values; register_buffer(%r, ...) makes it a buffer, which they follow", name, name.rpartition(".")[2],
                )  # fmt: skip


def _equal(before: Any, after: Any) -> bool:
    """Are they the same tensor, equal numbers, or both containers, whose values have names of their own?"""
    if isinstance(before, Tensor) or isinstance(after, Tensor):
        return before is after
    return bool(before is after or before == after or (before != before and after != after))


def _shown(value: Any, *, other: bool = False) -> str:
    """A value in a warning."""
    if isinstance(value, Tensor):
        return "another tensor" if other else "a tensor"
    return str(value) if isinstance(value, Nested) else repr(value)[:80]
