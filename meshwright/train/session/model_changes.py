"""Detects changes to a model after it was captured. The captured layers do not follow them, so the user must know.

parameter frozen, unfrozen, added or replaced                     raises: the captured layers would train another model
number in a module, or in its config, dicts or lists, changed     warns once: captured layers keep the value from the capture
buffer, or another tensor, replaced by a new tensor               warns once, as above
tensor that is not a buffer, changed in place                     warns once; captured layers follow buffers changed in place
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.train.session.model_values import AttachedValues, Nested

log = logging.getLogger(__name__)

MOST_WARNINGS = 20
"""The largest number of warnings: a model with many counters must not fill the log."""


CHECK_EVERY = 16
"""If some value changes at every step, all values are checked only every 16 steps: a check takes as long as a small step."""


class ModelChanges:
    """Checks that a model is still the one that was captured. Of a list of layers, `listed`, only parameters are checked."""

    def __init__(self, model: Any, listed: Any = None) -> None:
        self.model = model if isinstance(model, nn.Module) else None
        self.listed = [] if listed is None else [(name, p, p.requires_grad) for name, p in listed.named_parameters()]
        self.parameters = self._parameters()
        self.trained = [] if self.model is None else list(self.model.parameters())
        self.frozen = [p.requires_grad for p in self.trained]
        self.attached = AttachedValues() if self.model is None else AttachedValues.of(self.model)
        self.first, self.warned, self.steps_to_check = self.attached.values, set[str](), 0
        self.first_writes = self.attached.writes

    def _parameters(self) -> dict[str, tuple[int, bool]]:
        return {} if self.model is None else {name: (id(p), p.requires_grad) for name, p in self.model.named_parameters()}

    def check(self) -> None:
        """Raises if parameters have changed, and warns about other values that have changed."""
        for name, parameter, learns in self.listed:
            if parameter.requires_grad != learns:
                raise MeshwrightError(
                    f"{name} was {'frozen' if learns else 'unfrozen'} after the session was opened: it would "
                    f"{'still be updated' if learns else 'not be updated'}",
                    fix="a new session, with the layers as they are now",
                )
        if self.model is None or (self.attached.same() and [p.requires_grad for p in self.trained] == self.frozen):
            return
        now = self._parameters()
        if now != self.parameters:
            name = next(n for n in {**self.parameters, **now} if self.parameters.get(n) != now.get(n))
            before, after = self.parameters.get(name), now.get(name)
            what = "frozen" if before and after and before[0] == after[0] and before[1] else "changed"
            raise MeshwrightError(
                f"{name} was {what} after the model was captured: the captured layers would ignore that change",
                fix="a new session, or a new Trainer, with the model as it is now",
            )
        self.steps_to_check -= 1
        if self.steps_to_check > 0:
            return
        self.attached, self.steps_to_check = AttachedValues.of(self.model), CHECK_EVERY if self.warned else 0
        self._warn_about_writes()
        for name, value in self.attached.values.items():
            if (
                name in self.first
                and name not in self.warned
                and len(self.warned) < MOST_WARNINGS
                and not _equal(self.first[name], value)
            ):
                self.warned.add(name)
                log.warning(
                    "%s was %s when the model was captured and is %s now: captured layers keep the first value",
                    name, _shown(self.first[name]), _shown(value, other=isinstance(self.first[name], Tensor)),
                )  # fmt: skip

    def _warn_about_writes(self) -> None:
        """Warns about tensors that are not buffers and were changed in place: captured layers hold them as constants."""
        for name, writes in self.attached.writes.items():
            is_same = name in self.first_writes and self.first[name] is self.attached.values[name]
            if is_same and writes != self.first_writes[name] and name not in self.warned and len(self.warned) < MOST_WARNINGS:
                self.warned.add(name)
                log.warning(
                    "%s is a tensor that was changed in place after the model was captured: captured layers keep its first "
                    "values; register_buffer(%r, ...) makes it a buffer, which they follow", name, name.rpartition(".")[2],
                )  # fmt: skip


def _equal(before: Any, after: Any) -> bool:
    """Returns whether two values are the same tensor, equal plain values, or containers of the same type and size."""
    if isinstance(before, Tensor) or isinstance(after, Tensor):
        return before is after
    return bool(before is after or before == after or (before != before and after != after))


def _shown(value: Any, *, other: bool = False) -> str:
    """Returns a value as text for a warning."""
    if isinstance(value, Tensor):
        return "another tensor" if other else "a tensor"
    return str(value) if isinstance(value, Nested) else repr(value)[:80]
