"""The cost of a stage: one record per stage, with seconds and bytes for one microbatch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields

from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.reader import Reader, number, parsed, rows

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class StageCost:
    """Times and sizes of one stage. A backward is `input_s + weight_s`; `recompute_s > 0` says that the stage recomputes.

    `output_bytes` go forward over the boundary behind the stage, `gradient_bytes` come back over it.
    """

    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    recompute_s: float = 0.0
    sync_s: float = 0.0
    activation_bytes: float = 0.0
    output_bytes: float = 0.0
    gradient_bytes: float = 0.0
    parameter_bytes: float = 0.0

    def __post_init__(self) -> None:
        numbers = astuple(self)
        if min(numbers) < 0 or not sum(numbers) < float("inf"):
            raise MeshwrightError(f"costs are numbers of at least 0, got {self}")

    @property
    def backward_s(self) -> float:
        """The time of both halves of a backward."""
        return self.input_s + self.weight_s

    def scaled(self, factor: float) -> StageCost:
        """Returns the cost of `factor` times as many layers."""
        return StageCost(**{name: value * factor for name, value in asdict(self).items()})


def even_costs(
    *,
    stages: int,
    workers: int,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    split: tuple[float, float] = (1.0, 1.0),
    recompute_s: float = 0.0,
    sync_s: float = 0.0,
) -> tuple[StageCost, ...]:
    """Equal stages from one worker's totals per microbatch: with D v stages on D workers a stage costs 1/v of them.

    Bytes are in units of what one worker holds: its activations of one microbatch, its parameters.
    """
    share = workers / stages
    whole = StageCost(
        forward_s=forward_s,
        input_s=backward_s * split[0] / sum(split),
        weight_s=backward_s * split[1] / sum(split),
        recompute_s=recompute_s,
        sync_s=sync_s,
        activation_bytes=1.0,
        parameter_bytes=1.0,
    )
    return (whole.scaled(share),) * stages


def relative_costs(flops: Sequence[float]) -> tuple[StageCost, ...]:
    """Costs from operation counts: an average stage takes one slot forward and one for each half of its backward."""
    mean = sum(flops) / len(flops)
    shares = [max(each / mean, 1e-3) if mean > 0 else 1.0 for each in flops]  # every stage takes some time
    return tuple(StageCost(forward_s=share, input_s=share, weight_s=share) for share in shares)


def rows_for(costs: Sequence[StageCost] | None, stages: int) -> Sequence[StageCost]:
    """Returns `costs` after checking their number; one slot per forward and per half of a backward if there are none."""
    if costs is None:
        return (StageCost(forward_s=1.0, input_s=1.0, weight_s=1.0),) * stages
    if len(costs) != stages:
        raise MeshwrightError(
            f"there are {stages} stages, the costs have {len(costs)}", fix=f"give one row of costs per stage: {stages}"
        )
    return costs


def hop_s(costs: Sequence[StageCost], cluster: Cluster | None) -> float:
    """The delay between two stages that an order should expect: the slowest message over the slowest link."""
    return cluster.hop_s(size for c in costs for size in (c.output_bytes, c.gradient_bytes)) if cluster else 0.0


def costs_to_json(costs: Sequence[StageCost]) -> str:
    """The file form of stage costs."""
    return json.dumps({"schema": SCHEMA, "stages": [asdict(cost) for cost in costs]}, indent=1)


def costs_from_json(text: str) -> tuple[StageCost, ...]:
    """Read stage costs: an object with `stages`, or a bare list of rows; a row may leave out what is zero."""
    return costs_from(parsed(text, "a cost file"), "the cost file")


def costs_from(data: object, what: str) -> tuple[StageCost, ...]:
    """Reads stage costs from parsed JSON or from Python; rows are mappings or `StageCost`."""
    keys = frozenset({"schema", "stages"})
    given = list(data) if isinstance(data, list | tuple) else None
    found = Reader(data, what, kind=None, schema=SCHEMA, keys=keys)("stages", rows) if given is None else given
    if not found:
        raise MeshwrightError(f"{what} has no stages", fix='{"stages": [{"forward_s": 1.0, "input_s": 1.0, "weight_s": 1.0}]}')
    return tuple(row if isinstance(row, StageCost) else _row(f"stage {index} of {what}", row) for index, row in enumerate(found))


def _row(what: str, row: object) -> StageCost:
    names = [field.name for field in fields(StageCost)]
    read = Reader(row, what, kind=None, schema=SCHEMA, keys=frozenset(names))
    values = {name: read(name, number, 0.0) for name in names if name != "gradient_bytes"}
    return StageCost(**values, gradient_bytes=read("gradient_bytes", number, values["output_bytes"]))
