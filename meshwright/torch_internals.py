"""All uses of semi-private torch: what the package needs and torch does not offer as a public API. No other file uses it.

Each entry has a reason, a check that this release of torch has it (made once, at import), and a fallback. A fallback is slower,
or it raises. It never changes results silently.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import MeshwrightError


def _missing(name: str, what: str) -> MeshwrightError:
    """Returns the error for a release of torch that lacks something that has no replacement."""
    return MeshwrightError(
        f"torch {torch.__version__} has no {name}: {what}",
        fix="install a release of torch that this version of meshwright is tested with, such as 2.13",
    )


def _has(thing: Any, *names: str) -> bool:
    return all(hasattr(thing, name) for name in names)


_HOOKS = {
    "Module": ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    "Tensor": ("_backward_hooks", "_post_accumulate_grad_hooks"),
    "Optimizer": ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
}
_HOOKED = {"Module": nn.Module(), "Tensor": torch.empty(0), "Optimizer": torch.optim.SGD([torch.empty(0)], lr=0.0)}
_HIDDEN = {kind for kind, thing in _HOOKED.items() if not _has(thing, *_HOOKS[kind])}


def has_hooks(kind: str, thing: Any, which: slice) -> bool:
    """Returns whether a thing has some hooks. Reason: torch has no public API for this. Fallback: raises."""
    if kind in _HIDDEN:
        raise _missing(f"{kind}.{_HOOKS[kind][0]}", f"hooks of a {kind} cannot be detected, and might not be called")
    return any(getattr(thing, name, None) for name in _HOOKS[kind][which])


forward_hooks = partial(has_hooks, "Module", which=slice(2))
backward_hooks = partial(has_hooks, "Module", which=slice(2, 4))
gradient_hooks = partial(has_hooks, "Tensor", which=slice(2))
step_hooks = partial(has_hooks, "Optimizer", which=slice(2))


def _fingerprint(tensor: Tensor) -> int:
    """Returns a hash of the values of a tensor; never 0."""
    if tensor.is_meta:
        return 1
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    values = dense.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return int.from_bytes(blake2b(values.numpy().data, digest_size=8).digest(), "little") | 1 << 64


write_count: Callable[[Tensor], int] = attrgetter("_version") if _has(torch.empty(0), "_version") else _fingerprint
"""Returns a number that changes when a tensor is written to; 0 for a new tensor that was never written to.

Reason: only this counter of autograd detects writes without a copy of the values. Fallback: a hash of the values, which is
never 0.
"""


_TABLES = _has(nn.Module(), "_parameters", "_modules", "_buffers")


def module_tables(module: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Returns the live dicts of a module's own parameters, submodules and buffers, by name.

    Reason: they are compared before every step. The public iterators are slower and skip entries that are None. Fallback: raises.
    """
    if not _TABLES:
        raise _missing("Module._parameters", "changes to a model cannot be detected")
    return module._parameters, module._modules, module._buffers


def cast_method() -> str:
    """Returns the name of the method that `.to`, `.float` and similar methods of a module call.

    Reason: torch has no public API for this. Fallback: raises.
    """
    if not _has(nn.Module, "_apply"):
        raise _missing("Module._apply", "casts of a module inside a forward cannot be detected")
    return "_apply"


_INITIALISERS: dict[CodeType, Callable[..., Any]] = {
    function.__code__: function
    for name in getattr(nn.init, "__all__", ())
    if name.endswith("_") and isinstance(function := getattr(nn.init, name), FunctionType)
}


def running_initialiser() -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """Returns the outermost function of `torch.nn.init` on the call stack, with its arguments.

    Reason: an initialiser is recorded as one call, but torch reports only the operations inside it. Fallback: returns None, and
    the operations inside are recorded one by one.
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
"""Runs a backward from some outputs, with their gradients.

Reason: for a small stage the Python checks of `torch.autograd.backward` cost half as much as the backward itself. Fallback:
`torch.autograd.backward`.
"""


def embedding_gradient(grad: Tensor, index: Tensor, rows: int, padding: int) -> Tensor:
    """Returns the gradient of an embedding table with `rows` rows. A `padding` of -1 means no padding index.

    Reason: a split backward computes it later, without a graph. Fallback: runs the lookup and its backward again.
    """
    if _LOOKUP is not None:
        found: Tensor = _LOOKUP(grad, index, rows, padding, False)
        return found
    with torch.enable_grad():
        table = grad.new_zeros(rows, grad.shape[-1]).requires_grad_()
        looked_up = nn.functional.embedding(index, table, None if padding < 0 else padding)
    return torch.autograd.grad(looked_up, table, grad)[0]


def convolution_gradients(grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, wanted: list[bool]) -> Grads:
    """Returns the gradients of input, weight and bias that are `wanted`.

    Reason: a split backward computes them at different times, and `torch.nn.grad` has no function for the bias. Fallback: runs
    the convolution and its backward again.
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
    """Returns whether an operator may draw random numbers. Reason: only its tags tell. Fallback: returns None (unknown)."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or not _has(packet, "overloads"):
        return None
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in packet.overloads())


def schema_arguments(operator: Any, why: str) -> list[Any] | None:
    """Returns the arguments in an operator's schema; None for a plain function. Reason: no public way. Fallback: raises `why`."""
    schema = getattr(operator, "_schema", None)
    if schema is None and isinstance(operator, _OVERLOAD):
        raise _missing("OpOverload._schema", why)
    return None if schema is None else list(schema.arguments)


def written_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the arguments that an operator writes to; an empty list for a plain function.

    Reason: only the operator's schema tells. Fallback: raises.
    """
    found = []
    for place, argument in enumerate(schema_arguments(operator, "it is unknown which arguments an operator writes to") or ()):
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
        """Replaces the missing class of torch. Creating an instance raises."""

        def __init__(self) -> None:
            raise _missing("TorchDispatchMode", "the operations of a model cannot be recorded")


DispatchMode = TorchDispatchMode
"""A context in which every operator call goes through `__torch_dispatch__`. Fallback: a class that raises when instantiated.

Reason: no public API reports the random draws and writes inside torch's own functions.
"""


def without_values() -> Any:
    """Returns a context in which new tensors have sizes but no values. Fallback: raises.

    Reason: unlike meta tensors, these choose kernels and formats as the tensors of a device do.
    """
    if not find_spec("torch._subclasses.fake_tensor"):
        raise _missing("FakeTensorMode", "layers cannot run without values")
    return import_module("torch._subclasses.fake_tensor").FakeTensorMode(allow_non_fake_inputs=True)


def size_guards(program: Any) -> list[str] | None:
    """Returns the conditions on sizes that an exported program assumes, as Python text over `L['column'].size()[dim]`.

    Reason: tracing decides a branch on a length (`if ids.shape[1] > 10`). The program keeps the condition, but only its own
    module checks it, and that module cannot be cut into stages. Fallback: returns None if this release of torch does not keep the
    text; then every size must be the same as in the example.
    """
    found = getattr(program, "_guards_code", None)
    return None if found is None else [str(text) for text in found]


def size_in_example(size: Any) -> int:
    """Returns the value that a dynamic size has in the example; 1 for a size that depends on the data.

    Reason: the public way (`int(size)`) makes the size constant in the trace. Fallback: raises."""
    if isinstance(size, int):
        return size
    if not _has(size, "node") or not _has(size.node, "hint"):
        raise _missing("SymInt.node.hint", "the sizes of a traced model cannot be read")
    known = size.node.hint
    return 1 if known is None else int(known)


def is_data_dependent(error: BaseException) -> bool:
    """Returns whether a trace failed because it needed the value of a tensor.

    Reason: torch's errors for this have no public names and no common base. Fallback: torch's own error text is shown."""
    return type(error).__name__ in (
        "GuardOnDataDependentSymNode",
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "PendingUnbackedSymbolNotFound",
    )


def has_no_value(tensor: Any) -> bool:
    """Returns whether a tensor is of a trace and has no known value. Reason: no public API. Fallback: False; torch raises."""
    return type(tensor).__name__ == "FakeTensor" and getattr(tensor, "constant", None) is None


_TRANSFORMS = "torch._functorch" if find_spec("torch._functorch") else "torch._"


def is_transform(function: Any) -> bool:
    """Returns whether a call in a graph belongs to a transform of `torch.func`. Reason: these calls have no public names.

    Fallback: every call of a private function of torch is treated as one and is refused.
    """
    return isinstance(function, FunctionType) and function.__module__.startswith(_TRANSFORMS)


_DIRECT = _has(getattr(dist, "ProcessGroup", None), "send", "recv")
Post = Callable[[dist.ProcessGroup, list[Tensor], int, int], dist.Work]
_send: Any = lambda group, tensors, peer, tag: dist.isend(tensors[0], group=group, tag=tag, group_dst=peer)  # noqa: E731
_receive: Any = lambda group, tensors, peer, tag: dist.irecv(tensors[0], group=group, tag=tag, group_src=peer)  # noqa: E731
post_send: Post = dist.ProcessGroup.send if _DIRECT else _send
post_receive: Post = dist.ProcessGroup.recv if _DIRECT else _receive
"""Start a send to, or a receive from, a rank of a group. Arguments: group, list of one tensor, rank in the group, tag.

Reason: the Python argument checks of `dist.isend` and `dist.irecv` take a fifth of the time of a call. Fallback: these two
functions.
"""
