"""Tables of torch functions by name: which draw random numbers, which overwrite a tensor, which only make one.

Unknown functions are treated conservatively: they may draw random numbers, so they are run again, and may read all arguments.
"""

from __future__ import annotations

from functools import cache

from meshwright.torch_internals import operator_draws

FACTORIES = {
    "arange", "bartlett_window", "blackman_window", "empty", "empty_strided", "eye", "full", "hamming_window",
    "hann_window", "kaiser_window", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm", "range", "tensor",
    "tril_indices", "triu_indices", "zeros", "normal", "scalar_tensor",
}  # fmt: skip
"""Functions that make a tensor from plain arguments. The result is the same every time, except for random numbers."""

UNFILLED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Functions that make a tensor without values."""

OVERWRITES = {
    "normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli_", "zero_", "fill_",
    "copy_", "constant_", "ones_", "zeros_", "eye_", "dirac_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_",
    "kaiming_normal_", "trunc_normal_", "orthogonal_", "sparse_",
}  # fmt: skip
"""Functions that overwrite every element of their first argument."""

PLAIN = {
    "constant_", "ones_", "zeros_", "eye_", "dirac_", "new_tensor", "bfloat16", "bool", "byte", "cdouble", "cfloat", "char",
    "double", "float", "half", "int", "long", "short", "type", "lu", "unravel_index", "to_sparse_coo",
}  # fmt: skip
"""Python functions that draw no random numbers. For functions of `torch.ops.aten` their tags tell."""

FORMS = {
    "requires_grad_", "share_memory_", "detach_", "t_", "squeeze_", "unsqueeze_", "transpose_", "swapaxes_", "swapdims_",
    "as_strided_", "resize_", "set_", "rename_", "retain_grad",
}  # fmt: skip
"""Functions that change the view of a tensor but not its values."""

READERS = {
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "nonzero", "unique", "__bool__", "__float__", "__int__",
    "__index__", "__complex__", "__array__", "__contains__", "__format__", "masked_select", "unique_consecutive",
}  # fmt: skip
"""Functions that return values of a tensor to Python."""

STATISTICS = {"batch_norm": ("running_mean", "running_var"), "instance_norm": ("running_mean", "running_var")}
"""Functions that change their second and third argument, with the names of these."""

UNIFORM = {"uniform_", "kaiming_uniform_", "xavier_uniform_"}
NORMAL = {"normal_", "kaiming_normal_", "xavier_normal_"}
"""Initialisers that draw exactly one such number per element."""


@cache
def draws(name: str) -> bool:
    """True if a function of this name may draw random numbers."""
    if name.startswith("__") or name in PLAIN or name in READERS:
        return False
    return operator_draws(name) is not False


def changes_first(name: str, owner: str | None) -> bool:
    """True if a function changes its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or name in _IN_PLACE
    if name in FORMS:
        return False
    return name.endswith("_") or (owner == "torch.nn.init" and name in OVERWRITES)


_IN_PLACE = {f"__i{op}__" for op in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
