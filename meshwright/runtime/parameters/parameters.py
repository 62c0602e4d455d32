"""The parameters of a rank during a run: versions that actions read, gradients, reduction, norm, clipping and update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Kind, Op, Value
from meshwright.ir.schedule import Schedule, Sharding
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.parameters.unit import Unit
from meshwright.runtime.program import Instruction, Program
from meshwright.runtime.stage.precision import Scaler
from meshwright.runtime.stage.reached_parameters import Leaves, Reached
from meshwright.runtime.stage.stage import Bundle, Weights

Options = Callable[[torch.optim.Optimizer, int], None]
"""Gives an optimizer the options (learning rate, ...) of a training step, before it updates with the gradient of that step."""


@dataclass(frozen=True)
class Rules:
    """Gradient clipping, and whether a step with a gradient that is not finite is skipped.

    With a flush, both use the norm of all gradients of the step. Without a flush, each unit is clipped separately.
    """

    clip: float | None = None
    skip_nonfinite: bool = False

    def __post_init__(self) -> None:
        number = isinstance(self.clip, int | float) and not isinstance(self.clip, bool)
        if self.clip is not None and not (number and self.clip > 0):
            raise MeshwrightError(f"gradients must be clipped to a norm above 0, got {self.clip!r}", fix="clip=1.0, or clip=None")

    def of_each(self, units: int) -> Rules:
        """Returns the rules of a unit if units are clipped separately: all units together then have at most the norm `clip`."""
        return self if self.clip is None else replace(self, clip=self.clip / units**0.5)

    def scale(self, norm: float) -> float:
        """Returns the factor that clips gradients with this norm. A NaN norm makes all gradients NaN, as in torch."""
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
        options: Options | None = None,
    ) -> None:
        self.program, self.mesh, self.units, self.layers = program, mesh, units, layers
        self.rules, self.device, self.scaler, self.options = rules, device, scaler, options
        self.schedule = program.schedule
        self.versioned = not self.schedule.flush
        self.singly = self.schedule.sharding.sums_singly
        self.gathers = self.schedule.sharding is Sharding.PARAMETERS
        self.aims = self.versioned or self.schedule.steps > 1 or self.singly
        self._last_sync = _last_syncs(program)
        self._counted = {
            stage: [(units[unit], self.schedule.stages_of(unit)[0] == stage) for unit in self.schedule.units_of[stage]]
            for stage in layers
        }
        self.norms: dict[int, float] = {}
        self._unit_rules = rules.of_each(self.schedule.units)
        self._squares: dict[int, dict[int, float]] = {}
        self.skipped: list[int] = []
        self._scale: float | None = 1.0
        self._factor = 1.0
        self._first_step = 0

    def begin(self, first_step: int) -> None:
        """Called at the start of a walk."""
        self._first_step = first_step
        self._squares.clear()

    def end(self) -> None:
        """Called at the end of a walk. The newest version becomes the first of the next walk."""
        for unit in self.units.values():
            unit.wait()
            if unit.versions is not None:
                unit.versions.rebase()

    def versions(self, instruction: Instruction) -> Weights:
        """Returns the parameters that an action reads, if they are `versioned`."""
        chosen: dict[int, Tensor] = {}
        for slot in instruction.reads[Kind.PARAM]:
            value = self.program.values[slot]
            unit = self.units[value.stage]
            chosen.update((id(p), t) for p, t in zip(unit.params, unit.at(value.version), strict=True))
        layers = self.layers[instruction.action.stage]
        return [{n: chosen.get(id(p), p) for n, p in layer.named_parameters(remove_duplicate=False)} for layer in layers]

    def aim(self, instruction: Instruction) -> None:
        """Lets gradients accumulate in the buffer of their round, and drops versions that no later instruction reads."""
        for slot in instruction.reads[Kind.PARAM]:
            value = self.program.values[slot]
            self.units[value.stage].aim(value.version, instruction.round)
        self._drop(instruction)

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

    def known(self, instruction: Instruction) -> Reached:
        """Returns which of the `leaves` of a backward were reached in its round already."""
        numbers, round_ = self.schedule.units_of[instruction.action.stage], instruction.round
        return tuple(buffer.reached if (buffer := self.units[n].buffers.get(round_)) else 0 for n in numbers)

    def sync(self, instruction: Instruction, partial: Sequence[Tensor]) -> None:
        """Starts a collective, or adds the partial sum of the ring."""
        unit = self.units[instruction.action.stage]
        if not self.schedule.ring:
            last = self._last_sync.get((instruction.action.stage, instruction.round)) == instruction.action.mb
            unit.sync(instruction.round, single=self.singly, last=last)
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
        if last and unit.borrowed is not None:
            unit.release(value.version)
        return Bundle(flats, (False,) * len(flats))

    def norm(self, instruction: Instruction) -> None:
        """Computes the norm of all gradients, each unit once. If it is not finite, all ranks skip the step."""
        self._scale = 1.0
        if self.rules.clip is None and not self.rules.skip_nonfinite and self.scaler is None:
            return
        self._factor = self.scaler.factor if self.scaler else 1.0
        divided = self.schedule.sharding is not Sharding.NONE  # then every holder counts its slices
        mine = [n for n in self.units if divided or self.mesh.holders(self.schedule, n)[0] == self.mesh.rank]
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
        number, step = instruction.action.stage, self._first_step + instruction.round
        unit, scale = self.units[number], self._scale
        if not self.schedule.norm and self.rules.clip is not None:
            square = self._squares.setdefault(step, {})[number] = unit.square(instruction.round)
            scale = self._unit_rules.scale(square**0.5)
        if self.options is not None and unit.optimizer is not None:
            self.options(unit.optimizer, step)
        unit.update(
            instruction.round, in_place=instruction.in_place, scale=scale, factor=self._factor, keep=not instruction.releases
        )
        unit.release(instruction.round)
        self._drop(instruction)

    def square_of_units(self, step: int) -> float:
        """Returns the squared norm of the gradient of a step, of the units that this rank is the first to hold.

        The sum over all ranks is that of the whole gradient. It is NaN if no norms were computed.
        """
        squares = self._squares.pop(step, {})
        if self.rules.clip is None:
            return float("nan")
        return sum(squares[unit] for unit in sorted(squares) if self.mesh.holders(self.schedule, unit)[0] == self.mesh.rank)

    def _drop(self, instruction: Instruction) -> None:
        """Drops the versions that an instruction is the last to read."""
        for value in instruction.drops:
            if (versions := self.units[value.stage].versions) is not None:
                versions.drop(value.version)

    def gather(self, instruction: Instruction) -> None:
        """Starts to gather a unit. It is awaited before the next use, or at the end of the walk."""
        unit = self.units[instruction.action.stage]
        unit.gather()
        if self.schedule.steps > 1 and not self.gathers:
            unit.wait()

    def while_whole(self, instruction: Instruction, do: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that waits for the units that an action reads, runs it, and frees what no later action reads."""
        units = [self.units[self.program.values[slot].stage] for slot in instruction.reads.get(Kind.PARAM, ())]
        freed = [self.units[unit] for unit in instruction.frees]

        def run() -> None:
            for unit in units:
                unit.wait()
            do()
            for unit in freed:
                unit.free()

        return run


def _last_syncs(program: Program) -> dict[tuple[int, int], int]:
    """Returns which sync of a unit and round is its last one."""
    found: dict[tuple[int, int], int] = {}
    for instruction in program.instructions:
        if instruction.channel is None and instruction.action.op is Op.S:
            found[instruction.action.stage, instruction.round] = instruction.action.mb
    return found
