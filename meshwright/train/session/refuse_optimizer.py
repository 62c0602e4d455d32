"""Refuses optimizers that a plan would change: each rank has its own, for its units or for parts of their tensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from meshwright.runtime.stage.layers import Layers
from meshwright.train.optimizer.coupled_parameters import Made, refuse_coupled, refuse_not_elementwise
from meshwright.train.prepared import PreparedRun


def refuse_optimizer(make: Made, run: PreparedRun, layers: Layers, groups: Mapping[nn.Parameter, int] | None = None) -> None:
    """Raises if optimizers for some units, or for parts of tensors, do not step like one optimizer for the whole model.

    `groups` has the number of the parameter group of each parameter that the optimizer trains; None is one group for all.
    """
    units = [[p for p in layers.unit(n) if groups is None or p in groups] for n in range(run.schedule.units)]
    group, parallel = (lambda p: None) if groups is None else groups.get, run.parallel
    if parallel.mode.is_zero or run.sharded is not None:
        refuse_coupled(make, [[p] for unit in units for p in unit], group, why="ranks that hold parts of parameters")
    else:
        refuse_coupled(make, units, group)
    if run.sharded is not None:
        cut = [p for p in run.sharded.cut_params(layers) if groups is None or p in groups]
        refuse_not_elementwise(make, cut, f"tp={parallel.tp} cuts tensors over ranks", group=group)
    if parallel.mode.is_zero:
        why = f'dp_mode="{parallel.mode}" divides tensors among ranks'
        refuse_not_elementwise(make, [p for unit in units for p in unit], why, group=group, flat=True)
