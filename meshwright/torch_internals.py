"""Semi-private torch: what the package needs and torch does not offer in public. No other file of the package touches it.

Each entry has a reason, a check whether this release of torch has it (made once, at import), and a fallback. A fallback is
slower, or refuses with an error. It never gives other results in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import MeshwrightError


def _missing(name: str, what: str) -> MeshwrightError:
    """What to raise where a release of torch lacks something that cannot be replaced."""
    return MeshwrightError(
        f"torch {torch.__version__} has no {name}: {what}",
        fix="a release of torch that this version of meshwright is tested with, such as 2.13",
    )


def _has(thing: Any, *names: str) -> bool:
    return all(hasattr(thing, name) for name in names)


_MODULE_HOOKS = _has(nn.Module(), "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSOR_HOOKS = _has(torch.empty(0), "_backward_hooks", "_post_accumulate_grad_hooks")


def forward_hooks(module: Any) -> bool:
    """Does a module have forward hooks? Reason: torch has no public question. Fallback: refuses."""
    if not _MODULE_HOOKS:
        raise _missing("Module._forward_hooks", "hooks of a module cannot be seen, and might not be called")
    return bool(module._forward_hooks or module._forward_pre_hooks)


def backward_hooks(module: Any) -> bool:
    """Does a module have backward hooks? Reason: torch has no public question. Fallback: refuses."""
    if not _MODULE_HOOKS:
        raise _missing("Module._backward_hooks", "hooks of a module cannot be seen, and might not be called")
    return bool(module._backward_hooks or module._backward_pre_hooks)


def gradient_hooks(tensor: Any) -> bool:
    """Does a tensor have hooks on its gradient? Reason: torch has no public question. Fallback: refuses."""
    if not _TENSOR_HOOKS:
        raise _missing("Tensor._backward_hooks", "hooks of a gradient cannot be seen, and might not be called")
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def _fingerprint(tensor: Tensor) -> int:
    """A number that changes with the values of a tensor; never 0."""
    if tensor.is_meta:
        return 1
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    values = dense.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return int.from_bytes(blake2b(values.numpy().data, digest_size=8).digest(), "little") | 1 << 64


write_count: Callable[[Tensor], int] = attrgetter("_version") if _has(torch.empty(0), "_version") else _fingerprint
"""A number that changes when a tensor is written into; 0 means that a new tensor was not.

Reason: only this counter of autograd sees writes without a copy of the values. Fallback: a fingerprint of the values, which is
never 0.
"""


_TABLES = _has(nn.Module(), "_parameters", "_modules", "_buffers")


def module_tables(module: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The parameters, submodules and buffers that a module itself has, by name; the live tables.

    Reason: they are compared before every step; the public iterators take longer and leave out what is None. Fallback: refuses.
    """
    if not _TABLES:
        raise _missing("Module._parameters", "what is changed in a model cannot be seen")
    return module._parameters, module._modules, module._buffers


def cast_method() -> str:
    """The method of a module that `.to`, `.float` and the like go through. Reason: nothing public. Fallback: refuses."""
    if not _has(nn.Module, "_apply"):
        raise _missing("Module._apply", "casts of a module inside a forward cannot be seen")
    return "_apply"


_INITIALISERS: dict[CodeType, Callable[..., Any]] = {
    function.__code__: function
    for name in getattr(nn.init, "__all__", ())
    if name.endswith("_") and isinstance(function := getattr(nn.init, name), FunctionType)
}


def running_initialiser() -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """The outermost function of `torch.nn.init` that is being run, with its arguments.

    Reason: an initialiser is recorded as one call, and torch announces only the operations inside. Fallback: None; the
    operations inside are recorded one by one.
    """
    frame, found = inspect.currentframe(), None
    while frame is not None:
        if frame.f_code in _INITIALISERS:
            found = frame
        frame = frame.f_back
    if found is None:
        return None
    function, given = _INITIALISERS[found.f_code], found.f_locals
    names = list(inspect.signature(function).parameters)
    return (function, {name: given[name] for name in names}) if all(name in given for name in names) else None


def _operator(name: str, overload: str) -> Any:
    return getattr(getattr(torch.ops.aten, name, None), overload, None)


_BACKWARD, _LOOKUP = _operator("backward", "TensorList"), _operator("embedding_dense_backward", "default")
_CONVOLUTION = _operator("convolution_backward", "default")
_OVERLOAD = type(_operator("add", "Tensor"))
Grads = Sequence[Tensor | None]
Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
"""Stride, padding, dilation and groups of a convolution."""

run_backward: Callable[[Sequence[Tensor], Grads], None] = torch.autograd.backward if _BACKWARD is None else _BACKWARD
"""Run a backward from some outputs, with their gradients.

Reason: for a small stage the checks in Python of `torch.autograd.backward` cost half as much as the backward. Fallback: that one.
"""


def embedding_gradient(grad: Tensor, index: Tensor, rows: int, padding: int) -> Tensor:
    """The gradient of a table of `rows` rows; a `padding` of -1 is none.

    Reason: a split backward computes it later, without a graph. Fallback: the lookup again, and its backward.
    """
    if _LOOKUP is not None:
        found: Tensor = _LOOKUP(grad, index, rows, padding, False)
        return found
    with torch.enable_grad():
        table = grad.new_zeros(rows, grad.shape[-1]).requires_grad_()
        looked_up = nn.functional.embedding(index, table, None if padding < 0 else padding)
    return torch.autograd.grad(looked_up, table, grad)[0]


def convolution_gradients(grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, wanted: list[bool]) -> Grads:
    """The gradients of input, weight and bias that are `wanted`.

    Reason: a split backward computes them apart; `torch.nn.grad` gives none of a bias. Fallback: the convolution again, and its
    backward.
    """
    stride, padding, dilation, groups = geometry
    zeros, sizes = [0] * len(stride), [weight.shape[0]]
    if _CONVOLUTION is not None:
        found: Grads = _CONVOLUTION(grad, x, weight, sizes, stride, padding, dilation, False, zeros, groups, wanted)
        return found
    given = [x.detach(), weight.detach(), weight.new_zeros(sizes)]
    with torch.enable_grad():
        leaves = [t.requires_grad_(asked) for t, asked in zip(given, wanted, strict=True)]
        result = torch.convolution(leaves[0], leaves[1], leaves[2], stride, padding, dilation, False, zeros, groups)
    asked_for = [t for t in leaves if t.requires_grad]
    gradients = iter(torch.autograd.grad(result, asked_for, grad) if asked_for else ())
    return [next(gradients) if asked else None for asked in wanted]


def operator_draws(name: str) -> bool | None:
    """May an operator of torch draw random numbers? Reason: only its tags tell. Fallback: None, which is not known."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or not _has(packet, "overloads"):
        return None
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in packet.overloads())


def written_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes into; none of a plain function.

    Reason: only its schema tells. Fallback: refuses.
    """
    schema = getattr(operator, "_schema", None)
    if schema is None:
        if isinstance(operator, _OVERLOAD):
            raise _missing("OpOverload._schema", "what operators write into cannot be seen")
        return []
    if not schema.is_mutable:
        return []
    found = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if place < len(args):
                found.append(args[place])
            elif argument.name in kwargs:
                found.append(kwargs[argument.name])
    return found


try:
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:

    class TorchDispatchMode:  # type: ignore[no-redef]
        """Stands for the class that is missing."""

        def __init__(self) -> None:
            raise _missing("TorchDispatchMode", "the operations of a model cannot be seen")


DispatchMode = TorchDispatchMode
"""A context in which every operator goes through `__torch_dispatch__`.

Reason: nothing public sees the draws and writes that torch's own functions make. Fallback: a class that refuses to be made.
"""


def size_guards(program: Any) -> list[str] | None:
    """The conditions on sizes that an exported program took for granted, as Python text over `L['column'].size()[dim]`.

    Reason: a branch on a length (`if ids.shape[1] > 10`) is decided while tracing. The program keeps the condition, but only
    its own module checks it, and that module cannot be cut. Fallback: None, where this release of torch keeps no such text;
    every size must then be as in the example.
    """
    found = getattr(program, "_guards_code", None)
    return None if found is None else [str(text) for text in found]


def size_in_example(size: Any) -> int:
    """An open size as it is in the example; one that depends on the data counts as 1.

    Reason: asking in public (`int(size)`) would fix the size in the trace. Fallback: refuses.
    """
    if isinstance(size, int):
        return size
    if not _has(size, "node") or not _has(size.node, "hint"):
        raise _missing("SymInt.node.hint", "the sizes of a traced model cannot be seen")
    known = size.node.hint
    return 1 if known is None else int(known)


def is_data_dependent(error: BaseException) -> bool:
    """Did a trace end because it was asked for a value? Reason: torch's errors for it have no public names and no common base.

    Fallback: such an error is shown as torch words it.
    """
    return type(error).__name__ in (
        "GuardOnDataDependentSymNode",
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "PendingUnbackedSymbolNotFound",
    )


def has_no_value(tensor: Any) -> bool:
    """Is it a tensor of a trace, whose values nobody knows? Reason: torch has no public question.

    Fallback: none is; who asks for the value then gets torch's own error.
    """
    return type(tensor).__name__ == "FakeTensor" and getattr(tensor, "constant", None) is None


_TRANSFORMS = "torch._functorch" if find_spec("torch._functorch") else "torch._"


def is_transform(function: Any) -> bool:
    """Does a call in a graph belong to a transform of `torch.func`? Reason: these calls have no public names.

    Fallback: every call of a private function of torch counts as one, and is refused.
    """
    return isinstance(function, FunctionType) and function.__module__.startswith(_TRANSFORMS)


_DIRECT = _has(getattr(dist, "ProcessGroup", None), "send", "recv")
Post = Callable[[dist.ProcessGroup, list[Tensor], int, int], dist.Work]
_send: Any = lambda group, tensors, peer, tag: dist.isend(tensors[0], group=group, tag=tag, group_dst=peer)  # noqa: E731
_receive: Any = lambda group, tensors, peer, tag: dist.irecv(tensors[0], group=group, tag=tag, group_src=peer)  # noqa: E731
post_send: Post = dist.ProcessGroup.send if _DIRECT else _send
post_receive: Post = dist.ProcessGroup.recv if _DIRECT else _receive
"""Start to send to, or to receive from, a rank of a group: group, one tensor in a list, rank in the group, tag.

Reason: `dist.isend` and `dist.irecv` check their arguments in Python, a fifth of the time of a call. Fallback: those two.
"""
