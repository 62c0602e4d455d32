"""Why a model cannot be captured, in words: what its forward does, at which line, what torch says, and what to do.

A model that fails without a trace too is told so: then the trace is not the reason.
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

_NOT_CAPTURED = "or a list of layers, which is not captured"
_AS_TENSORS = f"torch.where and masks in place of branches, loops and sizes that values decide, {_NOT_CAPTURED}"


def unexportable(model: nn.Module, error: Exception, given: Sequence[str], run: Callable[[], object]) -> MeshwrightError:
    """The reason of an error that a trace ended with; `run` runs the model without one."""
    own = _fails_by_itself(model, run)
    if lacking := _lacking(model, own or error, given, certain=own is not None):
        return lacking
    if own is not None:
        return MeshwrightError(
            f"the model itself fails on this batch, before any capture: {_named(own)}{_place(model, own)}",
            fix="a batch that the model takes",
        )
    what, fix = _words(model, error)
    said = f"\n  torch says: {_named(error)}" if what else ""
    return MeshwrightError(f"the model cannot be captured: {what or _named(error)}{_place(model, error)}{said}", fix=fix)


def _fails_by_itself(model: nn.Module, run: Callable[[], object]) -> Exception | None:
    """What the model raises without a trace; buffers and random numbers are as before. A model without weights cannot tell."""
    if any(t.is_meta or not t.untyped_storage().size() for t in (*model.parameters(), *model.buffers()) if t.numel()):
        return None
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            run()
    except Exception as error:  # whatever the model raises is the reason
        return error
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
    return None


def _lacking(model: nn.Module, error: Exception, given: Sequence[str], *, certain: bool) -> MeshwrightError | None:
    """A column that the batch does not have. An error of a trace alone must name the model's forward, or the column's line."""
    text, first = str(error), _first(error)
    if isinstance(error, TypeError) and text.startswith(f"{type(model).__qualname__}.forward() missing"):
        return MeshwrightError(
            f"the batch lacks a column that the model needs: {first}", fix="a mapping with that column, or a longer tuple"
        )
    absent = _absent(model, given) if "NoneType" in first else []
    if absent and (certain or any(name in _line(error) for name in absent)):
        return MeshwrightError(
            f"the model cannot do without a column that the batch lacks ({first}); the batch has {', '.join(map(repr, given))}",
            fix=f"a batch with {' or '.join(map(repr, absent))}",
        )
    return None


def _absent(model: nn.Module, given: Sequence[str]) -> list[str]:
    """What a model may be called with and was not: its main input, where it names one."""
    arguments = inspect.signature(model.forward).parameters.values()
    absent = [a.name for a in arguments if a.default is None and a.name not in given]
    main = [name for name in absent if name == getattr(model, "main_input_name", None)]
    return main or absent


def _words(model: nn.Module, error: Exception) -> tuple[str, str]:
    """What a forward does that a trace cannot follow, and what to do; no words where only torch has some."""
    text = str(error)
    if "fake tensor in the exported program constant" in text or isinstance(error, StopIteration):
        return (
            "its forward uses the .data of a tensor, or keeps a tensor from one call to the next",
            ".detach() in place of .data; register_buffer for what is kept",
        )
    if ".numpy() is not supported" in text or "Cannot convert a FakeTensor to numpy" in text:
        return (
            "its forward turns a tensor into a numpy array, whose values a graph would freeze",
            f"torch operations in place of numpy, {_NOT_CAPTURED}",
        )
    if _packs(error):
        return (
            "its forward packs sequences by their lengths (pack_padded_sequence), so that sizes depend on values",
            f"the padded sequence itself and a mask for what follows, {_NOT_CAPTURED}",
        )
    if is_data_dependent(error):
        if re.search("expert|moe", _line(error).partition(", in ")[2] + _inside(model, error), re.IGNORECASE):
            return "it sends tokens to experts in a Python loop, so that values decide which experts run", _experts_fix(model)
        return "its forward asks for the value of a tensor (a branch, a loop, .item(), or a size that values decide)", _AS_TENSORS
    if re.search(r"\bSym(Int|Float|Bool)\b", text):
        return "its forward takes a number out of a tensor (.item(), float()) and uses it outside of torch", _AS_TENSORS
    if type(error).__name__ == "UnsupportedOperatorException":
        return f"its forward uses {_first(error)}, which torch cannot trace", f"other operations there, {_NOT_CAPTURED}"
    return "", f"that line in another way, {_NOT_CAPTURED}"


def _experts_fix(model: Any) -> str:
    """Models of transformers may run their experts as one grouped product."""
    can = getattr(model, "_can_set_experts_implementation", None)
    if can is not None and can():
        return 'model.set_experts_implementation("grouped_mm"), or experts_implementation="grouped_mm" where it is made'
    return f"experts that take tokens by index for each expert in turn, hit or not, {_NOT_CAPTURED}"


def refuse_transforms(graph: torch.fx.Graph) -> None:
    """Functions of `torch.func` keep a level that a graph cannot be cut across."""
    for node in graph.nodes:
        if is_transform(node.target):
            stack = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', node.meta.get("stack_trace") or "")
            users = [f"\n  at {line(file, int(at), name)}" for file, at, name in stack if is_users(file)]
            raise MeshwrightError(
                "the model cannot be captured: its forward uses a transform of torch.func (vmap, jvp), with a state that a graph "
                f"cannot be cut across{users[-1] if users else ''}",
                fix=f"the same operations on whole tensors: most of them take leading dimensions as vmap does, {_NOT_CAPTURED}",
            )


def _named(error: Exception) -> str:
    name, first = type(error).__name__, _first(error)
    return first if first == name else f"{name}: {first}"


def _first(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _place(model: nn.Module, error: Exception) -> str:
    """The line of the model that an error comes from, and its innermost module."""
    at, inside = _line(error), _inside(model, error)
    return (f"\n  at {at}" if at else "") + (f"\n  in the module {inside}" if inside else "")


def _line(error: Exception) -> str:
    """Torch may know the line that a value comes from, rather than the one that asks for it."""
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
    """Did an error come through a function that packs sequences, or that was given one?"""
    frames = list(_frames(error))
    packed = any(isinstance(value, nn.utils.rnn.PackedSequence) for frame in frames for value in frame.f_locals.values())
    return packed or any(frame.f_code.co_filename == nn.utils.rnn.__file__ for frame in frames)
