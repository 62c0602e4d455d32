"""A training job as data: model, data set, plan and arguments. They come from a TOML file or from flags.

schema = 1
model = "gpt-small"
dataset = "stdlib"
[parallel]
pp = 4
schedule = "chimera"
[arguments]
max_steps = 100
output_dir = "out"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from meshwright.errors import MeshwrightError
from meshwright.ir.imported_function import function
from meshwright.ir.input_limits import file_text, shown, toml
from meshwright.ir.plan.plan_file import asked, is_auto, is_plan_path, say_code
from meshwright.ir.reader import Reader, positive, table, text
from meshwright.train.arguments import TrainingArguments
from meshwright.train.checkpoint import folders as rotate
from meshwright.train.data import named_datasets as datasets
from meshwright.train.models.model_names import resolve_model
from meshwright.train.trainer import Trainer

SCHEMA = 1
KEYS = frozenset({"schema", "model", "dataset", "length", "parallel", "arguments", "resume"})
OUTPUT = "trainer_output"


@dataclass(frozen=True)
class Job:
    """The job that `meshwright train` runs."""

    model: str
    dataset: str | None = None
    length: int | None = None
    parallel: Mapping[str, Any] | str = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    resume: str | bool | None = None

    @property
    def checkpoint(self) -> str | bool | None:
        """The checkpoint to resume from: a folder, True for the last checkpoint in output_dir, or None for a new run.

        `resume` and Hugging Face's `resume_from_checkpoint` mean the same. Raises if the folder is not a complete checkpoint.
        """
        given = [value for value in (self.resume, self.arguments.get("resume_from_checkpoint")) if value is not None]
        if len(given) == 2:
            raise MeshwrightError("resume and resume_from_checkpoint are both given, but they mean the same", fix="one of them")
        found = given[0] if given else False
        if isinstance(found, str) and found.lower() in ("last", "true", "false"):
            found = found.lower() != "false"
        if isinstance(found, bool):
            return found or None
        if not isinstance(found, str) or not found.strip():
            raise MeshwrightError(
                f"a checkpoint to resume from must be a folder, got {found!r}", fix="--resume last, or a folder"
            )
        rotate.read_marker(Path(found))
        return found

    def trainer(self) -> Trainer:
        """Returns a trainer that is ready to train. Raises if the job has an error."""
        if "parallel" in self.arguments:
            raise MeshwrightError("the plan of a job belongs in its table [parallel], not in [arguments]", fix="[parallel]")
        if self.length is not None and self.length < 1:
            raise MeshwrightError(f"a row must have at least 1 token, got --length {self.length}", fix="--length 64")
        own_arguments = {name: value for name, value in self.arguments.items() if name != "resume_from_checkpoint"}
        plan = self.parallel if isinstance(self.parallel, str) else dict(self.parallel)
        args = arguments({"output_dir": OUTPUT, **own_arguments, "parallel": plan})
        model = resolve_model(self.model)
        name = self.dataset or model.dataset
        if name is None:
            raise MeshwrightError(
                f"{self.model} needs a data set to train on", fix="--dataset stdlib, or package.module:function"
            )
        most = model.positions
        if most is not None and self.length is not None and self.length > most and ":" not in name:
            raise MeshwrightError(f"{self.model} takes {most} tokens per row, not {self.length}", fix=f"--length {most}")
        length = self.length or min(64, most or 64)
        if ":" in name:
            train, evaluation = function(name)(), None
        else:
            train, evaluation = (datasets.named(name, length=length, evaluation=which) for which in (False, True))
        return Trainer(
            model_init=partial(_built, model.build, self.model), args=args, train_dataset=train, eval_dataset=evaluation
        )


def _built(build: Any, name: str) -> Any:
    found = build()
    if found is None:
        raise MeshwrightError(f"{name} returned no model")
    return found


def arguments(given: Mapping[str, Any]) -> TrainingArguments:
    """Returns training arguments from a mapping. Raises if a name is unknown."""
    known = {f.name for f in fields(TrainingArguments) if f.init}
    if unknown := sorted(set(given) - known):
        raise MeshwrightError(
            f"there is no training argument {', '.join(map(repr, unknown))}", fix="the names of transformers.TrainingArguments"
        )
    numbers = {f.name for f in fields(TrainingArguments) if type(f.default) in (int, float)}
    for name in sorted(numbers & set(given)):
        if isinstance(given[name], bool) or not isinstance(given[name], int | float):
            raise MeshwrightError(f"the training argument {name} must be a number, got {shown(given[name])}", fix=f"{name} = 1")
    return TrainingArguments(**given)


def read_job(path: Path) -> Job:
    """Reads a job from a TOML file."""
    data = toml(file_text(path, "the job"), f"the job {path}")
    read = Reader(data, f"the job {path}", kind=None, schema=SCHEMA, keys=KEYS)
    if "schema" not in data:
        raise MeshwrightError(f"the job {path} has no 'schema'", fix=f"schema = {SCHEMA}")
    job = Job(
        model=read("model", text),
        dataset=read("dataset", text, None),
        length=read("length", positive, None),
        parallel=read("parallel", lambda value: value if is_auto(value) or is_plan_path(value) else asked(value), {}),
        arguments=read("arguments", table, {}),
        resume=read("resume", lambda value: value if isinstance(value, bool) else text(value), None),
    )
    own = isinstance(data.get("parallel"), dict) and not isinstance(job.parallel, str)  # a plan file warns by itself
    named = job.parallel.get("schedule") if own and isinstance(job.parallel, Mapping) else None
    say_code(path, job.model, job.dataset, named)
    return job


def flags_to_arguments(flags: Sequence[str]) -> dict[str, Any]:
    """Parses flags such as `--max-steps 100` as training arguments. Returns only those that were given."""
    given = [_snake(flag) for flag in flags]
    named = {flag.lstrip("-").partition("=")[0] for flag in given if flag.startswith("--")}
    if "parallel" in named:
        raise MeshwrightError("--parallel was given twice", fix="--parallel plan.json")
    kind: Any = TrainingArguments
    parser = _Flags(kind, allow_abbrev=False)
    space, left = parser.parse_known_args(given)
    if left:
        raise MeshwrightError(
            f"there is no flag {left[0]}", fix="--parallel, --dataset, or a flag for a training argument: --max-steps"
        )
    return {name: value for name, value in vars(space).items() if name in named or f"no_{name}" in named}


class _Flags(HfArgumentParser):
    """The parser of Hugging Face. It raises for a wrong flag instead of ending the process."""

    def error(self, message: str) -> Any:
        raise MeshwrightError(message, fix="meshwright train --help")


def _snake(flag: str) -> str:
    """Replaces dashes in the name of a flag by underscores."""
    if not flag.startswith("--"):
        return flag
    name, sign, value = flag[2:].partition("=")
    return f"--{name.replace('-', '_')}{sign}{value}"
