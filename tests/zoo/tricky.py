"""Families of models that no list names, each for one habit that a tracer may get wrong without a word."""

from __future__ import annotations

from typing import Any

from tests.zoo import tricky_models as t
from tests.zoo.family import Family, labels, rows
from tests.zoo.plain import numbers, only_tokens

KIND = "tricky"


def words(name: str, build: Any, **more: Any) -> Family:
    return Family(name, KIND, build, more.pop("batch", only_tokens), more.pop("items", labels), **more)


FAMILIES = (
    words("writes in place before an embedding", t.Shifted),
    words("straight-through estimator", t.Binary),
    words("hook on a tensor", t.Hooked),
    words("backward hook of a module", t.Backward),
    words("forward hook of a module", t.Forward),
    words("reentrant checkpoints", t.Reentrant),
    words("checkpoints", t.Checkpointed),
    words("if self.training", t.ByMode),
    words("state that counts calls", t.Counting),
    words("random.random()", t.Dice),
    words("branch on the length", t.ByLength),
    words("divided by len(labels)", t.ByRows, items=rows),
    words("masked mean by hand", t.ByTokens, items=rows),
    words("experts by index", t.Sparse),
    words("vmap", t.Mapped),
    words("attention by einsum", t.Einsum),
    words("writes into slices", t.Sliced),
    words("torch.tensor of numbers", t.Constants),
    words("parametrised weights", t.Spectral),
    words("numpy", t.Numpy),
    words("branch on values", t.ByValue),
    words("leaves early by .item()", t.Early),
    words("hidden states in a dictionary", t.Dictionary),
    Family("two pictures a row, and text", KIND, t.Pair, t.pair, rows),
    Family("loss that is a sum", KIND, t.Summed, numbers, rows),
)
