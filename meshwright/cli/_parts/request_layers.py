"""The layers that `plan` is about: those of a profile, or of a model that is profiled for the request."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import MeshwrightError
from meshwright.ir.input_limits import file_text

if TYPE_CHECKING:
    from meshwright.ir.cluster import Cluster
    from meshwright.ir.profile import Profile
    from meshwright.planners._limits import Refusal


def request_layers(
    profile: Path | None,
    model: str | None,
    length: int | None,
    batch_function: str | None,
    precision: str | None,
    machine: Cluster,
    cluster: str,
    planner: str,
    asked: dict[str, Any],
) -> tuple[Profile, Refusal | None]:
    """Returns the layers of a profile, or of a model for this request, and why plans cannot run the model."""
    from meshwright.planners import refuse_for_any_model
    from meshwright.planners._profile_fit import refuse_other_device

    if profile is not None:
        layers = _given_layers(profile, model, length, batch_function, precision)
        refuse_other_device(layers, machine, cluster)
        return layers, None
    if model is None:
        raise _either()
    refuse_for_any_model(planner, machine, **asked)
    return _profiled_layers(model, machine, length, batch_function, precision, asked["batch"], asked["rows"])


def _given_layers(
    path: Path, model: str | None, length: int | None, batch_function: str | None, precision: str | None
) -> Profile:
    """Returns the layers of a profile."""
    if model is not None:
        raise _either()
    layers = _profile(path)
    own = (("--length", length is not None), ("--batch-function", batch_function is not None))
    for flag, is_given in (*own, ("--precision", precision not in (None, layers.precision))):
        if is_given:
            raise MeshwrightError(
                f"{flag} is for a MODEL: a profile is made for one {flag[2:]}",
                fix=f"profile it again: meshwright profile MODEL {flag} ...",
            )
    return layers


def _profiled_layers(
    model: str,
    cluster: Cluster,
    length: int | None,
    batch_function: str | None,
    precision: str | None,
    batch: int | None,
    rows: int | None,
) -> tuple[Profile, Refusal]:
    """Returns the layers of a model, profiled for this cluster and for the rows of a plan, and why plans cannot run the model."""
    from meshwright.train.auto.plan_refusal import PlanRefusal
    from meshwright.train.models.named_layers import named_model
    from meshwright.train.profiling.profile_model import profile_model
    from meshwright.train.profiling.profile_rows import rows_to_profile

    gc.enable()  # a trace leaves reference cycles
    built, example = named_model(model, length=length, batch=batch_function)
    counts = rows_to_profile(cluster, batch=batch, rows=rows)
    layers = profile_model(built, example, rows=counts, cluster=cluster, precision=precision or "fp32")
    return layers, PlanRefusal(built, example)


def _either() -> MeshwrightError:
    return MeshwrightError("a plan needs either MODEL or --profile", fix="meshwright plan gpt-small --cluster laptop --batch 32")


def _profile(path: Path) -> Profile:
    from meshwright.ir.files.profile_json import profile_from_json
    from meshwright.ir.files.profile_text import profile_from_text

    text = file_text(path, "the profile", fix="meshwright profile MODEL -o profile.json, or a published text profile")
    return profile_from_json(text) if path.suffix == ".json" else profile_from_text(text)
