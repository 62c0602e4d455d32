"""`Trainer`: the interface of the Hugging Face Trainer, with the plan in `args.parallel`.

The same script trains in one process, on local workers that it starts itself, or under torchrun. Local workers receive a
`RankJob`: the prepared run, the model, the data and the user's functions. They return trained weights, log and state to the
trainer. If the model has no weights yet (`meshwright.sketch`, or `model_init`), each rank fills its own stages, and the trained
weights are written to files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from transformers import TrainerCallback, TrainerState, set_seed
from transformers import trainer_pt_utils as reports
from transformers.integrations.integration_utils import default_logdir
from transformers.trainer_utils import PredictionOutput, TrainOutput

from meshwright.capture.weights.sketch import Skeleton, sketch
from meshwright.errors import MeshwrightError
from meshwright.report.prediction_log import keep_measured
from meshwright.runtime.launch.workers import Workers
from meshwright.train.arguments import TrainingArguments
from meshwright.train.auto.planned_inputs import note_other_inputs, other_inputs
from meshwright.train.data.collate import Collator, default_collator
from meshwright.train.inputs import trainer_inputs
from meshwright.train.loop import between_trainings, on_rank
from meshwright.train.loop.flops import speed_of
from meshwright.train.loop.rank_job import TrainJob, trained_weights
from meshwright.train.loop.traced_steps import Traced
from meshwright.train.loop.training_loop import EvaluationResult, TrainResult
from meshwright.train.prepare_for_trainer import refuse_unusable
from meshwright.train.prepared import PreparedRun
from meshwright.train.session.save_model import save_whole
from meshwright.train.setup.own_weights import seeded, write_times
from meshwright.train.trainer_jobs import TrainerJobs


class Trainer(TrainerJobs):
    """Trains a model under a plan, with the interface and the behaviour of the Hugging Face Trainer.

    The same script trains in one process, on local workers that the trainer starts, or under torchrun.

    Args:
        model: A module, a list of layers, or a sketch (`meshwright.sketch`).
        args: The training arguments; `args.parallel` is the plan.
        data_collator: Makes a batch from a list of rows.
        train_dataset: The rows to train on.
        eval_dataset: The rows to evaluate on, or a mapping of several sets by name.
        processing_class: A tokenizer or processor, saved with the model.
        model_init: Builds the model, instead of `model`. Each rank then fills only its own stages.
        compute_loss_func: Your own loss, `f(outputs, labels, num_items_in_batch)`.
        compute_metrics: Computes the metrics of an evaluation.
        callbacks: Callbacks of Hugging Face.
        optimizers: An optimizer and a learning-rate schedule, instead of those that `args` name.
        optimizer_cls_and_kwargs: An optimizer class and its arguments.
        preprocess_logits_for_metrics: Applied to predictions before they are kept.
        workers: A pool of workers that is already running; None starts one.
        check_capture: False skips the comparison of the captured layers with the model before the first step.

    Raises:
        MeshwrightError: The model cannot be captured, differs from its captured layers, or cannot train under this plan.

    Examples:
        ```python
        args = meshwright.TrainingArguments(output_dir="out", max_steps=100, parallel=dict(pp=2, schedule="chimera"))
        trainer = meshwright.Trainer(model=model, args=args, train_dataset=rows)
        trainer.train()
        trainer.save_model("out/model")
        ```
    """

    log_metrics, save_metrics, save_state = reports.log_metrics, reports.save_metrics, reports.save_state
    """Methods of the Hugging Face Trainer that its example scripts call at the end."""

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Collator | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], Any] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        workers: Workers | None = None,
        check_capture: bool = True,
    ) -> None:
        self.args = args or TrainingArguments(output_dir="trainer_output")
        if not isinstance(self.args, TrainingArguments):
            raise MeshwrightError(
                f"args is {type(args).__module__}.{type(args).__name__}", fix="meshwright.TrainingArguments(...)"
            )
        trainer_inputs.refuse_given(type(self), locals())
        set_seed(self.args.seed)
        self.model_init, self.weights = model_init, cast(Path | None, None)
        self._set(model if model_init is None else self._sketched())
        self.optimizer_state, self._trained = cast(between_trainings.KeptOptimizerState | None, None), False
        self._write_times: dict[str, int] = {}
        self.train_dataset, self.eval_dataset, self.processing_class = train_dataset, eval_dataset, processing_class
        self.data_collator = data_collator or default_collator(processing_class)
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.callbacks = [c() if isinstance(c, type) else c for c in callbacks or ()]
        self.optimizers, self.optimizer_cls_and_kwargs = optimizers, optimizer_cls_and_kwargs
        self.state = TrainerState()
        self.check_capture = check_capture
        self.traced: Traced | None = None
        self.peak_bytes: tuple[int, ...] = ()
        self.prepared: PreparedRun | None = None
        self.other_inputs: tuple[str, ...] = ()
        """How the last training differed from what its plan was made for."""
        self._columns: frozenset[str] = frozenset()
        self._board = default_logdir()
        self._given, self._pool = workers, cast(Workers | None, None)

    # -- public methods

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Trains. `resume_from_checkpoint` is the folder of a checkpoint, or True for the last good one in output_dir."""
        trainer_inputs.refuse_checkpoint(resume_from_checkpoint)
        trainer_inputs.refuse_training(self.module, self.train_dataset)
        refuse_unusable(self.args, self.module, self.optimizers, self.optimizer_cls_and_kwargs)
        if self._trained and not resume_from_checkpoint:
            self._start_again()
        job, example = self.job_and_example(self.train_dataset, trains=True)
        if self.args.eval_strategy != "no":
            job.run.evaluation.refuse()
        self.other_inputs = other_inputs(self.args, self.module, job.run.flat)
        if self.is_world_process_zero():
            note_other_inputs(self.other_inputs)
        speed = speed_of(self.module, job.run.flat, example)
        resume = resume_from_checkpoint or None
        work = TrainJob(self.train_dataset, self.eval_dataset, resume, self.optimizer_state, self.traced, speed)
        found: list[TrainResult] = self.run_on_ranks(on_rank.train_on_rank, job, work)
        self.state, self.peak_bytes = found[0].state, found[0].peaks
        between_trainings.copy_callback_attributes(self.callbacks, found[0].callbacks)
        between_trainings.copy_trained_weights(self.module, [result.weights for result in found])
        states = [result.optimizer_state for result in found]
        self.optimizer_state, self._trained = between_trainings.merged_optimizer_state(states), True
        if self.skeleton is not None and self.args.plan.processes > 1:
            self.weights = trained_weights(self.args)
            self._write_times = write_times(self.weights)
        if self.args.planned is not None:
            folder = self.folder if self.args.auto is not None else None
            held = not self.other_inputs
            keep_measured(self.args.planned, found[0].output.metrics, folder, held=held, first=self.is_world_process_zero())
        return found[0].output

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Returns the loss and metrics of the evaluation set. For a mapping of sets, the metrics have the names of the sets."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if chosen is None:
            raise MeshwrightError("there is no eval_dataset to evaluate", fix="Trainer(eval_dataset=...)")
        trainer_inputs.refuse_dataset("eval_dataset", chosen, several=True)
        job = self.evaluation_job(next(iter(chosen.values())) if isinstance(chosen, dict) else chosen)
        found: list[EvaluationResult] = self.run_on_ranks(on_rank.evaluate_on_rank, job, chosen, metric_key_prefix)
        self.state = found[0].state
        between_trainings.copy_callback_attributes(self.callbacks, found[0].callbacks)
        return found[0].metrics

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """Returns the predictions for a data set, and metrics if it has labels."""
        trainer_inputs.refuse_dataset("test_dataset", test_dataset, needed=True)
        job = self.evaluation_job(test_dataset)
        found: list[PredictionOutput] = self.run_on_ranks(on_rank.predict_on_rank, job, test_dataset, metric_key_prefix)
        return found[0]

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Adds a callback."""
        trainer_inputs.refuse_callback(callback)
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Removes a callback, or all callbacks of a class."""
        self.callbacks = [c for c in self.callbacks if c is not callback and type(c) is not callback]

    def save_model(self, output_dir: str | None = None) -> None:
        """Writes a folder that `from_pretrained` can read. Rank 0 writes it; of a sketch every rank writes its own part."""
        folder = Path(output_dir or self.folder)
        if self.skeleton is not None:
            self.run_on_ranks(on_rank.save_on_rank, self.job(self.any_dataset()), folder)
        elif self.is_world_process_zero():
            save_whole(self.module, folder)
        if self.is_world_process_zero() and hasattr(self.processing_class, "save_pretrained"):
            self.processing_class.save_pretrained(folder)

    def generate(self, input_ids: Tensor, *, max_new_tokens: int, **more: Any) -> Tensor:
        """Continues every row with its most likely tokens, under the plan; see `Session.generate`."""
        job = self.evaluation_job(self.any_dataset())
        found: list[Tensor] = self.run_on_ranks(
            on_rank.generate_on_rank, job, input_ids, {"max_new_tokens": max_new_tokens, **more}
        )
        return found[0]

    # -- private methods

    def _set(self, model: Any) -> None:
        """Sets the model to train."""
        self.skeleton = model if isinstance(model, Skeleton) else None
        self.model = model if self.skeleton is None else self.skeleton.model
        self.weights = None

    def _sketched(self) -> Skeleton:
        """Returns a sketch of the model that `model_init` builds from the seed."""
        assert self.model_init is not None
        return sketch(partial(seeded, self.model_init, self.args.seed), seed=self.args.seed)

    def _start_again(self) -> None:
        """Prepares another `train()`. With `model_init` it starts from a new model, as in the Hugging Face Trainer."""
        if self.model_init is not None:
            self._set(self._sketched())
            self.prepared = None
        elif self.skeleton is not None:
            raise MeshwrightError(
                "this sketch was trained and its optimizer state was not kept: another train() would start with a new optimizer",
                fix="train(resume_from_checkpoint=True), or a new Trainer of meshwright.sketch(build, weights=...)",
            )
