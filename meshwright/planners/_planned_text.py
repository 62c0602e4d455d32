"""A chosen plan as the text of a plan file, with its prediction and with what it was made for."""

from __future__ import annotations

from meshwright.costs.stages import PRECISIONS
from meshwright.ir.cluster import Cluster
from meshwright.ir.files.profile_json import profile_to_json
from meshwright.ir.plan.chosen_plan import Plan
from meshwright.ir.plan.planned_file import cluster_input, digest_of, model_input, parallel_input, plan_file_json
from meshwright.ir.plan.runnable_plan import runnable
from meshwright.ir.profile import Profile, ProfileSource


def planned_text(found: Plan, profile: Profile, cluster: Cluster, *, batch: int | None) -> str:
    """Returns the text of a plan file."""
    parallel = runnable(found)
    captured = profile.source is not ProfileSource.PUBLISHED  # published layers are not those that a run captures
    inputs = {
        "profile": {"digest": digest_of(profile_to_json(profile)), "device": profile.device, "source": profile.source.value},
        "cluster": cluster_input(cluster),
        "parallel": parallel_input(parallel),
        "precision": PRECISIONS.get(profile.precision, profile.precision),
        **({"length": profile.tokens_per_row} if captured and profile.tokens_per_row > 1 else {}),
        **({"model": model_input([layer.parameter_bytes for layer in profile.layers])} if captured else {}),
        **({} if batch is None else {"batch": batch}),
    }
    predicted = {
        "step_s": found.step_s,
        "lower_bound_s": found.lower_bound_s,
        "update_s": found.causes.get("update", 0.0),
        "peak_bytes": list(found.peak_bytes),
        "needed_bytes": [use.total - use.reserve for use in found.memory],
        "error": found.error,
    }
    return plan_file_json(parallel, stages=found.to_dict()["stages"], predicted=predicted, made_for=inputs)
