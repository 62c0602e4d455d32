"""`StageCost`: seconds and bytes of a stage for one microbatch. `ir/profile.py` has the costs of layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter

from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.reader import Reader, number, parsed, rows

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of one stage for one microbatch: seconds and bytes.

    Args:
        forward_s: Seconds of a forward.
        input_s: Seconds of the half of a backward that the previous stage waits for.
        weight_s: Seconds of the other half, the gradient of the weights.
        recompute_s: Seconds to recompute the forward. Above zero, the stage recomputes.
        sync_s: Seconds to add up the gradients of its parameters.
        activation_bytes: What a forward keeps for the backward.
        output_bytes: What it sends to the next stage.
        gradient_bytes: What comes back from the next stage.
        parameter_bytes: Its parameters.
        optimizer_bytes: What the optimizer keeps for them.
        gather_s: Seconds to gather its parameters, if holders divide the state of the optimizer among them.
        tied_bytes: Of its parameters, what other stages have too.
        tied_s: Of `sync_s`, the seconds to add up the gradients of tied parameters over all their stages.

    Raises:
        MeshwrightError: A number is negative or not finite.

    Examples:
        >>> from meshwright import StageCost
        >>> StageCost(forward_s=1.0, input_s=1.1, weight_s=0.9).backward_s
        2.0
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
    optimizer_bytes: float = 0.0
    gather_s: float = 0.0
    tied_bytes: float = 0.0
    tied_s: float = 0.0

    def __post_init__(self) -> None:
        numbers = _numbers(self)
        if min(numbers) < 0 or not sum(numbers) < float("inf"):
            raise MeshwrightError(f"costs are numbers of at least 0, got {self}")

    @property
    def backward_s(self) -> float:
        """The time of both halves of a backward."""
        return self.input_s + self.weight_s

    def scaled(self, factor: float) -> StageCost:
        """Returns the cost of `factor` times as many layers."""
        return StageCost(**{name: value * factor for name, value in asdict(self).items()})


_numbers = attrgetter(*StageCost.__slots__)


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
    """Costs of equal stages, from the totals of one worker per microbatch.

    With v stages on each worker a stage costs 1/v of the totals, so schedules compare at equal work. Bytes are in units of
    what one worker holds: its activations of one microbatch, and its parameters.

    Args:
        stages: How many stages there are.
        workers: How many workers share them.
        forward_s: Seconds of one worker's forward.
        backward_s: Seconds of one worker's backward.
        split: The ratio of the two halves of a backward.
        recompute_s: Seconds of one worker's recompute. Above zero, every stage recomputes.
        sync_s: Seconds to add up the gradients of one worker's parameters.

    Returns:
        One cost for each stage.

    Raises:
        MeshwrightError: There is no stage or no worker, the ratio is that of nothing, or a time is negative.

    Examples:
        >>> from meshwright import even_costs
        >>> costs = even_costs(stages=8, workers=4)
        >>> len(costs), costs[0].forward_s, costs[0].backward_s
        (8, 0.5, 1.0)
    """
    if stages < 1 or workers < 1:
        raise MeshwrightError(f"costs need at least 1 stage and 1 worker, got {stages} and {workers}", fix="stages=4, workers=4")
    if min(split) < 0 or not sum(split) > 0:
        raise MeshwrightError(f"the halves of a backward cannot have the ratio {split}", fix="split=(1, 1)")
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
    """Write the costs of stages as a file for `--costs`.

    Args:
        costs: One cost for each stage.

    Returns:
        JSON text.

    Examples:
        >>> from meshwright import costs_from_json, costs_to_json, even_costs
        >>> costs = even_costs(stages=2, workers=2)
        >>> costs_from_json(costs_to_json(costs)) == costs
        True
    """
    return json.dumps({"schema": SCHEMA, "stages": [asdict(cost) for cost in costs]}, indent=1)


def costs_from_json(text: str) -> tuple[StageCost, ...]:
    """Read the costs of stages.

    Args:
        text: JSON text: an object with `stages`, or a list of rows. A row may leave out what is zero.

    Returns:
        One cost for each stage. `gradient_bytes` is `output_bytes` where it is left out.

    Raises:
        MeshwrightError: The text is not a cost file, has no stages, or has a number that is not possible.

    Examples:
        >>> from meshwright import costs_from_json
        >>> costs_from_json('[{"forward_s": 1.0, "output_bytes": 8}]')[0].gradient_bytes
        8.0
    """
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
