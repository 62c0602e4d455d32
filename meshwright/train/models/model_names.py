"""Resolves MODEL on the command line: a preset, a small model, a TOML file, a config.json, or package.module:function.

resolve_model("gpt-tiny")               a preset: a TOML file in meshwright/presets/models
resolve_model("gpt")                    a small model with its data: a list of layers, `mlp` or `gpt`
resolve_model("mine.toml")              a file in the format of a preset
resolve_model("config.json")            a configuration of transformers
resolve_model("package.module:build")   a function of the user
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.ir.imported_function import function
from meshwright.ir.input_limits import file_text, shown, toml
from meshwright.ir.reader import Reader, parsed, table, text
from meshwright.train.models.model_heads import CAUSAL, default_head, give_start_token

SCHEMA = 1
KEYS = frozenset({"schema", "head", "dataset", "config"})
SMALL = ("mlp", "gpt")
"""Small models with their own data, from `train/models/small_models.py`."""


@dataclass(frozen=True)
class NamedModel:
    """A resolved MODEL: how to build it, and what is known about its data. It can be sent to workers."""

    name: str
    build: Callable[[], Any]
    dataset: str | None = None
    """The default data set."""
    positions: int | None = None
    """The largest number of tokens per row; None if it is not known."""
    batch: Callable[..., Any] | None = None
    """A function batch(step, rows=...), for a model with its own data."""

    @property
    def is_own(self) -> bool:
        """True if a function of the user builds it, so that nothing is known about its data."""
        return ":" in self.name


def resolve_model(name: str, *, stages: int = 1) -> NamedModel:
    """Return the model that MODEL names. A small model has at least as many layers as there are `stages`."""
    if name in SMALL:
        return _small(name, stages)
    if ":" in name:
        return NamedModel(name, function(name))
    found = model_file(name)
    return NamedModel(name, found.build, found.dataset, found.positions)


def _small(name: str, stages: int) -> NamedModel:
    from meshwright.train.models import small_models as small

    rows = f"{small.__name__}:{name}_rows"
    if name == "mlp":
        return NamedModel(name, partial(small.mlp, layers=max(16, stages)), rows, batch=small.mlp_batch)
    return NamedModel(name, partial(small.gpt, blocks=max(8, stages - 2)), rows, batch=small.text_batch)


@dataclass(frozen=True)
class ModelFile:
    """A model of transformers, given by its configuration. `head` is the model class or Auto class; None chooses by the model."""

    head: str | None
    config: Mapping[str, Any] = field(default_factory=dict)
    dataset: str | None = None

    def build(self) -> Any:
        """Build the model with new weights."""
        import transformers

        options = dict(self.config)
        if self.head is not None and not hasattr(transformers, self.head):
            raise MeshwrightError(f"transformers has no {self.head!r}", fix=CAUSAL)
        try:
            config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
        except Exception as error:  # configurations raise errors of several classes
            raise MeshwrightError(
                f"transformers cannot make this configuration: {error}",
                fix="use a known model_type and values of the right types",
            ) from error
        head = self.head or default_head(config)
        give_start_token(config)
        kind = getattr(transformers, head)
        try:
            model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
        except Exception as error:  # a model class may raise anything for numbers that do not fit
            raise MeshwrightError(
                f"{head} cannot be built from this configuration: {type(error).__name__}: {error}",
                fix="use the types and sizes that a configuration of this model has",
            ) from error
        if head == CAUSAL and getattr(model, "loss_type", None) is None:
            model.loss_type = "ForCausalLM"  # the class name does not tell, but this is the loss it uses
        return model

    @property
    def positions(self) -> int | None:
        """The number of positions of the model; None if its configuration does not contain it."""
        names = ("n_positions", "max_position_embeddings")
        found = next((self.config[name] for name in names if self.config.get(name) is not None), None)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise MeshwrightError(f"the configuration has {shown(found)} positions", fix="use a whole number of at least 1")
        return found


def presets() -> list[str]:
    """Return the names of the models in the package."""
    return sorted(path.name.removesuffix(".toml") for path in _folder().iterdir() if path.name.endswith(".toml"))


def model_file(name: str) -> ModelFile:
    """Read a preset, a TOML file or a config.json."""
    path = Path(name)
    if path.suffix == ".json":
        return _from_config(path)
    if path.suffix != ".toml" and name not in presets():
        known = [*SMALL, *presets()]
        raise MeshwrightError(
            f"there is no model {name!r}{did_you_mean(name, known)}",
            fix=f"{', '.join(known)}, a TOML, a config.json, or package.module:function",
        )
    raw = file_text(path, "the model") if path.suffix == ".toml" else (_folder() / f"{name}.toml").read_text()
    data = toml(raw, f"the model {name}")
    if "config" not in data and isinstance(data.get("model"), str):
        raise MeshwrightError(f"{name} is a training job, not a model", fix=f"use its model, {shown(data['model'])}")
    read = Reader(data, f"the model {name}", kind=None, schema=SCHEMA, keys=KEYS)
    config = read("config", table)
    if "model_type" not in config:
        raise MeshwrightError(f"the model {name} has no config.model_type", fix='model_type = "gpt2"')
    return ModelFile(read("head", text), config, read("dataset", text, None))


def _from_config(path: Path) -> ModelFile:
    config = parsed(file_text(path, "the configuration"), f"the configuration {path}")
    if isinstance(config, dict) and config.get("kind") == "model":
        raise MeshwrightError(f"{path} has the layers of a model, not the model", fix="pass the model itself")
    if not isinstance(config, dict) or "model_type" not in config:
        raise MeshwrightError(
            f"{path} is not a configuration of transformers: it has no model_type", fix="pass the config.json of a model"
        )
    heads = config.get("architectures") or [None]
    if not isinstance(config["model_type"], str) or not isinstance(heads, list) or not isinstance(heads[0], str | None):
        raise MeshwrightError(
            f"{path} has the model_type {shown(config['model_type'])} and the architectures {shown(heads)}",
            fix='"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]',
        )
    return ModelFile(heads[0], config)


def _folder() -> Any:
    return resources.files("meshwright.presets") / "models"
