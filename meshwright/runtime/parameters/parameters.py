"""The parameters of a rank during a run: the versions that an action reads, where its gradients go, sync, norm and update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Kind, Value
from meshwright.ir.schedule import Schedule
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.parameters.unit import Unit
from meshwright.runtime.program import Instruction, Program
from meshwright.runtime.stage.precision import Scaler
from meshwright.runtime.stage.reached_parameters import Leaves, Reached
from meshwright.runtime.stage.stage import Bundle, Weights


@dataclass(frozen=True)
class Rules:
    """What an update does besides the optimizer step. With a flush, both rules apply to all gradients of the step."""

    clip: float | None = None
    skip_nonfinite: bool = False

    def __post_init__(self) -> None:
        number = isinstance(self.clip, int | float) and not isinstance(self.clip, bool)
        if self.clip is not None and not (number and self.clip > 0):
            raise MeshwrightError(f"gradients must be clipped to a norm above 0, got {self.clip!r}", fix="clip=1.0, or clip=None")

    def scale(self, norm: float) -> float:
        """Returns the factor for gradients with this norm. A NaN norm makes all gradients NaN, as in torch."""
        found = 1.0 if self.clip is None else self.clip / (norm + 1e-6)
        return 1.0 if found > 1.0 else found


def refuse_rules(rules: Rules, schedule: Schedule) -> None:
    """Raises if a rule needs the reduction N and the schedule has none.

    With a flush, a step is clipped by the norm of all its gradients and skipped as a whole.
    """
    if schedule.norm:
        return
    if rules.skip_nonfinite:
        raise MeshwrightError(
            f"{schedule.name} has no reduction N, so a step cannot be skipped as a whole", fix="skip_nonfinite=False"
        )
    if schedule.flush and rules.clip not in (None, float("inf")):
        raise MeshwrightError(
            f"{schedule.name} updates without its reduction N: the norm of all gradients, which clip={rules.clip} needs, "
            f"is not known there",
            fix="put an N before the updates on every worker, leave out the updates (lowering adds both), or set clip=None",
        )


class Parameters:
    """The units of a rank. Without a flush there are several versions at the same time."""

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        units: Mapping[int, Unit],
        layers: Mapping[int, Sequence[nn.Module]],
        rules: Rules,
        device: torch.device,
        scaler: Scaler | None = None,
    ) -> None:
        self.program, self.mesh, self.units, self.layers = program, mesh, units, layers
        self.rules, self.device, self.scaler = rules, device, scaler
        self.schedule = program.schedule
        self.versioned = not self.schedule.flush
        self.aims = self.versioned or self.schedule.steps > 1
        self._counted = {
            stage: [(units[unit], self.schedule.stages_of(unit)[0] == stage) for unit in self.schedule.units_of[stage]]
            for stage in layers
        }
        self.norms: dict[int, float] = {}
        self.skipped: list[int] = []
        self._scale: float | None = 1.0
        self._factor = 1.0
        self._first_step = 0

    def begin(self, first_step: int) -> None:
        """Called at the start of a walk."""
        self._first_step = first_step

    def end(self) -> None:
        """Called at the end of a walk. The newest version becomes the first of the next walk."""
        for unit in self.units.values():
            unit.rebase()

    def versions(self, instruction: Instruction) -> Weights:
        """Returns the parameters that an action reads, if they are `versioned`."""
        chosen: dict[int, Tensor] = {}
        for slot in instruction.reads[Kind.PARAM]:
            value = self.program.values[slot]
            unit = self.units[value.stage]
            chosen.update((id(p), t) for p, t in zip(unit.params, unit.leaves[value.version], strict=True))
        layers = self.layers[instruction.action.stage]
        return [{n: chosen.get(id(p), p) for n, p in layer.named_parameters(remove_duplicate=False)} for layer in layers]

    def aim(self, instruction: Instruction) -> None:
        """Lets gradients accumulate in the buffer of their round, and drops versions that no later instruction reads."""
        for slot in instruction.reads[Kind.PARAM]:
            value = self.program.values[slot]
            self.units[value.stage].aim(value.version, instruction.round)
        for value in instruction.drops if self.versioned else ():
            self.units[value.stage].drop(value.version)

    def counter(self, instruction: Instruction) -> Callable[[float, Reached], None]:
        """Returns a function that adds the weight and the reached parameters of an instruction to the gradients of its round.

        The weight of a tie group counts only on its first stage.
        """
        units, round_ = self._counted[instruction.action.stage], instruction.round

        def count(weight: float, reached: Reached) -> None:
            for (unit, first), mine in zip(units, reached, strict=True):
                buffer = unit.buffers.get(round_) or unit.buffer(round_)
                buffer.reached |= mine
                if first:
                    buffer.weight += weight

        return count

    def leaves(self, instruction: Instruction) -> Leaves:
        """Returns the tensors that a backward adds gradients to, for each unit of its stage.

        Call this before `aim`, which may drop a version.
        """
        read = {value.stage: value.version for value in map(self.program.values.__getitem__, instruction.reads[Kind.PARAM])}
        return [self.units[n].at(read.get(n, 0)) for n in self.schedule.units_of[instruction.action.stage]]

    def sync(self, instruction: Instruction, partial: Sequence[Tensor]) -> None:
        """Starts a collective, or adds the partial sum of the ring."""
        unit = self.units[instruction.action.stage]
        if not self.schedule.ring:
            unit.sync(instruction.round)
            return
        buffer = unit.buffer(instruction.round)
        buffer.seal()
        for mine, others in zip(buffer.flats, partial, strict=bool(partial)):
            mine.add_(others)
        if Kind.SUM in instruction.writes and unit.adder is not None:
            for one in unit.adder.start(buffer.flats):
                one.wait()

    def room(self, value: Value) -> Bundle:
        """Returns the buffer that a running sum is received into. A complete sum replaces the rank's own gradients."""
        buffer = self.units[value.stage].buffer(value.version)
        into = buffer.replaced() if value.kind is Kind.SUM else [torch.empty_like(flat) for flat in buffer.flats]
        return Bundle(tuple(into), (False,) * len(into))

    def handed_on(self, value: Value, *, last: bool) -> Bundle:
        """Returns the sum of a unit for a send: its state before the update if that was kept, else a copy of the current buffer.

        It is a copy because the buffer may change during the send.
        """
        unit = self.units[value.stage]
        kept = unit.handed.pop(value.version, None) if last else unit.handed.get(value.version)
        flats = tuple(kept if kept is not None else [flat.clone() for flat in unit.buffer(value.version).flats])
        return Bundle(flats, (False,) * len(flats))

    def norm(self, instruction: Instruction) -> None:
        """Computes the norm of all gradients, each unit once. If it is not finite, all ranks skip the step."""
        self._scale = 1.0
        if self.rules.clip is None and not self.rules.skip_nonfinite and self.scaler is None:
            return
        self._factor = self.scaler.factor if self.scaler else 1.0
        mine = [n for n in self.units if self.mesh.holders(self.schedule, n)[0] == self.mesh.rank]
        square = sum(self.units[n].square(instruction.round, self._factor) for n in mine)
        total = torch.tensor([square], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        norm = total.sqrt().item()
        number = self._first_step + instruction.round
        self.norms[number] = norm
        taken = self.scaler.update(norm) if self.scaler else norm < float("inf") or not self.rules.skip_nonfinite
        if not taken:
            self.skipped.append(number)
            self._scale = None
        elif self.rules.clip is not None:
            self._scale = self.rules.scale(norm)

    def update(self, instruction: Instruction) -> None:
        """Turns version k into k + 1. Without a flush the norm is that of the unit alone."""
        unit = self.units[instruction.action.stage]
        scale = self._scale
        if not self.schedule.norm and self.rules.clip is not None:
            scale = self.rules.scale(unit.square(instruction.round) ** 0.5)
        unit.update(
            instruction.round, in_place=instruction.in_place, scale=scale, factor=self._factor, keep=not instruction.releases
        )
        unit.release(instruction.round)
        if self.versioned:
            for value in instruction.drops:
                unit.drop(value.version)
