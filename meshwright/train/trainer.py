"""`Trainer`: Hugging Face's by name and habit; `args.parallel` says how it runs.

The same script trains in one process, on local workers that it starts by itself, or under torchrun. Local workers are sent
the trainer as it is (model, data sets, collator, callbacks); trained weights, log and state come back into it. Of a model
without weights (`meshwright.sketch`, or `model_init`) each rank fills its own stages, and the trained ones go to files.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState, set_seed
from transformers import trainer_pt_utils as reports
from transformers.integrations.integration_utils import default_logdir
from transformers.trainer_utils import PredictionOutput, TrainOutput

from meshwright.capture.trace.export import flatten
from meshwright.capture.trace.graph import Flat
from meshwright.capture.trace.packed_sequences import flattened_note
from meshwright.capture.weights.sketch import Skeleton, sketch
from meshwright.errors import MeshwrightError
from meshwright.runtime.launch.workers import Workers
from meshwright.train.arguments import TrainingArguments
from meshwright.train.data.batches import Source, without_unused
from meshwright.train.data.collate import Collate, Collator, accepted, default_collator
from meshwright.train.data.step_rows import refuse_small_cuts
from meshwright.train.data.vocabulary import refuse_ids, vocabularies
from meshwright.train.loop import on_rank
from meshwright.train.loop.between_trainings import Carried, bring_back, gathered, take_notes
from meshwright.train.loop.traced_steps import Traced
from meshwright.train.loop.training_loop import Judged, Outcome
from meshwright.train.session.save_model import save_whole
from meshwright.train.setup import trainer_inputs as border
from meshwright.train.setup.build_schedule import lists_for, refuse_early, refuse_endless
from meshwright.train.setup.captured_layers import is_captured, refuse_lossless
from meshwright.train.setup.check_capture import Evaluation
from meshwright.train.setup.gradient_hooks import refuse_lost
from meshwright.train.setup.own_weights import refuse_others, seeded, stamp
from meshwright.train.setup.start_phases import phase
from meshwright.train.setup.where import everywhere, launched, refuse_world

log = logging.getLogger(__name__)


class Trainer:
    """Trains a model under a plan, with the names and habits of the Trainer of Hugging Face.

    The same script trains in one process, on local workers that the trainer starts, or under torchrun.

    Args:
        model: A module, a list of layers, or a sketch (`meshwright.sketch`).
        args: The training arguments; `args.parallel` is the plan.
        data_collator: Makes a batch of rows.
        train_dataset: The rows to train on.
        eval_dataset: The rows to evaluate on, or a mapping of several sets by name.
        processing_class: A tokenizer or processor, saved with the model.
        model_init: Builds the model, instead of `model`. Each rank then fills only its own stages.
        compute_loss_func: A loss of your own, `f(outputs, labels, num_items_in_batch)`.
        compute_metrics: Metrics of an evaluation.
        callbacks: Callbacks of Hugging Face.
        optimizers: An optimizer and a learning-rate schedule, instead of those that `args` name.
        optimizer_cls_and_kwargs: An optimizer class and its arguments.
        preprocess_logits_for_metrics: Applied to predictions before they are kept.
        workers: A pool of workers that is running already.
        check_capture: False leaves out the comparison of the captured layers with the model before the first step.

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
    """What scripts of Hugging Face end with, as it is there."""

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
        border.refuse_given(type(self), locals())
        set_seed(self.args.seed)
        self.model_init, self.weights = model_init, cast(Path | None, None)
        self._set(model if model_init is None else self._sketched())
        self.carried, self._trained = cast(Carried | None, None), False
        self._stamp: dict[str, int] = {}
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
        self.evaluation = Evaluation()
        self.flat: Flat | None = None
        self._columns: frozenset[str] = frozenset()
        self.runs = default_logdir()
        self._given, self._pool = workers, cast(Workers | None, None)

    # -- what a script calls

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train; `resume_from_checkpoint` is a checkpoint's folder, or True for the last good one in output_dir."""
        border.refuse_checkpoint(resume_from_checkpoint)
        border.refuse_training(self.module, self.train_dataset)
        on_rank.refuse_unusable(self)
        if self._trained and not resume_from_checkpoint:
            self._start_again()
        self.capture(self.train_dataset, trains=True)
        if self.args.eval_strategy != "no":
            self.evaluation.refuse()
        found: list[Outcome] = self.everywhere(on_rank.train_on_rank, resume_from_checkpoint or None)
        bring_back(self, found)
        self.carried, self._trained = gathered([outcome.carried for outcome in found]), True
        if self.skeleton is not None and self.args.plan.processes > 1:
            self.weights, self._stamp = self.trained, stamp(self.trained)
        return found[0].output

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Loss and metrics of the evaluation set; those of several sets, by name, where a mapping of them is given."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if chosen is None:
            raise MeshwrightError("there is no eval_dataset to evaluate", fix="Trainer(eval_dataset=...)")
        border.refuse_dataset("eval_dataset", chosen, several=True)
        self.capture(next(iter(chosen.values())) if isinstance(chosen, dict) else chosen)
        self.evaluation.refuse()
        found: list[Judged] = self.everywhere(on_rank.evaluate_on_rank, chosen, metric_key_prefix)
        self.state = found[0].state
        take_notes(self.callbacks, found[0].callbacks)
        return found[0].metrics

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """Predictions for a data set, and metrics where it has labels."""
        border.refuse_dataset("test_dataset", test_dataset, needed=True)
        self.capture(test_dataset)
        self.evaluation.refuse()
        found: list[PredictionOutput] = self.everywhere(on_rank.predict_on_rank, test_dataset, metric_key_prefix)
        return found[0]

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """One more that looks on."""
        border.refuse_callback(callback)
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """One less: this one, or all of a class."""
        self.callbacks = [c for c in self.callbacks if c is not callback and type(c) is not callback]

    def is_world_process_zero(self) -> bool:
        """Is this the process that speaks for all?"""
        return self.args.process_index == 0

    def save_model(self, output_dir: str | None = None) -> None:
        """Write what `from_pretrained` reads: rank 0, which has a whole model, or of a sketch every rank its part, together."""
        folder = Path(output_dir or self.folder)
        if self.skeleton is not None:
            self._cut_and(on_rank.save_on_rank, folder)
        elif self.is_world_process_zero():
            save_whole(self.module, folder)
        if self.is_world_process_zero() and hasattr(self.processing_class, "save_pretrained"):
            self.processing_class.save_pretrained(folder)

    def generate(self, input_ids: Tensor, *, max_new_tokens: int, **more: Any) -> Tensor:
        """The most likely continuation of every row under the plan; see `Session.generate`."""
        self.evaluation.refuse()
        return self._cut_and(on_rank.generate_on_rank, input_ids, {"max_new_tokens": max_new_tokens, **more})[0]  # type: ignore[no-any-return]

    # -- what ranks ask

    @property
    def folder(self) -> Path:
        """Where checkpoints, log and model go."""
        return Path(self.args.output_dir or "trainer_output")

    @property
    def trained(self) -> Path:
        """Where the weights of a trained sketch are."""
        return self.folder / "trained"

    @property
    def module(self) -> nn.Module:
        """The model as one module; a list of layers is wrapped."""
        return self.model if isinstance(self.model, nn.Module) else nn.ModuleList(self.model)

    def capture(self, dataset: Any, *, trains: bool = False) -> None:
        """The graph of the model, once for all ranks; what cannot be captured is said here, before anything starts."""
        refuse_world(plan := self.args.plan)
        refuse_early(plan)
        if plan.processes > 1 and not launched():
            border.refuse_checkpointing(self.model)
        if trains:
            refuse_lost(self.module, plan.processes, sketched=self.skeleton is not None)
        if self.weights is not None and not launched():
            refuse_others(self.weights, self._stamp)
        source = self.source(dataset)
        example, fresh = source.example(self.example_rows), False
        columns = frozenset(map(str, example)) if isinstance(example, Mapping) else frozenset()
        if is_captured(self.model) and (self.flat is None or columns != self._columns):
            self._columns, fresh = columns, True  # a set without labels is another graph
            with phase(self, "capture"):
                self.flat = flatten(self.model, example, own_loss=self.compute_loss_func is not None)
        refuse_ids(vocabularies(self.flat), example)
        if trains and self.flat is not None:
            refuse_lossless(self.flat, example, own_loss=self.compute_loss_func is not None)
            last = (source.size or 0) % self.args.rows.step if not self.args.dataloader_drop_last else 0
            refuse_small_cuts(self.flat.refusal, example, {self.args.rows.step, last} - {0}, plan.microbatches * plan.dp)
        if trains and isinstance(example, Mapping):
            samples = self.args.rows.device * self.args.rows.accumulation
            if note := flattened_note(example, min(samples, source.size or samples), plan.microbatches):
                log.warning(note)
        if fresh and self.check_capture:
            with phase(self, "check"):
                self.evaluation = on_rank.check(self, self.source(dataset), example)
        if plan.processes > 1 and not launched():
            with phase(self, "cut"):
                layers, kept = on_rank.cut(self, example)
                refuse_endless(plan, flush=lists_for(plan, ties=layers.ties, kept=kept, costs=layers.costs).flush)

    @property
    def example_rows(self) -> int:
        """Enough rows that none of their number is taken for a constant."""
        return max(2, self.args.rows.device * self.args.rows.accumulation // self.args.plan.microbatches)

    @property
    def output_name(self) -> str | None:
        """What the model calls its first output; None where it returns a bare tensor."""
        name = next(iter(self.flat.outputs), "output") if self.flat is not None else "output"
        return None if name == "output" else name

    def source(self, dataset: Any) -> Source:
        """A data set, and how its rows become tensors."""
        args = self.args
        columns = accepted(self.model, args.label_names) if args.remove_unused_columns else None
        seed = args.seed if args.data_seed is None else args.data_seed
        collate = Collate(self.data_collator, columns)
        known = without_unused(dataset, columns)
        return Source(known, collate, seed, processes=args.dataloader_num_workers, vocabularies=vocabularies(self.flat))

    def __getstate__(self) -> dict[str, Any]:
        """What workers are sent: all but the workers."""
        return {**self.__dict__, "_given": None, "_pool": None, "model_init": None}

    # -- how

    def _set(self, model: Any) -> None:
        """The model to train from now on."""
        self.skeleton = model if isinstance(model, Skeleton) else None
        self.model = model if self.skeleton is None else self.skeleton.model
        self.weights = None

    def _sketched(self) -> Skeleton:
        """What `model_init` builds, from the seed."""
        assert self.model_init is not None
        return sketch(partial(seeded, self.model_init, self.args.seed), seed=self.args.seed)

    def _start_again(self) -> None:
        """A further `train()`: with `model_init` from a new model, as in Hugging Face's Trainer."""
        if self.model_init is not None:
            self._set(self._sketched())
            self.flat = None
        elif self.skeleton is not None:
            raise MeshwrightError(
                "this sketch was trained, and its optimizer's state was not kept: a further train() would start a new one",
                fix="train(resume_from_checkpoint=True), or a new Trainer of meshwright.sketch(build, weights=...)",
            )

    def _cut_and(self, work: Callable[..., Any], *more: Any) -> list[Any]:
        """Call `work(trainer, dataset, *more)` everywhere, with a data set to cut the model by."""
        first = self.eval_dataset if self.train_dataset is None else self.train_dataset
        dataset = next(iter(first.values())) if isinstance(first, dict) else first
        if dataset is None:
            raise MeshwrightError("there is no data set to cut the model by", fix="Trainer(train_dataset=...)")
        self.capture(dataset)
        return self.everywhere(work, dataset, *more)

    def everywhere(self, work: Callable[..., Any], *more: Any) -> list[Any]:
        """Call `work(trainer, *more)` on every rank of the plan; what those ranks returned that this process can see."""
        plan = self.args.plan
        refuse_world(plan)
        return everywhere(work, self, *more, parallel=plan, workers=self._workers)

    def _workers(self) -> Workers:
        """The workers of this trainer, started when they are first needed, and ended with it."""
        border.refuse_loaders(self.args.dataloader_num_workers, self.args.plan.processes)
        if self._given is not None:
            return self._given
        if self._pool is None:
            with phase(self, "start workers"):
                self._pool = Workers(self.args.plan.processes, preload=[__name__, *{type(self.model).__module__} - {"__main__"}])
            weakref.finalize(self, self._pool.close)
        return self._pool
