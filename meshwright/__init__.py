"""Meshwright plans, proves, simulates and runs multi-dimensional parallel training of ordinary PyTorch models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright import schedules
from meshwright.errors import MeshwrightError
from meshwright.ir.action import Action, Cell, Op, Transfer, Value
from meshwright.ir.analysis.effects import effects
from meshwright.ir.cluster import Cluster, Duplex, Link
from meshwright.ir.files.cluster_json import cluster_from_json, cluster_to_json
from meshwright.ir.files.schedule_csv import from_csv, to_csv
from meshwright.ir.files.schedule_json import schedule_from_json, schedule_to_json
from meshwright.ir.placement import Placement
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.schedule import Recompute, Schedule
from meshwright.ir.stage_cost import StageCost, costs_from_json, costs_to_json, even_costs
from meshwright.ir.timeline import Lane, Span, Timeline
from meshwright.passes.check import CheckResult, check
from meshwright.passes.forward_only import forward_only
from meshwright.passes.lower import lower
from meshwright.simulate import simulate
from meshwright.simulate.recompute_budget import stage_aware

if TYPE_CHECKING:
    from meshwright import capture
    from meshwright.capture.weights.sketch import sketch
    from meshwright.ir.cluster import Device, Host
    from meshwright.ir.files.cluster_file import read_cluster
    from meshwright.ir.files.cluster_toml import cluster_from_toml
    from meshwright.ir.files.cluster_writer import cluster_to_toml
    from meshwright.ir.files.measurement import Measurement, measurement_from_json, measurement_to_json
    from meshwright.ir.files.model_json import model_from_json, model_to_json
    from meshwright.ir.files.profile_json import profile_from_json, profile_to_json
    from meshwright.ir.files.profile_text import profile_from_text
    from meshwright.ir.model import Cuts, ModelGraph
    from meshwright.ir.plan.chosen_plan import MemoryUse, Plan, PlanStage
    from meshwright.ir.plan.plan_file import plan_from_json, plan_to_json
    from meshwright.ir.plan.planned_file import plan_file_json, planned_file
    from meshwright.ir.plan.runnable_plan import runnable
    from meshwright.ir.profile import LayerCost, MatrixProduct, Profile
    from meshwright.planners import plan
    from meshwright.train.arguments import TrainingArguments
    from meshwright.train.measure import measure
    from meshwright.train.parallelize import parallelize
    from meshwright.train.profiling.profile_model import profile_model
    from meshwright.train.session.session import Session
    from meshwright.train.trainer import Trainer
    from meshwright.train.verify.certificate import Certificate
    from meshwright.train.verify.verify import verify

__version__ = "0.1.0"

__all__ = [
    "Action",
    "Cell",
    "Certificate",
    "CheckResult",
    "Cluster",
    "Cuts",
    "Device",
    "Duplex",
    "Host",
    "Lane",
    "LayerCost",
    "Link",
    "MatrixProduct",
    "Measurement",
    "MemoryUse",
    "MeshwrightError",
    "ModelGraph",
    "Op",
    "Parallel",
    "Placement",
    "Plan",
    "PlanStage",
    "Profile",
    "Recompute",
    "Schedule",
    "Session",
    "Span",
    "StageCost",
    "Timeline",
    "Trainer",
    "TrainingArguments",
    "Transfer",
    "Value",
    "capture",
    "check",
    "cluster_from_json",
    "cluster_from_toml",
    "cluster_to_json",
    "cluster_to_toml",
    "costs_from_json",
    "costs_to_json",
    "effects",
    "even_costs",
    "forward_only",
    "from_csv",
    "lower",
    "measure",
    "measurement_from_json",
    "measurement_to_json",
    "model_from_json",
    "model_to_json",
    "parallelize",
    "plan",
    "plan_file_json",
    "plan_from_json",
    "plan_to_json",
    "planned_file",
    "profile_from_json",
    "profile_from_text",
    "profile_model",
    "profile_to_json",
    "read_cluster",
    "runnable",
    "schedule_from_json",
    "schedule_to_json",
    "schedules",
    "simulate",
    "sketch",
    "stage_aware",
    "to_csv",
    "verify",
]

_LATER = {
    "Certificate": "meshwright.train.verify.certificate",
    "Cuts": "meshwright.ir.model",
    "Device": "meshwright.ir.cluster",
    "Host": "meshwright.ir.cluster",
    "LayerCost": "meshwright.ir.profile",
    "MatrixProduct": "meshwright.ir.profile",
    "Measurement": "meshwright.ir.files.measurement",
    "ModelGraph": "meshwright.ir.model",
    "MemoryUse": "meshwright.ir.plan.chosen_plan",
    "Plan": "meshwright.ir.plan.chosen_plan",
    "PlanStage": "meshwright.ir.plan.chosen_plan",
    "Profile": "meshwright.ir.profile",
    "Session": "meshwright.train.session.session",
    "Trainer": "meshwright.train.trainer",
    "TrainingArguments": "meshwright.train.arguments",
    "capture": "meshwright.capture",
    "cluster_from_toml": "meshwright.ir.files.cluster_toml",
    "cluster_to_toml": "meshwright.ir.files.cluster_writer",
    "measure": "meshwright.train.measure",
    "measurement_from_json": "meshwright.ir.files.measurement",
    "measurement_to_json": "meshwright.ir.files.measurement",
    "model_from_json": "meshwright.ir.files.model_json",
    "model_to_json": "meshwright.ir.files.model_json",
    "parallelize": "meshwright.train.parallelize",
    "plan": "meshwright.planners",
    "plan_file_json": "meshwright.ir.plan.planned_file",
    "plan_from_json": "meshwright.ir.plan.plan_file",
    "plan_to_json": "meshwright.ir.plan.plan_file",
    "planned_file": "meshwright.ir.plan.planned_file",
    "profile_from_json": "meshwright.ir.files.profile_json",
    "profile_from_text": "meshwright.ir.files.profile_text",
    "profile_model": "meshwright.train.profiling.profile_model",
    "profile_to_json": "meshwright.ir.files.profile_json",
    "read_cluster": "meshwright.ir.files.cluster_file",
    "runnable": "meshwright.ir.plan.runnable_plan",
    "sketch": "meshwright.capture.weights.sketch",
    "verify": "meshwright.train.verify.verify",
}
"""Names that are loaded when they are first asked for: most of them need torch, and a quick answer needs none of them."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    try:
        module = import_module(_LATER[name])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("torch", "transformers", "safetensors"):
            raise
        raise MeshwrightError(
            f"meshwright.{name} needs {error.name.partition('.')[0]}, which is not installed", fix="pip install 'meshwright[hf]'"
        ) from error
    return module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
