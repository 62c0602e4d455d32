"""Explains why a model cannot be captured: what its forward does, at which line, what torch reports, and what to do.

If the model also fails without a trace, the error says so, because then the trace is not the cause.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from meshwright.capture.trace.patches.user_lines import is_users, last, line
from meshwright.errors import MeshwrightError
from meshwright.torch_internals import is_data_dependent, is_transform

_NOT_CAPTURED = "or pass a list of layers, which is not captured"
_AS_TENSORS = f"use torch.where and masks instead of branches, loops and sizes that depend on values, {_NOT_CAPTURED}"


def unexportable(model: nn.Module, error: Exception, given: Sequence[str], run: Callable[[], object]) -> MeshwrightError:
    """Build the error for a failed trace. `run` runs the model without tracing it."""
    own = _fails_by_itself(model, run)
    if lacking := _lacking(model, own or error, given, certain=own is not None):
        return lacking
    if own is not None:
        return MeshwrightError(
            f"the model itself fails on this batch, before any capture: {_named(own)}{_place(model, own)}",
            fix="pass a batch that the model accepts",
        )
    what, fix = _words(model, error)
    said = f"\n  torch says: {_named(error)}" if what else ""
    return MeshwrightError(f"the model cannot be captured: {what or _named(error)}{_place(model, error)}{said}", fix=fix)


def _fails_by_itself(model: nn.Module, run: Callable[[], object]) -> Exception | None:
    """Return the error that the model raises without a trace, or None. Buffers and random states are restored.

    A model without weights cannot run, so the result for it is None.
    """
    if any(t.is_meta or not t.untyped_storage().size() for t in (*model.parameters(), *model.buffers()) if t.numel()):
        return None
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            run()
    except Exception as error:  # the model may raise anything
        return error
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
    return None


def _lacking(model: nn.Module, error: Exception, given: Sequence[str], *, certain: bool) -> MeshwrightError | None:
    """Build the error for a missing column, or return None.

    If only the trace failed, the error must mention the model's forward, or its line must mention the column.
    """
    text, first = str(error), _first(error)
    if isinstance(error, TypeError) and text.startswith(f"{type(model).__qualname__}.forward() missing"):
        return MeshwrightError(
            f"the batch lacks a column that the model needs: {first}", fix="pass a mapping with that column, or a longer tuple"
        )
    absent = _absent(model, given) if "NoneType" in first else []
    if absent and (certain or any(name in _line(error) for name in absent)):
        return MeshwrightError(
            f"the model needs a column that the batch lacks ({first}); the batch has {', '.join(map(repr, given))}",
            fix=f"pass a batch with {' or '.join(map(repr, absent))}",
        )
    return None


def _absent(model: nn.Module, given: Sequence[str]) -> list[str]:
    """Return the optional arguments of the model that the batch does not have; only its main input, if the model names one."""
    arguments = inspect.signature(model.forward).parameters.values()
    absent = [a.name for a in arguments if a.default is None and a.name not in given]
    main = [name for name in absent if name == getattr(model, "main_input_name", None)]
    return main or absent


def _words(model: nn.Module, error: Exception) -> tuple[str, str]:
    """Describe what the forward does that a trace cannot follow, and what to do. The first text may be empty."""
    text = str(error)
    if "fake tensor in the exported program constant" in text or isinstance(error, StopIteration):
        return (
            "its forward uses the .data of a tensor, or keeps a tensor from one call to the next",
            "use .detach() instead of .data, and register_buffer for tensors that are kept",
        )
    if ".numpy() is not supported" in text or "Cannot convert a FakeTensor to numpy" in text:
        return (
            "its forward turns a tensor into a numpy array, whose values a graph would freeze",
            f"use torch operations instead of numpy, {_NOT_CAPTURED}",
        )
    if _packs(error):
        return (
            "its forward packs sequences by their lengths (pack_padded_sequence), so that sizes depend on values",
            f"use the padded sequence and a mask, {_NOT_CAPTURED}",
        )
    if is_data_dependent(error):
        if re.search("expert|moe", _line(error).partition(", in ")[2] + _inside(model, error), re.IGNORECASE):
            return "it sends tokens to experts in a Python loop, so that values decide which experts run", _experts_fix(model)
        return "its forward reads the value of a tensor (a branch, a loop, .item(), or a size made from values)", _AS_TENSORS
    if re.search(r"\bSym(Int|Float|Bool)\b", text):
        return "its forward takes a number out of a tensor (.item(), float()) and uses it outside of torch", _AS_TENSORS
    if type(error).__name__ == "UnsupportedOperatorException":
        return f"its forward uses {_first(error)}, which torch cannot trace", f"use other operations there, {_NOT_CAPTURED}"
    return "", f"rewrite that line, {_NOT_CAPTURED}"


def _experts_fix(model: Any) -> str:
    """Suggest how to run the experts. Models of transformers may be able to run them as one grouped product."""
    can = getattr(model, "_can_set_experts_implementation", None)
    if can is not None and can():
        return 'model.set_experts_implementation("grouped_mm"), or experts_implementation="grouped_mm" where it is made'
    return f"select the tokens of every expert by index, also for experts without tokens, {_NOT_CAPTURED}"


def refuse_transforms(graph: torch.fx.Graph) -> None:
    """Raise if the forward uses `torch.func`: its transforms keep a level that a graph cannot be cut across."""
    for node in graph.nodes:
        if is_transform(node.target):
            stack = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', node.meta.get("stack_trace") or "")
            users = [f"\n  at {line(file, int(at), name)}" for file, at, name in stack if is_users(file)]
            raise MeshwrightError(
                "the model cannot be captured: its forward uses a transform of torch.func (vmap, jvp), with a state that a graph "
                f"cannot be cut across{users[-1] if users else ''}",
                fix=f"use the same operations on whole tensors (most accept leading dimensions, as vmap does), {_NOT_CAPTURED}",
            )


def _named(error: Exception) -> str:
    name, first = type(error).__name__, _first(error)
    return first if first == name else f"{name}: {first}"


def _first(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _place(model: nn.Module, error: Exception) -> str:
    """Return the line of the model that an error comes from, and the innermost module there."""
    at, inside = _line(error), _inside(model, error)
    return (f"\n  at {at}" if at else "") + (f"\n  in the module {inside}" if inside else "")


def _line(error: Exception) -> str:
    """Return the line of an error. Torch's message may name the line where a value was made instead of the line that reads it."""
    found = re.search(r'File "([^"]+)", line (\d+), in (\w+)\s*\n\s*(.+)', str(error))
    return (
        f"{found[1]}:{found[2]}, in {found[3]}: {found[4].strip()}" if found and is_users(found[1]) else last(error.__traceback__)
    )


def _inside(model: nn.Module, error: Exception) -> str:
    names = {module: name for name, module in model.named_modules()}
    inside = ""
    for frame in _frames(error):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(module):
            inside = f"{names[module]!r}, {type(module).__name__}"
    return inside


def _frames(error: Exception) -> Iterator[FrameType]:
    at = error.__traceback__
    while at is not None:
        yield at.tb_frame
        at = at.tb_next


def _packs(error: Exception) -> bool:
    """True if an error came from a function that packs sequences, or from one that received a packed sequence."""
    frames = list(_frames(error))
    packed = any(isinstance(value, nn.utils.rnn.PackedSequence) for frame in frames for value in frame.f_locals.values())
    return packed or any(frame.f_code.co_filename == nn.utils.rnn.__file__ for frame in frames)
