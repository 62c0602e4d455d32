"""`report_to`: the tracking programs that transformers supports, each through its own transformers callback.

An unknown program, or one whose package is not installed, is refused by name before training starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from transformers import TrainerCallback
from transformers.integrations import integration_utils

from meshwright.errors import MeshwrightError
from meshwright.train.inputs.usable_arguments import usable

_PACKAGES = {
    "azure_ml": "azureml-sdk",
    "clearml": "clearml",
    "codecarbon": "codecarbon",
    "comet_ml": "comet-ml",
    "dagshub": "dagshub",
    "dvclive": "dvclive",
    "flyte": "flytekit",
    "mlflow": "mlflow",
    "neptune": "neptune",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""The package to install for each program, by the name that transformers uses."""

_AVAILABLE_AS = {"azure_ml": "azureml", "comet_ml": "comet", "flyte": "flytekit"}
"""The names in transformers' `is_NAME_available`, where they differ from the names of the programs."""


def refuse_reporters(names: Sequence[str] | None) -> None:
    """Refuses programs that cannot be used.

    TrainingArguments has already replaced "all" by the list of installed programs, and "none" by an empty list.
    """
    wanted = list(names or ())
    with _reporting(wanted):
        integration_utils.get_reporting_integration_callbacks(wanted)
    for name in wanted:
        is_available: Callable[[], bool] | None = getattr(
            integration_utils, f"is_{_AVAILABLE_AS.get(name, name)}_available", None
        )
        if name in _PACKAGES and is_available is not None and not is_available():
            package = _PACKAGES[name]
            raise MeshwrightError(
                f"report_to={name!r} needs the package {package}, which is not installed",
                fix=f"pip install {package}, or report_to='none'",
            )


def reporters(names: Sequence[str]) -> list[TrainerCallback]:
    """Returns the callbacks that report to these programs."""
    refuse_reporters(names)
    with _reporting(names):
        return [kind() for kind in integration_utils.get_reporting_integration_callbacks(list(names))]


def _reporting(names: object) -> AbstractContextManager[None]:
    return usable(f"report_to={names!r}", fix="report_to='none', or a program whose package is installed")
