"""`report_to`: the programs that transformers can report to, each through its own callback there.

One that nobody knows, or whose package is missing, is refused by name before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from transformers import TrainerCallback
from transformers.integrations import integration_utils as theirs

from meshwright.errors import MeshwrightError
from meshwright.train.setup.usable_arguments import usable

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
"""What to install for each of them; the names are those of transformers."""

_ASKED = {"azure_ml": "azureml", "comet_ml": "comet", "flyte": "flytekit"}
"""Names in transformers' questions whether a package is there, where they are not those of the programs."""


def refuse_reporters(names: Sequence[str] | None) -> None:
    """Refuse what cannot be reported to; training arguments have made a list of "all", which is installed, and of "none"."""
    wanted = list(names or ())
    with _reporting(wanted):
        theirs.get_reporting_integration_callbacks(wanted)
    for name in wanted:
        is_there: Callable[[], bool] | None = getattr(theirs, f"is_{_ASKED.get(name, name)}_available", None)
        if name in _PACKAGES and is_there is not None and not is_there():
            package = _PACKAGES[name]
            raise MeshwrightError(
                f"report_to={name!r} needs the package {package}, which is not installed",
                fix=f"pip install {package}, or report_to='none'",
            )


def reporters(names: Sequence[str]) -> list[TrainerCallback]:
    """The callbacks that report to these programs."""
    refuse_reporters(names)
    with _reporting(names):
        return [kind() for kind in theirs.get_reporting_integration_callbacks(list(names))]


def _reporting(names: object) -> AbstractContextManager[None]:
    return usable(f"report_to={names!r}", fix="report_to='none', or a program whose package is installed")
