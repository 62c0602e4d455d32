"""Handles value checks inside a forward: `if labels.max() >= self.config.vocab_size: raise ValueError(...)`.

A trace has no values, so it cannot take a branch on one. If one side of the branch only raises, a training step can only take the
other side, so that side is captured. The captured layers do not contain the check: a training step does not detect a batch that
the model would reject; only running the model itself does. Other branches on values are refused.

Which side raises is read from the bytecode of the branch. No source text is needed, and `and`, `or`, `not` and `assert` need no
rules of their own.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from meshwright.capture.trace.patches.replaced_attribute import replaced
from meshwright.torch_internals import has_no_value, is_data_dependent

_ASKS = ("COMPARE_OP", "TO_BOOL")
"""Bytecode instructions with which newer Python versions compute a truth value just before the jump."""

_LEAVES = ("RETURN", "YIELD", "FOR_ITER", "SEND")
_WITH = ("WITH_EXCEPT_START", "RERAISE")
"""How the cleanup of a `with` block treats an error: it raises the error again."""


@contextmanager
def checks_pass() -> Iterator[None]:
    """While a model is traced, a branch on a value takes the side that does not raise, if the other side only raises."""
    with ExitStack() as stack:
        for owner in (Tensor, torch.SymBool):
            stack.enter_context(replaced(owner, "__bool__", _asking(owner.__bool__)))
        yield


def _asking(truth: Any) -> Any:
    def ask(value: Any) -> bool:
        frame = sys._getframe(1)
        if has_no_value(value):
            found = passing(frame)
            return bool(truth(value)) if found is None else found
        try:
            return bool(truth(value))
        except Exception as error:  # torch has no public class for it
            if not is_data_dependent(error) or (found := passing(frame)) is None:
                raise
            return found

    return ask


def passing(frame: FrameType) -> bool | None:
    """Return the truth value for which the branch of a frame does not raise; None if both sides may continue, or neither."""
    steps = list(dis.get_instructions(frame.f_code))
    at = next((i for i, step in enumerate(steps) if step.offset == frame.f_lasti), None)
    if at is not None and steps[at].opname in _ASKS:
        at += 1
    if at is None or at + 1 >= len(steps) or "POP_JUMP" not in steps[at].opname:
        return None
    jumps_if = steps[at].opname.rpartition("_IF_")[2]
    if jumps_if not in ("TRUE", "FALSE"):
        return None
    target = _at(steps, steps[at].argval)
    jumped, stayed = (_only_raises(frame.f_code, steps, start) for start in (target, at + 1))
    if jumped == stayed:
        return None
    return (jumps_if == "TRUE") != jumped


def _at(steps: Sequence[dis.Instruction], offset: int) -> int:
    return next(i for i, step in enumerate(steps) if step.offset >= offset)


def _only_raises(code: CodeType, steps: Sequence[dis.Instruction], at: int) -> bool:
    """True if the code from here reaches a `raise` on its only path, and no handler in this function catches it."""
    for _ in range(len(steps)):
        step = steps[at]
        if step.opname == "RAISE_VARARGS":
            return not _caught(code, steps, step.offset)
        if any(name in step.opname for name in _LEAVES) or "_IF_" in step.opname:
            return False
        at = _at(steps, step.argval) if "JUMP" in step.opname else at + 1
        if at >= len(steps):
            return False
    return False


def _caught(code: CodeType, steps: Sequence[dis.Instruction], offset: int) -> bool:
    """True if a handler may catch an error here. The handler of a `with` block does not count."""
    bytecode: Any = dis.Bytecode(code)
    for entry in bytecode.exception_entries:
        if entry.start <= offset < entry.end:
            handler = steps[_at(steps, entry.target) : _at(steps, entry.target) + 2]
            if not any(step.opname in _WITH for step in handler):
                return True
    return False
