"""`meshwright plan`: chooses stages, replicas and devices for a profile on a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli import _inputs as inputs
from meshwright.cli import _outputs as outputs
from meshwright.errors import MeshwrightError
from meshwright.ir.input_limits import file_text

if TYPE_CHECKING:
    from meshwright.ir.layer_costs import Profile


def plan(
    *,
    profile: Annotated[Path, typer.Option("--profile", help="What each layer costs: of profile, or a published text.")],
    cluster: inputs.ClusterFile = None,
    microbatches: inputs.Microbatches = 16,
    batch: Annotated[int | None, inputs.size_option("--batch", help="Rows of a step, for a profile that knows its rows.")] = None,
    planner: Annotated[str, typer.Option("--planner", help="Which planner chooses.")] = "spp",
    as_json: inputs.Json = False,
    output: inputs.Output = None,
) -> None:
    """Choose stages, replicas and devices for a model on a cluster, and predict the time of a step."""
    if cluster is None:
        raise MeshwrightError("a plan needs a cluster", fix="--cluster cluster.toml")
    from meshwright import planners
    from meshwright.ir.files.cluster_file import read_cluster
    from meshwright.report.plan_text import plan_text

    layers, machine = _profile(profile), read_cluster(cluster)
    found = planners.plan(layers, machine, microbatches=microbatches, planner=planner, rows=_rows(batch, microbatches))
    outputs.give(json.dumps(found.to_dict()) if as_json else plan_text(found, layers, machine), output)


def _rows(batch: int | None, microbatches: int) -> int | None:
    if batch is not None and (batch < 1 or batch % max(microbatches, 1)):
        raise MeshwrightError(
            f"--batch {batch} is not a multiple of --microbatches {microbatches}", fix=f"--batch {max(microbatches, 1)}"
        )
    return None if batch is None else batch // microbatches


def _profile(path: Path) -> Profile:
    from meshwright.ir.files.profile_json import profile_from_json
    from meshwright.ir.files.profile_text import profile_from_text

    text = file_text(path, "the profile", fix="meshwright profile MODEL -o profile.json, or a published text profile")
    return profile_from_json(text) if path.suffix == ".json" else profile_from_text(text)
