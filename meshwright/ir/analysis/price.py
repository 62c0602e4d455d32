"""Seconds of entries and bytes of values for a given schedule: the one place that combines costs with actions."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.errors import MeshwrightError
from meshwright.ir.action import COMPUTE, NONE, Action, Cell, Entry, Kind, Op, Value
from meshwright.ir.cluster import Cluster
from meshwright.ir.schedule import Schedule, Sharding
from meshwright.ir.stage_cost import StageCost, rows_for


class Price:
    """Seconds of entries and bytes of values.

    A cell takes `F + B - overlap * min(F, B)`: with 0 overlapping saves nothing, with 1 it hides the shorter action. `copies` is
    the number of data-parallel copies, which may divide optimizer state and gradients among them. `paces` says how long each
    worker computes relative to the costs of its stages, if workers that share a stage differ.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Sequence[StageCost],
        cluster: Cluster | None = None,
        *,
        overlap: float = 0.0,
        copies: int = 1,
        paces: Sequence[float] = (),
    ) -> None:
        if not 0.0 <= overlap <= 1.0:
            raise MeshwrightError(f"overlap is the share of the shorter action that a cell hides, 0 to 1, got {overlap}")
        self.schedule = schedule
        self.costs = tuple(rows_for(costs, schedule.stages))
        self.cluster = cluster or Cluster()
        self.overlap = overlap
        self.copies = copies
        self.paces = tuple(paces)
        self.recompute = schedule.recompute or ()
        self.narrow = schedule.placement.narrow
        self._seconds: dict[tuple[Op, int, int], float] = {}
        self._bytes: dict[tuple[Kind, int, int], float] = {}

    def entry_s(self, worker: int, entry: Entry) -> float:
        """Returns how long an entry occupies its worker (for a sync: its group)."""
        if isinstance(entry, Action):
            return self.action_s(worker, entry)
        if isinstance(entry, Cell):
            first, second = self.action_s(worker, entry.first), self.action_s(worker, entry.second)
            return first + second - self.overlap * min(first, second)
        return 0.0

    def action_s(self, worker: int, action: Action) -> float:
        """Returns how long an action takes on this worker, for its rows and its part of the microbatch."""
        key = (action.op, action.stage, action.part)
        time = self._seconds.get(key)
        if time is None:
            time = self._seconds[key] = self.whole_s(action.op, action.stage) / self._parts(action.part)
        if action.op not in COMPUTE:
            return time
        if self.paces:
            time *= self.paces[worker]
        return time if self.narrow else time * self.row_share(worker, action.replica, action.stage, action.mb)

    def whole_s(self, op: Op, stage: int) -> float:
        """Returns the time of an op on all rows of a microbatch, or of a sync. Inline recompute counts into the backward."""
        if op not in COMPUTE:
            return self.sync_s(stage) if op is Op.S else self.gather_s(stage) if op is Op.G else 0.0
        cost = self.costs[stage]
        share = self.recompute[stage].share if self.recompute else 1.0
        inside = share * cost.recompute_s if self._inline(stage) else 0.0
        match op:
            case Op.F:
                return cost.forward_s
            case Op.B:
                return cost.input_s + cost.weight_s + inside
            case Op.I:
                return cost.input_s + inside
            case Op.W:
                return cost.weight_s
            case Op.R:
                return share * cost.recompute_s
            case _:
                return 0.0

    def sync_s(self, unit: int) -> float:
        """Returns how long the sync of a unit takes; the sync of a tie group is included in its stages."""
        return self.costs[unit].sync_s if unit < len(self.costs) and not self.schedule.ring else 0.0

    def gather_s(self, unit: int) -> float:
        """Returns how long it takes to gather the parameters of a unit; a tie group is included in its stages."""
        return self.costs[unit].gather_s if unit < len(self.costs) else 0.0

    def value_bytes(self, worker: int, value: Value) -> float:
        """Returns how much memory a value uses on this worker."""
        kind = value.kind
        key = (kind, value.stage, value.part)
        size = self._bytes.get(key)
        if size is None:
            size = self._bytes[key] = self.whole_bytes(kind, value.stage) / self._parts(value.part)
        if self.narrow or not size:
            return size
        if kind is Kind.ACT or kind is Kind.GRAD:
            return size * self._piece_share(value)
        rows = kind is Kind.SAVED or kind is Kind.REST or kind is Kind.KEPT
        return size * self.row_share(worker, value.replica, value.stage, value.mb) if rows else size

    def whole_bytes(self, kind: Kind, stage: int) -> float:
        """Returns how much memory a kind of value uses with all rows of a microbatch."""
        match kind:
            case Kind.ACT:
                return self.costs[stage].output_bytes
            case Kind.GRAD:
                return self.costs[stage].gradient_bytes
            case Kind.SAVED | Kind.REST | Kind.KEPT:
                return self._saved_bytes(kind, stage)
            case Kind.PARAM | Kind.WGRAD | Kind.PARTIAL | Kind.SUM:
                return self.costs[stage].parameter_bytes if stage < len(self.costs) else 0.0
            case Kind.OPT:
                whole = self.costs[stage].optimizer_bytes if stage < len(self.costs) else 0.0
                return whole / self.shares(stage)
            case Kind.SHARD if self.schedule.sharding is Sharding.PARAMETERS and stage < len(self.costs):
                return self.costs[stage].parameter_bytes / self.shares(stage)
            case Kind.NORM | Kind.TURN | Kind.SHARD:
                return 0.0

    def shares(self, unit: int) -> int:
        """Returns among how many holders, over all data-parallel copies, the state of a unit is divided."""
        if self.schedule.sharding is Sharding.NONE:
            return 1
        return self.copies * len(self.schedule.holders[unit])

    def message_s(self, value: Value, source: int, target: int) -> tuple[float, float]:
        """Returns how long a message occupies the link, and the latency after that."""
        link = self.cluster.between(source, target)
        if value.kind is Kind.TURN:
            return 0.0, link.latency_s
        return link.busy_s(self.value_bytes(source, value)), link.latency_s

    def row_share(self, worker: int, replica: int, stage: int, mb: int) -> float:
        """Returns the fraction of a microbatch's rows that this worker has."""
        team = self.schedule.placement.team(replica, stage, mb)
        if len(team) == 1:
            return 1.0
        return self.schedule.placement.rows_of(team.index(worker), len(team)).size / self.schedule.placement.shares

    def _inline(self, stage: int) -> bool:
        return bool(self.recompute) and self.recompute[stage].share > 0 and not self.recompute[stage].early

    def _saved_bytes(self, kind: Kind, stage: int) -> float:
        """Activation bytes of a stage. If it recomputes, `kept` is its input plus the share that is not dropped."""
        full = self.costs[stage].activation_bytes
        if kind is not Kind.KEPT:
            return full
        before = self.costs[stage - 1].output_bytes if stage else 0.0
        return before + (1.0 - self.recompute[stage].share) * full

    def _parts(self, part: int) -> int:
        return 1 if part == NONE else self.schedule.parts

    def _piece_share(self, value: Value) -> float:
        placement = self.schedule.placement
        teams = (placement.team(value.replica, value.stage + k, value.mb) for k in (0, 1))
        return placement.piece_share(value.piece, *teams)


class TeamPrice(Price):
    """Prices of a schedule whose worker s stands for `widths[s]` devices that share the rows of stage s: bytes on one of them.

    Costs are those of one device, with messages between one device and another. A device holds all rows of a message that are
    its own: those of several devices, if the other stage has more.
    """

    def __init__(self, schedule: Schedule, costs: Sequence[StageCost], widths: Sequence[int]) -> None:
        super().__init__(schedule, costs)
        self.widths = tuple(widths)

    def value_bytes(self, worker: int, value: Value) -> float:
        """Returns how much memory a value uses on one device of this worker."""
        size = super().value_bytes(worker, value)
        if value.kind is Kind.ACT or value.kind is Kind.GRAD:
            return size * self._devices(worker, value.stage)
        if value.kind is Kind.KEPT and value.stage:
            before = self.costs[value.stage - 1].output_bytes / self._parts(value.part)
            return size + before * (self._devices(worker, value.stage - 1) - 1)
        return size

    def _devices(self, worker: int, boundary: int) -> float:
        """How many times as much as one message a device of this worker has of the outputs of a stage."""
        return max(self.widths[boundary : boundary + 2]) / self.widths[worker]
