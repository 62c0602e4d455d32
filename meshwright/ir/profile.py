"""`Profile`: the cost of each layer of a model, the input of a planner. `ir/stage_cost.py` has the costs of the stages of a plan.

A profile may know the times of a layer for several numbers of rows; bytes are for one row. A published profile without rows has
one time for each layer, and bytes of a whole microbatch.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from enum import StrEnum

from meshwright.errors import MeshwrightError

OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "sgd-momentum": 1, "sgd": 0}
"""Numbers that an optimizer keeps for each parameter, in the format of the parameter."""


def optimizer_states(optimizer: str) -> int:
    """Returns how many numbers an optimizer keeps for each parameter."""
    if optimizer not in OPTIMIZER_STATES:
        raise MeshwrightError(
            f"there is no optimizer {optimizer!r} to count the memory of", fix=f"one of {', '.join(OPTIMIZER_STATES)}"
        )
    return OPTIMIZER_STATES[optimizer]


class ProfileSource(StrEnum):
    """Where the numbers of a profile come from."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    PUBLISHED = "published"


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """Products of one input with parameters, such as q, k and v: the widths of the input and of the outputs.

    Args:
        into: The width of the input.
        outs: The widths of the outputs.
        tokens: The vectors of one row of a batch that are multiplied: tokens, or patches of an image.
        contracts: Whether the input is what another product of the layer has made: the second product of attention and of an MLP.

    Raises:
        MeshwrightError: There is no output, or a width is not positive.

    Examples:
        >>> from meshwright import MatrixProduct
        >>> MatrixProduct(768, (3072,)).size
        2359296
    """

    into: int
    outs: tuple[int, ...]
    tokens: int = 1
    contracts: bool = False

    def __post_init__(self) -> None:
        if not self.outs or min(self.into, self.tokens, *self.outs) < 1:
            raise MeshwrightError(f"a product has widths and tokens of at least 1, got {self}")

    @property
    def size(self) -> int:
        """The elements of its matrices."""
        return self.into * sum(self.outs)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of one layer.

    Args:
        name: The layer.
        forward_s: Seconds of a forward, one number for each of `Profile.rows`.
        input_s: Seconds of the half of a backward that the previous layer waits for.
        weight_s: Seconds of the other half.
        output_bytes: Bytes that cross a cut after this layer, for one row: all tensors that later layers read.
        saved_bytes: Bytes that a forward saves for the backward, for one row.
        fixed_bytes: Saved bytes that do not depend on the rows: masks, and copies of weights in mixed precision.
        parameter_bytes: Bytes of the parameters.
        transient_bytes: Temporary bytes at the peak of a forward or backward, beyond the saved ones, for one row.
        fixed_transient_bytes: Temporary bytes that do not depend on the rows: gradients of weights before they are added up.
        flops: Operations of a forward, for one row.
        ties: Names of parameters that other layers use too. A stage that has several of these layers holds them once.
        products: Matrix products with parameters, in order. Planners need them to price tensor parallelism.

    Examples:
        >>> from meshwright import LayerCost
        >>> LayerCost("block", (1.0,), (1.0,), (1.0,), output_bytes=8.0).backward_s
        (2.0,)
    """

    name: str
    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    output_bytes: float = 0.0
    saved_bytes: float = 0.0
    parameter_bytes: float = 0.0
    transient_bytes: float = 0.0
    flops: float = 0.0
    ties: tuple[str, ...] = ()
    fixed_bytes: float = 0.0
    fixed_transient_bytes: float = 0.0
    products: tuple[MatrixProduct, ...] = ()

    def __post_init__(self) -> None:
        sizes = (self.output_bytes, self.saved_bytes, self.parameter_bytes, self.transient_bytes, self.flops)
        numbers = (*self.forward_s, *self.input_s, *self.weight_s, *sizes, self.fixed_bytes, self.fixed_transient_bytes)
        if not all(0.0 <= x < float("inf") for x in numbers):
            raise MeshwrightError(f"costs of a layer are numbers of at least 0, got {self}")

    @property
    def backward_s(self) -> tuple[float, ...]:
        """Both halves of a backward."""
        return tuple(map(sum, zip(self.input_s, self.weight_s, strict=True)))


@dataclass(frozen=True, slots=True)
class ChainCost:
    """The layers of a model for one microbatch, as columns."""

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    output_bytes: tuple[float, ...]
    gradient_bytes: tuple[float, ...]
    saved_bytes: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    transient_bytes: tuple[float, ...]

    @property
    def backward_s(self) -> tuple[float, ...]:
        """Both halves of a backward."""
        return tuple(map(sum, zip(self.input_s, self.weight_s, strict=True)))


@dataclass(frozen=True, slots=True)
class Profile:
    """The layers of a model, with the numbers of rows at which their times are known.

    Args:
        layers: The layers, in order.
        rows: The numbers of rows of a microbatch that times are given for, increasing. Empty if they are not known: then each
            layer has one time, and bytes are those of a whole microbatch.
        device: The device that it was measured on.
        precision: The format of the tensors.
        source: Where the numbers come from.
        parameter_itemsize: Bytes of one element of a parameter, so that parameters can be counted.
        optimizer_bytes_per_parameter: Bytes of optimizer state per parameter; 8 for Adam in float32.
        tokens_per_row: Tokens of one row, for rates; 1 for images.
        error: The relative error of the times: 0.2 is 20 %.

    Raises:
        MeshwrightError: There are no layers, or a layer does not have one time for each number of rows.

    Examples:
        >>> from meshwright import LayerCost, Profile
        >>> layer = LayerCost("block", (1.0, 3.0), (1.0, 3.0), (1.0, 3.0), output_bytes=8.0)
        >>> Profile((layer,), rows=(1, 3)).at(2).forward_s
        (2.0,)
    """

    layers: tuple[LayerCost, ...]
    rows: tuple[int, ...] = ()
    device: str = ""
    precision: str = "float32"
    source: ProfileSource = ProfileSource.PUBLISHED
    parameter_itemsize: float = 4.0
    optimizer_bytes_per_parameter: float = 8.0
    tokens_per_row: int = 1
    error: float = 0.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise MeshwrightError("a profile needs at least one layer", fix="see the documentation for the format of a profile")
        if list(self.rows) != sorted(set(self.rows)) or any(count < 1 for count in self.rows):
            raise MeshwrightError(
                f"the rows of a profile must increase from at least 1, got {list(self.rows)}", fix="--rows 1,2,4"
            )
        times = len(self.rows) or 1
        for layer in self.layers:
            if {len(layer.forward_s), len(layer.input_s), len(layer.weight_s)} != {times}:
                raise MeshwrightError(
                    f"layer {layer.name} has {len(layer.forward_s)}, {len(layer.input_s)} and {len(layer.weight_s)} times, "
                    f"the profile has {times}",
                    fix="give one time for each number of rows",
                )

    def at(self, rows: int | None = None) -> ChainCost:
        """Returns the costs of a microbatch of this many rows. Times between two known numbers of rows are interpolated."""
        if not self.rows:
            rows = None
        elif rows is None or rows < 1:
            raise MeshwrightError(f"a microbatch of this profile needs a number of rows, got {rows}", fix="--batch")
        factor, layers = float(rows or 1), self.layers
        output = tuple(layer.output_bytes * factor for layer in layers)
        return ChainCost(
            forward_s=tuple(self._time(layer.forward_s, rows) for layer in layers),
            input_s=tuple(self._time(layer.input_s, rows) for layer in layers),
            weight_s=tuple(self._time(layer.weight_s, rows) for layer in layers),
            output_bytes=output,
            gradient_bytes=output,
            saved_bytes=tuple(layer.fixed_bytes + layer.saved_bytes * factor for layer in layers),
            parameter_bytes=tuple(layer.parameter_bytes for layer in layers),
            transient_bytes=tuple(layer.fixed_transient_bytes + layer.transient_bytes * factor for layer in layers),
        )

    def shared(self, rows: int | None, width: int) -> ChainCost:
        """Returns the costs of a microbatch on the one of `width` devices that has the most of its rows.

        What crosses from layer to layer is that of the whole microbatch: it depends on both sides how devices divide it.
        """
        whole = self.at(rows)
        if self.rows:
            return replace(
                self.at(-(-(rows or 0) // width)), output_bytes=whole.output_bytes, gradient_bytes=whole.gradient_bytes
            )
        times = {name: tuple(x / width for x in getattr(whole, name)) for name in ("forward_s", "input_s", "weight_s")}
        return replace(
            whole,
            **times,
            saved_bytes=tuple(layer.fixed_bytes + layer.saved_bytes / width for layer in self.layers),
            transient_bytes=tuple(layer.fixed_transient_bytes + layer.transient_bytes / width for layer in self.layers),
        )

    def _time(self, times: tuple[float, ...], rows: int | None) -> float:
        """Interpolates between known numbers of rows; outside of them, continues the nearest line through two of them.

        Measured times may fall with the rows, or grow faster than them. Such a line would give no time at all, so more rows never
        take less time than the most known ones, and fewer rows not less than their share of the fewest known ones.
        """
        if rows is None:
            return times[0]
        if len(times) == 1:
            return times[0] * rows / self.rows[0]
        at = min(max(bisect_right(self.rows, rows), 1), len(self.rows) - 1)
        low, high = self.rows[at - 1], self.rows[at]
        slope = (times[at] - times[at - 1]) / (high - low)
        least = min(times[at - 1], times[at]) * min(1.0, rows / self.rows[0])
        return max(least, times[at - 1] + slope * (rows - low))
