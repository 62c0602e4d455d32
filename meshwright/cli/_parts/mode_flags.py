"""The flags of a tensor mode, the same in every verb: they are the tensor fields of a plan, and are checked before any work."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any

import typer

from meshwright.costs.modes import mode
from meshwright.costs.planned_grid import planned_grid
from meshwright.costs.scheme import Save
from meshwright.errors import MeshwrightError
from meshwright.ir.plan.plan import Parallel

mode_option = partial(typer.Option, rich_help_panel="Tensor modes")
"""An option of the panel of tensor modes."""

SaveChoice = Annotated[
    str | None,
    mode_option("--save", metavar="shards|gathered", show_default="shards", help="What products keep for the backward pass."),
]
FIELDS = {"tensor_mode": "tensor", "sequence_parallel": "sequence", "sub_pipeline": "overlap"}
"""Fields of a plan whose flag has another name."""


@dataclass(frozen=True)
class ModeFlags:
    """How several ranks share the tensors of one worker, a group of flags."""

    tensor_mode: Annotated[
        str | None,
        mode_option(
            "--tensor-mode", metavar="line|grid|tesseract|box", show_default="line", help="How ranks share a worker's tensors."
        ),
    ] = None
    tp: Annotated[int | None, mode_option("--tp", show_default="1", help="Ranks that share the tensors of one worker.")] = None
    box: Annotated[
        str | None, mode_option("--box", metavar="w,a,b", help="The sides of a box; it sets --tensor-mode and --tp.")
    ] = None
    depth: Annotated[int | None, mode_option("--depth", show_default="1", help="The depth of a tesseract.")] = None
    sequence_parallel: Annotated[
        bool, mode_option("--sequence-parallel", help="With line: cut the residual stream between products too.")
    ] = False
    sub_pipeline: Annotated[
        bool,
        mode_option(
            "--sub-pipeline", help="Run a microbatch as two halves: collectives of one overlap the compute of the other."
        ),
    ] = False
    save: SaveChoice = None
    replicate: Annotated[
        list[str] | None,
        mode_option("--replicate", metavar="MODULE", help="A module that runs whole on every rank; repeat for more."),
    ] = None

    def __post_init__(self) -> None:
        """Raises if a mode does not exist or cannot have these ranks."""
        if self.tensor_mode is not None:
            mode(self.tensor_mode)
        save_of(self.save)
        given = self.plan_fields()
        if given and "tp" not in given and "box" not in given:
            raise MeshwrightError(f"--{flag_of(next(iter(given)))} needs ranks that share a worker", fix="--tp 2, or --box 2,2,1")
        planned_grid(Parallel.of(given))

    def plan_fields(self) -> dict[str, Any]:
        """Returns the fields of a plan that were given."""
        found = {FIELDS.get(field.name, field.name): getattr(self, field.name) for field in fields(self)}
        if self.box is not None:
            found["box"] = _sides(self.box)
        return {name: value for name, value in found.items() if value is not None and value is not False and value != []}


def flag_of(field: str) -> str:
    """Returns the flag of a field of a plan, without dashes in front."""
    known = {name: flag for flag, name in FIELDS.items()} | {"options": "option"}
    return known.get(field, field).replace("_", "-")


def save_of(text: str | None) -> Save:
    """Returns what products keep for the backward pass."""
    try:
        return Save.SHARDS if text is None else Save(text)
    except ValueError:
        raise MeshwrightError(f"--save must be {' or '.join(Save)}, got {text!r}", fix="--save shards") from None


def _sides(text: str) -> tuple[int, ...]:
    try:
        w, a, b = (int(part) for part in text.split(","))
    except ValueError:
        raise MeshwrightError(f"--box takes three whole numbers w,a,b, got {text!r}", fix="--box 2,2,1") from None
    return w, a, b
