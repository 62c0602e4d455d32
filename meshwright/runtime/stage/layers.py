"""A model as a list of layers: cut into stages, with parameters grouped into units. Ties are found by identity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.ir.stage_cost import StageCost
from meshwright.runtime.stage.objective import Weigh
from meshwright.runtime.stage.tensor_parameters import TensorParameters
from meshwright.torch_internals import gradient_hooks

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of every column of a batch."""


@dataclass(frozen=True)
class Layers:
    """Layers that run one after another, and the first layer of each stage. `starts` ends with the number of layers."""

    modules: tuple[nn.Module, ...]
    starts: tuple[int, ...]
    original: Mapping[nn.Parameter, str] | None = None
    """The parameter names of a captured model itself."""
    columns: tuple[str, ...] | None = None
    """The batch columns that a captured model takes, in order. Each of its layers declares which ones it reads."""
    weigh: Weigh | None = None
    """Computes the weight of the loss of some rows from their columns, if the model's own loss defines it."""
    refusal: Callable[[Shapes], str | None] | None = None
    """Returns why a captured model cannot run on columns of these shapes (its trace assumed other ones), or None if it can."""
    again: Callable[[Mapping[str, Tensor]], Layers] | None = None
    """Captures the model again for columns of other sizes. The stages have the same parameters."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """The dtypes of the columns of a captured model. A forward may depend on them."""
    moved: tuple[str, ...] = ()
    """The buffers that a captured model changes in its forward."""
    evaluation: Layers | None = None
    """The layers of a second graph for evaluation, if the model behaves differently there."""
    costs: tuple[StageCost, ...] | None = None
    """The relative costs of the stages, from the operations of a captured model; None if they are unknown."""
    graph: str = ""
    """The digest of a captured model's graph."""
    tensor: TensorParameters | None = None
    """How parameters are shared by the ranks of a box; None if every parameter is whole."""
    any_size: Layers | None = None
    """Under a tensor mode: layers for evaluation on batches of any size, which gather whole parameters."""

    @classmethod
    def of(cls, built: Any, stages: int) -> Layers:
        """Creates layers from a list of modules or a Sequential, cut into even runs. A single module is one stage."""
        if isinstance(built, nn.Sequential | nn.ModuleList | list | tuple):
            modules = tuple(built)
        elif isinstance(built, nn.Module):
            modules = (built,)
        else:
            raise MeshwrightError(
                f"build() returned {type(built).__name__}", fix="return a module, or a list of modules that run one after another"
            )
        if not all(isinstance(m, nn.Module) for m in modules):
            raise MeshwrightError("build() returned a list with entries that are not modules", fix="wrap functions in a module")
        if len(modules) < stages:
            what = "one module" if len(modules) == 1 else f"{len(modules)} layers"
            raise MeshwrightError(f"{what} cannot be cut into {stages} stages", fix=f"return a list of at least {stages} modules")
        return cls(modules, tuple(len(modules) * s // stages for s in range(stages + 1)))

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.starts) - 1

    def of_stage(self, stage: int) -> tuple[nn.Module, ...]:
        """Returns the layers of one stage."""
        return self.modules[self.starts[stage] : self.starts[stage + 1]]

    @cached_property
    def names(self) -> dict[nn.Parameter, str]:
        """The first name of every parameter: its name in the list of layers, or in the captured model."""
        found: dict[nn.Parameter, str] = {}
        for index, module in enumerate(self.modules):
            for name, parameter in module.named_parameters(remove_duplicate=False):
                found.setdefault(parameter, f"{index}.{name}")
        return found if self.original is None else {parameter: self.original[parameter] for parameter in found}

    @cached_property
    def digest(self) -> str:
        """Equal on all ranks that cut equal models in the same way."""
        cuts = {} if self.tensor is None else self.tensor.cuts
        whole = {p: cuts[p].shape if p in cuts else tuple(p.shape) for p in self.names}  # a rank may hold parts of some
        shapes = [(name, whole[p], str(p.dtype), self.users[p]) for p, name in self.names.items()]
        graphs = self.graph, None if self.evaluation is None else self.evaluation.graph
        return sha256(repr((self.starts, shapes, self.columns, *graphs)).encode()).hexdigest()[:16]

    @cached_property
    def users(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """Maps every parameter to the stages that use it."""
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
        """Returns the parameters of a sync unit: the own parameters of a stage, or those of a tie group."""
        wanted = (number,) if number < self.stages else self.ties[number - self.stages]
        return [parameter for parameter, stages in self.users.items() if stages == wanted]


def columns_of(layer: nn.Module) -> tuple[str, ...]:
    """Returns the batch columns that a layer takes by name, besides the outputs of the layer before it."""
    names: tuple[str, ...] = getattr(layer, "batch_columns", ())
    return names


def require_layers(layers: Sequence[nn.Module], share: float, stage: int) -> None:
    """Raises if a stage has too few layers to recompute a share of it, because a share is counted in layers."""
    if 0 < share < 1 and len(layers) < 2:
        raise MeshwrightError(
            f"stage {stage} is one module, so a share {share} of it cannot be recomputed",
            fix="use share 1, or more layers per stage",
        )


def refuse_hooks(layers: Layers, why: str, *, fix: str) -> None:
    """Raises if a parameter has a gradient hook that would not be called."""
    for parameter, name in layers.names.items():
        if gradient_hooks(parameter):
            raise MeshwrightError(f"{name} has a gradient hook, which would not be called: {why}", fix=fix)


def refuse_tied_hooks(layers: Layers) -> None:
    """Raises if a parameter that several stages share has a gradient hook.

    Each stage computes one part of the gradient, but the hook needs the whole gradient.
    """
    for parameter, stages in layers.users.items():
        if len(stages) > 1 and gradient_hooks(parameter):
            shared = " and ".join(map(str, stages))
            raise MeshwrightError(
                f"{layers.names[parameter]} has a gradient hook and is shared by stages {shared}: each stage would call the hook "
                "with its own part of the gradient",
                fix="set pp=1, untie the weights, or let the optimizer's step() do what the hook does",
            )


def refuse_stray(layers: Layers, parameters: Iterable[nn.Parameter]) -> None:
    """Raises if a parameter got a gradient on a rank that does not hold it."""
    if stray := [layers.names[p] for p in parameters if p.grad is not None]:
        raise MeshwrightError(
            f"a layer uses {stray[0]} of another layer without registering it, so the tie cannot be detected",
            fix="register the shared parameter in both layers: second.weight = first.weight",
        )
