"""The `dp_mode` of a plan: how data-parallel copies share parameters, gradients and optimizer state. Parsed and checked here."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.input_limits import shown
from meshwright.ir.plan.unset_values import Unset, UnsetName

ZERO_3_STAGES = 4
"""The number of stages that zero-3 cuts a model into, if the option `chunks` is not given."""


class DpMode(StrEnum):
    """What a data-parallel copy holds, and what copies exchange."""

    REPLICATED = "replicated"  # everything whole on every copy
    ZERO_1 = "zero-1"  # optimizer state in slices
    ZERO_2 = "zero-2"  # ... and gradients
    ZERO_3 = "zero-3"  # ... and parameters
    CYCLIC = "cyclic"  # copies run two time steps apart; gradients go from copy to copy
    CYCLIC_ZERO = "cyclic-zero"  # ... and parameters too, optimizer state is only at the owner of a stage
    CYCLIC_MP = "cyclic-mp"  # a stage has as many devices as its microbatches need
    CYCLIC_PP = "cyclic-pp"  # a stage has one device

    @property
    def is_cyclic(self) -> bool:
        """Whether the copies are the workers of a cyclic schedule."""
        return self.value.startswith("cyclic")

    @property
    def is_zero(self) -> bool:
        """Whether the holders of a unit divide its state among them after ordinary steps."""
        return self.value.startswith("zero")

    @property
    def form(self) -> str | None:
        """The form of the cyclic schedule, if it is not the replicated one."""
        return {DpMode.CYCLIC_ZERO: "zero", DpMode.CYCLIC_MP: "mp", DpMode.CYCLIC_PP: "pp"}.get(self)

    @property
    def has_stage_workers(self) -> bool:
        """Whether it is a cyclic schedule whose stages have workers of their own."""
        return self in (DpMode.CYCLIC_MP, DpMode.CYCLIC_PP)

    def workers(self, dp: int, stages: int | None = None) -> int:
        """Returns the number of workers of a cyclic schedule. In some forms it depends on the stages, otherwise on `dp`."""
        count = stages if stages is not None and self.has_stage_workers else dp
        return count * (count + 1) // 2 if self is DpMode.CYCLIC_MP else count


def parse_dp_mode(name: object) -> DpMode:
    """Returns the mode of this name."""
    if not isinstance(name, str) or name not in list(DpMode):
        raise MeshwrightError(f"dp_mode must be one of {', '.join(DpMode)}, got {shown(name)}", fix='dp_mode="zero-1"')
    return DpMode(name)


def refuse_beside_cyclic(mode: DpMode, given: dict[str, Any]) -> None:
    """Raises if a plan sets a field that a cyclic mode determines."""
    dp, what = given["dp"], f'dp_mode="{mode}"'
    if given["order"] is not None or not isinstance(given["schedule"], UnsetName):
        raise MeshwrightError(f"schedule={shown(given['schedule'])} and {what} cannot be combined", fix="leave out the schedule")
    if not isinstance(given["pp"], Unset) and given["pp"] != 1:
        raise MeshwrightError(f"pp={given['pp']} and {what} cannot be combined: copies run all stages", fix="pp=1")
    if "form" in given["options"]:
        raise MeshwrightError(
            f"the option form={shown(given['options']['form'])} and {what} cannot be combined: the mode says which form it is",
            fix='dp_mode="cyclic", "cyclic-zero", "cyclic-mp" or "cyclic-pp", without the option form',
        )
    if given["sync"] != "eager":
        raise MeshwrightError(
            f"sync={shown(given['sync'])} and {what} cannot be combined: running sums go from copy to copy after each backward",
            fix="leave out sync",
        )
    if given["width"]:
        raise MeshwrightError(f"width={given['width']} and {what} cannot be combined", fix="leave out the width")
    if given["microbatches"] not in (0, dp):
        raise MeshwrightError(
            f"{what} runs one microbatch per copy and step: dp={dp}, got microbatches={given['microbatches']}",
            fix=f"microbatches={dp}, or leave it out",
        )
