"""Checks the types of a Trainer's arguments in its constructor. The error names the wrong argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from meshwright.capture.weights.sketch import Skeleton
from meshwright.errors import MeshwrightError

_NEVER_CALLED = (
    "compute_loss",
    "training_step",
    "prediction_step",
    "create_optimizer",
    "create_scheduler",
    "get_train_dataloader",
)
"""Methods of the Hugging Face Trainer that a subclass may override, but that this Trainer never calls."""


def refuse_given(kind: type, given: Mapping[str, Any]) -> None:
    """Checks all arguments of a Trainer, and refuses a class with methods that would never be called."""
    for name in _NEVER_CALLED:
        if hasattr(kind, name):
            raise MeshwrightError(
                f"{kind.__name__} overrides {name}, which is never called because the model is cut into stages",
                fix="compute_loss_func=, optimizers= or data_collator=",
            )
    refuse_model(given["model"], given["model_init"])
    refuse_dataset("train_dataset", given["train_dataset"])
    refuse_dataset("eval_dataset", given["eval_dataset"], several=True)
    _refuse_parts(given)


def refuse_model(model: Any, model_init: Any) -> None:
    """Raises unless the model is a module, a sketch or a list of layers, or `model_init` is a function that returns one."""
    if (model is None) == (model_init is None):
        raise MeshwrightError("a Trainer needs a model, or model_init, and not both", fix="Trainer(model=...)")
    if model_init is not None and not callable(model_init):
        raise MeshwrightError(
            f"model_init is {_shown(model_init)}, which cannot be called", fix="a function that returns a model"
        )
    if model_init is not None and any(a.default is a.empty for a in signature(model_init).parameters.values()):
        raise MeshwrightError("model_init is called without arguments, but this one requires some", fix="functools.partial")
    if model is None or isinstance(model, nn.Module | Skeleton):
        return
    if isinstance(model, str):
        load = f"AutoModelForCausalLM.from_pretrained({model!r})"
        raise MeshwrightError(f"model is the string {model!r}, not a model", fix=f"model={load}, or another class that loads it")
    if isinstance(model, type):
        raise MeshwrightError(f"model is the class {model.__name__}, not a model", fix=f"model={model.__name__}(...)")
    if not isinstance(model, list | tuple):
        raise MeshwrightError(f"model is {_shown(model)}", fix="an nn.Module, a list of them, or meshwright.sketch(build)")
    if not model or not all(isinstance(layer, nn.Module) for layer in model):
        wrong = next((layer for layer in model if not isinstance(layer, nn.Module)), None)
        what = "has no layers" if not model else f"has {_shown(wrong)} among its layers"
        raise MeshwrightError(f"the model is a list that {what}", fix="a list of nn.Modules")


def refuse_dataset(name: str, dataset: Any, *, several: bool = False, needed: bool = False) -> None:
    """Raises unless the data set has rows by number or is an iterable.

    `several` allows a mapping of data sets by name. None is allowed unless `needed` is set.
    """
    if dataset is None and needed:
        raise MeshwrightError(f"there is no {name}", fix=f"{name}=a data set")
    if dataset is None:
        return
    if several and isinstance(dataset, dict):
        if not dataset:
            raise MeshwrightError(f"{name} is an empty mapping", fix=f"{name}=None, or data sets by name")
        for key, one in dataset.items():
            refuse_dataset(f"{name}[{key!r}]", one)
        return
    rows = hasattr(dataset, "__getitem__")
    if isinstance(dataset, str | bytes | type | dict) or not (rows or isinstance(dataset, Iterable)):
        raise MeshwrightError(
            f"{name} is {_shown(dataset)}, which can neither be indexed by row nor iterated over",
            fix="a Dataset of torch or Hugging Face, or a list of rows",
        )


def refuse_training(model: nn.Module, dataset: Any) -> None:
    """Raises if there is no training data, or if no parameter is trained."""
    refuse_dataset("train_dataset", dataset)
    if dataset is None:
        raise MeshwrightError("there is no train_dataset to train on", fix="Trainer(train_dataset=...)")
    if not any(p.requires_grad for p in model.parameters()):
        raise MeshwrightError("all parameters of the model are frozen: nothing would be trained", fix="requires_grad_(True)")


def refuse_loaders(processes: int, ranks: int) -> None:
    """Refuses data loader processes for local workers, which cannot start processes."""
    if processes:
        raise MeshwrightError(
            f"dataloader_num_workers={processes}, but local workers cannot start processes of their own",
            fix=f"dataloader_num_workers=0, or torchrun --nproc-per-node {ranks}",
        )


def refuse_checkpointing(model: Any) -> None:
    """Refuses a model after `model.gradient_checkpointing_enable()`, which cannot be pickled for workers."""
    if getattr(model, "is_gradient_checkpointing", False):
        raise MeshwrightError(
            "the model has its own gradient checkpointing enabled, which cannot be sent to local workers",
            fix="model.gradient_checkpointing_disable(), and TrainingArguments(gradient_checkpointing=True)",
        )


def _refuse_parts(given: Mapping[str, Any]) -> None:
    """Checks functions, callbacks and optimizers."""
    for name in ("data_collator", "compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"):
        if given[name] is not None and not callable(given[name]):
            raise MeshwrightError(f"{name} is {_shown(given[name])}, which cannot be called", fix=f"{name}=a function")
    callbacks = given["callbacks"]
    if callbacks is not None and not isinstance(callbacks, list | tuple):
        raise MeshwrightError(f"callbacks is {_shown(callbacks)}", fix="callbacks=[...]")
    for callback in callbacks or ():
        refuse_callback(callback)
    _refuse_optimizers(given["optimizers"], given["optimizer_cls_and_kwargs"])


def refuse_callback(callback: Any) -> None:
    """Raises unless the callback is a TrainerCallback, or a class of them."""
    kind = callback if isinstance(callback, type) else type(callback)
    if not issubclass(kind, TrainerCallback):
        raise MeshwrightError(
            f"a callback is {_shown(callback)}, not a TrainerCallback", fix="a transformers.TrainerCallback, or its class"
        )


def refuse_checkpoint(given: Any) -> None:
    """Raises unless the value is a folder, True, False or None."""
    if given is not None and not isinstance(given, bool | str) and not hasattr(given, "__fspath__"):
        raise MeshwrightError(f"resume_from_checkpoint is {_shown(given)}", fix="True, or the folder of a checkpoint")
    if isinstance(given, str) and not given.strip():
        raise MeshwrightError("resume_from_checkpoint is an empty string", fix="None, True, or the folder of a checkpoint")


def _refuse_optimizers(pair: Any, chosen: Any) -> None:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise MeshwrightError(f"optimizers is {_shown(pair)}", fix="optimizers=(optimizer, scheduler), either may be None")
    optimizer, scheduler = pair
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise MeshwrightError(f"optimizers has {_shown(optimizer)} as its optimizer", fix="a torch.optim.Optimizer")
    if scheduler is not None and not hasattr(scheduler, "step"):
        raise MeshwrightError(f"optimizers has {_shown(scheduler)} as its scheduler", fix="a schedule of that optimizer, or None")
    if chosen is not None and not (isinstance(chosen, tuple | list) and len(chosen) == 2 and isinstance(chosen[1], Mapping)):
        raise MeshwrightError(f"optimizer_cls_and_kwargs is {_shown(chosen)}", fix="(torch.optim.AdamW, {'lr': 1e-3})")


def _shown(value: Any) -> str:
    """Returns a wrong value as text for an error."""
    return value.__name__ if isinstance(value, type) else f"{type(value).__name__} {repr(value)[:60]}"
