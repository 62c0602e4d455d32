"""The parameters of a rank at work: which versions an action reads, where its gradients go, sync, norm and update."""

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
    """What an update does besides the optimizer's step; both are global where the schedule has a flush."""

    clip: float | None = None
    skip_nonfinite: bool = False

    def __post_init__(self) -> None:
        number = isinstance(self.clip, int | float) and not isinstance(self.clip, bool)
        if self.clip is not None and not (number and self.clip > 0):
            raise MeshwrightError(f"gradients are clipped to a norm above 0, got {self.clip!r}", fix="clip=1.0, or clip=None")

    def scale(self, norm: float) -> float:
        """What gradients of this norm are multiplied by; a norm that is no number leaves none in them, as in torch."""
        found = 1.0 if self.clip is None else self.clip / (norm + 1e-6)
        return 1.0 if found > 1.0 else found


def refuse_rules(rules: Rules, schedule: Schedule) -> None:
    """A step with a flush is clipped by the norm of all of it, and skipped as a whole: both need its reduction N."""
    if schedule.norm:
        return
    if rules.skip_nonfinite:
        raise MeshwrightError(
            f"{schedule.name} has no reduction N: a step cannot be skipped as a whole", fix="skip_nonfinite=False"
        )
    if schedule.flush and rules.clip not in (None, float("inf")):
        raise MeshwrightError(
            f"{schedule.name} updates without its reduction N: the norm of all gradients, which clip={rules.clip} is for, "
            f"is not known there",
            fix="an N in front of the updates on every worker, lists without updates (lowering adds both), or clip=None",
        )


class Parameters:
    """The units of a rank. Without a flush several versions live side by side."""

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
        """A walk through the list starts."""
        self._first_step = first_step

    def end(self) -> None:
        """It is over: the newest version is the first of the next walk."""
        for unit in self.units.values():
            unit.rebase()

    def versions(self, instruction: Instruction) -> Weights:
        """The parameters that an action reads, where they are `versioned`."""
        chosen: dict[int, Tensor] = {}
        for slot in instruction.reads[Kind.PARAM]:
            value = self.program.values[slot]
            unit = self.units[value.stage]
            chosen.update((id(p), t) for p, t in zip(unit.params, unit.leaves[value.version], strict=True))
        layers = self.layers[instruction.action.stage]
        return [{n: chosen.get(id(p), p) for n, p in layer.named_parameters(remove_duplicate=False)} for layer in layers]

    def aim(self, instruction: Instruction) -> None:
        """Let gradients go to the buffer of their round, and drop a version after its last reader."""
        for slot in instruction.reads[Kind.PARAM]:
            value = self.program.values[slot]
            self.units[value.stage].aim(value.version, instruction.round)
        for value in instruction.drops if self.versioned else ():
            self.units[value.stage].drop(value.version)

    def counter(self, instruction: Instruction) -> Callable[[float, Reached], None]:
        """Notes what an instruction has added to the gradients of a stage's units; a tie counts with its first stage alone."""
        units, round_ = self._counted[instruction.action.stage], instruction.round

        def count(weight: float, reached: Reached) -> None:
            for (unit, first), mine in zip(units, reached, strict=True):
                buffer = unit.buffers.get(round_) or unit.buffer(round_)
                buffer.reached |= mine
                if first:
                    buffer.weight += weight

        return count

    def leaves(self, instruction: Instruction) -> Leaves:
        """What a backward adds gradients to, for each unit of its stage; asked before `aim`, which may drop a version."""
        read = {value.stage: value.version for value in map(self.program.values.__getitem__, instruction.reads[Kind.PARAM])}
        return [self.units[n].at(read.get(n, 0)) for n in self.schedule.units_of[instruction.action.stage]]

    def sync(self, instruction: Instruction, partial: Sequence[Tensor]) -> None:
        """Start a collective, or add what the ring has so far."""
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
        """Where a running sum is received: a complete one in place of the own."""
        buffer = self.units[value.stage].buffer(value.version)
        into = buffer.replaced() if value.kind is Kind.SUM else [torch.empty_like(flat) for flat in buffer.flats]
        return Bundle(tuple(into), (False,) * len(into))

    def handed_on(self, value: Value, *, last: bool) -> Bundle:
        """A unit's sum as it was before its update, or as it is now; the buffer may change while it is on its way."""
        unit = self.units[value.stage]
        kept = unit.handed.pop(value.version, None) if last else unit.handed.get(value.version)
        flats = tuple(kept if kept is not None else [flat.clone() for flat in unit.buffer(value.version).flats])
        return Bundle(flats, (False,) * len(flats))

    def norm(self, instruction: Instruction) -> None:
        """The norm of all gradients, each unit counted once; one that is not finite makes all ranks skip the instruction."""
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
        """Turn version k into k + 1; without a flush a norm is that of the unit alone."""
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
