"""Optimizers that are known to update each element by itself, so that a rank may hold and update a part of a tensor.

A plan is chosen before the optimizer exists. Others may be elementwise, too: a run tests it (`coupled_parameters.py`), a planner
does not choose plans that need it.
"""

from __future__ import annotations

NAMES = ("adamw_torch", "adamw_hf", "adamw_apex", "sgd", "adagrad", "rmsprop")
"""Beginnings of names of transformers."""
CLASSES = frozenset({"Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD"})
"""Classes of `torch.optim`."""
NOT = ("8bit", "4bit")
"""Parts of names of optimizers with moments that are quantized by block."""


def is_elementwise(optimizer: object) -> bool:
    """Returns whether an optimizer, a name of transformers or a class, is known to be elementwise."""
    if not isinstance(optimizer, str):
        name = getattr(optimizer, "__name__", "")
        return name in CLASSES and str(getattr(optimizer, "__module__", "")).startswith("torch.optim")
    name = optimizer.lower().rpartition(".")[2]
    return name.startswith(NAMES) and not any(part in name for part in NOT)
