"""A model as a list of layers: cut into stages, its parameters sorted into units, ties found by identity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.ir.profile import StageCost
from meshwright.runtime.stage.objective import Weigh
from meshwright.torch_internals import gradient_hooks

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of every column of a batch."""


@dataclass(frozen=True)
class Layers:
    """Layers that run one after another, and where each stage begins; `starts` ends with their number."""

    modules: tuple[nn.Module, ...]
    starts: tuple[int, ...]
    original: Mapping[nn.Parameter, str] | None = None
    """The names that a captured model itself has for its parameters."""
    columns: tuple[str, ...] | None = None
    """The batch columns that a captured model takes, in order; each of its layers names those it reads."""
    weigh: Weigh | None = None
    """What the loss of some rows counts, from their columns, where the model's own loss says so."""
    refusal: Callable[[Shapes], str | None] | None = None
    """Why a captured model cannot run on columns of these shapes: what its trace took for granted about them."""
    again: Callable[[Mapping[str, Tensor]], Layers] | None = None
    """Captures the model once more, for columns of other sizes; the stages have the same parameters."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """What the columns of a captured model are: a forward may ask for it."""
    moved: tuple[str, ...] = ()
    """The buffers that a captured model changes in its forward."""
    evaluation: Layers | None = None
    """The layers of another graph for evaluation, where the model does something else there."""
    costs: tuple[StageCost, ...] | None = None
    """What stages cost against each other, by the operations of a captured model; None where nothing says so."""
    graph: str = ""
    """The digest of a captured model's graph."""

    @classmethod
    def of(cls, built: Any, stages: int) -> Layers:
        """From what a user built: a list of modules or a Sequential, cut into even runs; one module is one stage."""
        if isinstance(built, nn.Sequential | nn.ModuleList | list | tuple):
            modules = tuple(built)
        elif isinstance(built, nn.Module):
            modules = (built,)
        else:
            raise MeshwrightError(
                f"build() returned {type(built).__name__}", fix="a module, or a list of modules, one after another"
            )
        if not all(isinstance(m, nn.Module) for m in modules):
            raise MeshwrightError("build() returned a list that holds more than modules", fix="wrap functions in a module")
        if len(modules) < stages:
            what = "one module" if len(modules) == 1 else f"{len(modules)} layers"
            raise MeshwrightError(f"{what} cannot be cut into {stages} stages", fix=f"a list of at least {stages} modules")
        return cls(modules, tuple(len(modules) * s // stages for s in range(stages + 1)))

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.starts) - 1

    def of_stage(self, stage: int) -> tuple[nn.Module, ...]:
        """The layers of one stage."""
        return self.modules[self.starts[stage] : self.starts[stage + 1]]

    @cached_property
    def names(self) -> dict[nn.Parameter, str]:
        """The first name of every parameter, as in the list of layers, or as the captured model has it."""
        found: dict[nn.Parameter, str] = {}
        for index, module in enumerate(self.modules):
            for name, parameter in module.named_parameters(remove_duplicate=False):
                found.setdefault(parameter, f"{index}.{name}")
        return found if self.original is None else {parameter: self.original[parameter] for parameter in found}

    @cached_property
    def digest(self) -> str:
        """Equal on all ranks that cut equal models in the same way."""
        shapes = [(name, tuple(p.shape), str(p.dtype), self.users[p]) for p, name in self.names.items()]
        return sha256(repr((self.starts, shapes, self.columns, self.graph)).encode()).hexdigest()[:16]

    def columns_of(self, stage: int) -> tuple[str, ...]:
        """The batch columns that a stage reads by name."""
        return tuple(dict.fromkeys(name for layer in self.of_stage(stage) for name in columns_of(layer)))

    @cached_property
    def users(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """For every parameter the stages that use it."""
        found: dict[nn.Parameter, list[int]] = {}
        for stage in range(self.stages):
            for layer in self.of_stage(stage):
                for parameter in layer.parameters():
                    stages = found.setdefault(parameter, [])
                    if stage not in stages:
                        stages.append(stage)
        return {parameter: tuple(stages) for parameter, stages in found.items()}

    @cached_property
    def ties(self) -> tuple[tuple[int, ...], ...]:
        """The sets of stages that share a parameter."""
        return tuple(sorted({stages for stages in self.users.values() if len(stages) > 1}))

    def unit(self, number: int) -> list[nn.Parameter]:
        """The parameters of a sync unit: a stage's own, or those of a tie group."""
        wanted = (number,) if number < self.stages else self.ties[number - self.stages]
        return [parameter for parameter, stages in self.users.items() if stages == wanted]


def columns_of(layer: nn.Module) -> tuple[str, ...]:
    """The batch columns that a layer takes by name besides what crosses from the layer before it."""
    names: tuple[str, ...] = getattr(layer, "batch_columns", ())
    return names


def require_layers(layers: Sequence[nn.Module], share: float, stage: int) -> None:
    """A share of a stage is counted in layers."""
    if 0 < share < 1 and len(layers) < 2:
        raise MeshwrightError(
            f"stage {stage} is one module: a share {share} of it cannot be recomputed", fix="share 1, or more layers per stage"
        )


def refuse_hooks(layers: Layers, why: str, *, fix: str) -> None:
    """Gradient hooks of parameters, where they would not be called."""
    for parameter, name in layers.names.items():
        if gradient_hooks(parameter):
            raise MeshwrightError(f"{name} has a gradient hook, which would not be called: {why}", fix=fix)


def refuse_tied_hooks(layers: Layers) -> None:
    """Gradient hooks of parameters that several stages share: each stage has a part of the gradient, a hook wants all of it."""
    for parameter, stages in layers.users.items():
        if len(stages) > 1 and gradient_hooks(parameter):
            shared = " and ".join(map(str, stages))
            raise MeshwrightError(
                f"{layers.names[parameter]} has a gradient hook, and is shared by stages {shared}: each would call the hook with "
                "its own part of the gradient",
                fix="pp=1, weights that are not tied, or an optimizer whose step() does what the hook does",
            )


def refuse_stray(layers: Layers, parameters: Iterable[nn.Parameter]) -> None:
    """Parameters that got a gradient where nobody holds them."""
    if stray := [layers.names[p] for p in parameters if p.grad is not None]:
        raise MeshwrightError(
            f"a layer uses {stray[0]} of another one without having it as its own: the tie cannot be seen",
            fix="register the shared parameter in both: second.weight = first.weight",
        )
