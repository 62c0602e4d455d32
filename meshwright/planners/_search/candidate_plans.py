"""The plans that a search compares: plans of one width, and plans whose stages have devices of their own."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.ir.plan.chosen_plan import PlanStage
from meshwright.planners._search.families import Family
from meshwright.planners._search.tensor_costs import TensorChoice


@dataclass(frozen=True)
class Candidate:
    """A plan: degrees, schedule, microbatches, and where stages end. It misses the memory by `over_bytes` at least."""

    family: Family
    pp: int
    dp: int
    tensor: TensorChoice
    rows: int | None
    share: int
    microbatches: int
    zero: str
    recompute: bool
    layout: str
    ends: tuple[int, ...]
    bound_s: float
    over_bytes: float = float("-inf")
    reverse: bool = False
    ranks: tuple[int, ...] = ()
    """The device of each rank, if not that of the layout."""
    about_bytes: float = float("-inf")
    """By how much it misses the memory, about: modes that save memory are tried if that is close."""
    sharp: bool = False
    """Whether the bound knows the links of the plan."""

    @property
    def key(self) -> tuple[object, ...]:
        """Ties go to the simpler plan, then to a fixed order."""
        simple = (self.zero != "replicated", self.recompute, self.tensor.tp, self.pp, self.family.name, self.layout, self.reverse)
        return (self.bound_s, *simple, self.dp, self.rows or 0, self.tensor.name, self.zero)


@dataclass(frozen=True)
class WidePlan:
    """Stages with devices of their own, of any number each. All of them recompute, or none."""

    stages: tuple[PlanStage, ...]
    family: Family
    microbatches: int
    rows: int | None
    source: str = "spp"

    @property
    def recompute(self) -> bool:
        """Whether its stages recompute."""
        return any(stage.recompute for stage in self.stages)

    @property
    def dp(self) -> int:
        """There are no copies: devices share the rows of a stage."""
        return 1

    @property
    def zero(self) -> str:
        """Every device holds the state of its stage."""
        return "replicated"

    @property
    def share(self) -> int:
        """Rows are those of a whole microbatch."""
        return 1

    @property
    def layout(self) -> str:
        """The devices of a stage belong together."""
        return "stages"


@dataclass
class Enumeration:
    """What was enumerated: plans that may fit, and how many cannot."""

    fit: list[Candidate]
    misfit: list[Candidate]
    bounded: int
