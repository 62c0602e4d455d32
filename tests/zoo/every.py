"""All families by name; workers find a model and its batches here."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from tests.zoo import audio, decoders, encoders, experts, multimodal, over_time, plain, recurrent, seq2seq, tricky, vision
from tests.zoo.configured import library
from tests.zoo.family import Family, built
from tests.zoo.study import Finding, study

MODULES = (decoders, encoders, seq2seq, experts, recurrent, vision, audio, multimodal, over_time, plain, tricky)
FAMILIES: dict[str, Family] = {family.name: family for module in MODULES for family in module.FAMILIES}


def still(name: str, dtype: str = "float64") -> nn.Module:
    """The model of a family with every dropout set to 0: a run on workers draws from other streams than one process."""
    model = built(FAMILIES[name], dtype=getattr(torch, dtype))
    seen = [vars(m) for m in model.modules()] + [
        vars(c) for m in model.modules() if (c := getattr(m, "config", None)) is not None
    ]
    for own in seen:
        for key, value in own.items():
            if isinstance(value, float) and ("drop" in key or key == "p"):
                own[key] = 0.0
    return model


def step(name: str, number: int) -> dict[str, Tensor]:
    """The batch of a step, six rows of the size that was captured."""
    family = FAMILIES[name]
    return family.batch(6, family.sizes[0][1], number)


def named(name: str) -> Finding:
    """What becomes of a family."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    library()
    return study(FAMILIES[name])
