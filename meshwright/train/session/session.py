"""The training session of one rank: an opened run and its step counter.

with meshwright.parallelize(model, example, dict(pp=2)) as session:
    for batch in batches:
        print(session.step(batch).loss)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.ir.column_names import TARGETS
from meshwright.ir.plan.plan_dp import DpMode
from meshwright.runtime.broadcast_tensor import broadcast_tensor
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.evaluate import Evaluated, Forward, Outputs
from meshwright.runtime.engine.settings import Settings
from meshwright.runtime.json_exchange import all_gather_state
from meshwright.runtime.parameters.absent import lose
from meshwright.runtime.stage.batch import Given, Own
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.tracing.trace import Trace
from meshwright.train.checkpoint.run_state import put_whole, snapshot, weights
from meshwright.train.checkpoint.save_pretrained import SHARD_BYTES, export
from meshwright.train.data.batches import Source
from meshwright.train.data.collate import tensors
from meshwright.train.data.rank_source import counts_rows, own_of_rank, source_of_rank
from meshwright.train.data.vocabulary import refuse_ids
from meshwright.train.optimizer.optimizer_facts import facts, merged
from meshwright.train.optimizer.shared_rates import Rates
from meshwright.train.prepared import PreparedRun
from meshwright.train.session.generate import generate, refuse_options, special_tokens
from meshwright.train.session.model_changes import ModelChanges
from meshwright.train.session.refuse_optimizer import refuse_optimizer
from meshwright.train.session.segment import StepResult, train_segment
from meshwright.train.session.speed import Amount, amount
from meshwright.train.setup.build_schedule import SEGMENT
from meshwright.train.setup.delay_notes import note_delays

log = logging.getLogger(__name__)


class Session:
    """One rank of a training run with your own loop. `meshwright.parallelize` creates it.

    All ranks must call the methods together, with the same batch.

    Attributes:
        model: The model that is trained.
        parallel: The plan.
        steps: The number of training steps so far.
        rank: The rank of this process.

    Examples:
        ```python
        with meshwright.parallelize(model, example_batch, dict(pp=2)) as session:
            for batch in batches:
                result = session.step(batch)
                print(result.step, result.loss, result.grad_norm)
            session.export("out/model")
        ```
    """

    def __init__(
        self,
        run: PreparedRun,
        model: nn.Module,
        rates: Rates,
        settings: Settings,
        *,
        trace: Trace | None = None,
        fill: Callable[[Layers, Iterable[nn.Module]], None] | None = None,
    ) -> None:
        """Opens a prepared run on this rank. `fill(layers, mine)` initializes this rank's layers if they have no values yet."""
        mesh = run.mesh(dist.get_rank())
        schedule, layers = run.schedule, run.open(model, mesh)
        refuse_optimizer(rates.trial, run, layers, rates.group_of)
        if fill is not None:
            fill(layers, run.held(layers, mesh))
        pipelines = 1 if run.parallel.mode is DpMode.CYCLIC_PP else run.parallel.dp
        if layers.moved and (copies := pipelines * schedule.placement.replicas) > 1 and dist.get_rank() == 0:
            log.warning(
                "forward changes the buffer %s, and each of the %d copies of the model updates its own buffer from its own rows: "
                "results that depend on the buffer differ from training in one process",
                layers.moved[0], copies,
            )  # fmt: skip
        self.run, self.parallel, self.vocabularies = run, run.parallel, run.vocabularies
        if run.is_segmented:
            settings = replace(settings, options=rates.apply)
        self.layers, self.rates, self.settings, self.model = layers, rates, settings, model
        self.engine = Engine(schedule, layers, settings, trace, run.segment if run.is_segmented else None)
        self.rank, self.steps = self.engine.mesh.rank, 0
        self.closing = ExitStack()
        self._told = False
        self._forward: Forward | None = None
        self._any_size: Forward | None = None
        self.model_changes = ModelChanges(model) if layers.columns is not None else ModelChanges(None, listed=model)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            lose(self.model.parameters())
            self.closing.__exit__(kind, error, trace)

    def close(self) -> None:
        """Closes the channels and process groups. Parameters that are on other ranks (`zero-3`) cannot be read any more."""
        lose(self.model.parameters())
        self.engine.close()
        self.closing.close()

    def step(self, batch: Given | Own) -> StepResult:
        """Trains on one batch: the whole batch, or only the rows of this data-parallel rank (`Own`)."""
        return self.train([batch])[0]

    def train(self, batches: Sequence[Given | Own]) -> list[StepResult]:
        """Trains on several batches, one step each, and returns the results of the steps.

        A cyclic plan runs up to 16 of them as one segment: workers stay staggered in it, and results are known at its end. How
        steps are cut into segments does not change any bit of the results. Other plans run one step after another.
        """
        found: list[StepResult] = []
        if self.run.is_segmented and not self._told:
            note_delays(self.run.schedule, self.rates.momentum, self.settings.rules.clip)
            self._told = True
        length = SEGMENT if self.run.is_segmented else 1
        for start in range(0, len(batches), length):
            found += train_segment(self, [self._tensors(batch) for batch in batches[start : start + length]])
        return found

    @property
    def forward(self) -> Forward:
        """The forward-only engine on the same stages, created on first use."""
        self.run.evaluation.refuse()
        if self._forward is None:
            self._forward = Forward(self.engine, schedule=self.run.forwards)
        return self._forward

    def _forward_of_any_size(self) -> Forward:
        """Returns the engine for generation, where every token makes the batch longer.

        A tensor mode would settle each length anew, so its ranks gather whole parameters instead.
        """
        if self.layers.any_size is None:
            return self.forward
        self.run.evaluation.refuse()
        if self._any_size is None:
            self._any_size = Forward(self.engine, self.layers.any_size, schedule=self.run.forwards)
        return self._any_size

    def evaluate(self, batch: Given | Own, *, outputs: bool = False) -> Evaluated:
        """Computes the mean loss of a batch without training. With `outputs` every rank also gets the model's outputs."""
        batch = self._tensors(batch)
        self.check_ids(batch)
        return self.forward(batch, outputs=Outputs.EVERYBODY if outputs else Outputs.NOBODY)

    def generate(self, input_ids: Tensor, *, max_new_tokens: int, **more: Any) -> Tensor:
        """Continues every row with its most likely tokens, as the model in one process would; see `generate`.

        Special tokens default to those of the model's generation_config. `eos_token_id=()` means no end token.
        """
        self.check_ids({"input_ids": input_ids})
        more = {**special_tokens(self.model), **{name: value for name, value in more.items() if value is not None}}
        refuse_options(more)
        return generate(self._forward_of_any_size(), input_ids, max_new_tokens=max_new_tokens, **more)

    def export(self, folder: str | Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        """Writes a folder that `from_pretrained` can read. No rank needs to hold the whole model."""
        export(self.engine, folder, model=self.model, shard_bytes=shard_bytes)

    def state_dict(self) -> dict[str, Any]:
        """Returns the full training state on every rank. It does not depend on the plan. Checkpoints save it in parts instead."""
        parts = all_gather_state((snapshot(self.engine), facts(self.engine)))
        known = merged([rest for _, rest in parts])
        found = {name: t for tensors, _ in parts for name, t in tensors.items()}
        return {"step": self.steps, "tensors": found, "facts": known, "rates": self.rates.state_dict(), "scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state that a session with any plan returned."""
        put_whole(self.engine, state["tensors"], state["facts"])
        self.rates.load_state_dict(state["rates"])
        self.load_scale(state.get("scale"))
        self.steps = state["step"]

    @property
    def scale(self) -> dict[str, float] | None:
        """The state of the fp16 loss scale, or None in other formats."""
        return None if self.engine.scaler is None else self.engine.scaler.state_dict()

    def load_scale(self, state: Mapping[str, float] | None) -> None:
        """Loads the state of a loss scale. Does nothing if the state is None or this session has no loss scale."""
        if state is not None and self.engine.scaler is not None:
            self.engine.scaler.load_state_dict(state)

    def source_for_rank(self, source: Source) -> Source:
        """Returns a data source limited to the rows of this data-parallel rank and the columns of its stages."""
        mesh, plan, schedule = self.engine.mesh, self.parallel, self.engine.schedule
        return source_of_rank(source, plan.mode, dp=plan.dp, mesh=mesh, schedule=schedule, needed=self.columns)

    @property
    def columns(self) -> frozenset[str] | None:
        """The columns of a batch that this rank's stages read, or None if they read all columns."""
        if self.layers.columns is None:
            return None
        names = {name for stage in self.engine.stages.values() for name in stage.columns}
        return frozenset(names | set(TARGETS) - set(self.layers.columns))

    def sum_over_ranks(self, *numbers: float, in_order: bool = False) -> list[float]:
        """Sums each number over all ranks in one collective; `in_order` of ranks, whatever the number of numbers."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.settings.device)
        if not in_order:
            dist.all_reduce(mine)
            return mine.tolist()
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
        return [sum(one) for one in zip(*(each.tolist() for each in found), strict=True)]

    def rows(self, batch: Given) -> int:
        """Returns the rows of a step over all data-parallel ranks, where `batch` has the rows of one of them."""
        mine = amount(batch).rows
        return int(self.sum_over_ranks(mine if self._counts_rows else 0)[0]) if self.parallel.dp > 1 else mine

    @property
    def _counts_rows(self) -> bool:
        """True on one rank for all rows that a data-parallel copy loads."""
        return counts_rows(self.parallel.mode, self.engine.mesh)

    def counted(self, batch: Given | Own) -> Amount:
        """Returns the rows and tokens that this rank adds to the sum over all ranks, so that each is counted once.

        One worker of each data-parallel copy counts the copy's own rows. Rank 0 counts a whole batch.
        """
        if isinstance(batch, Own):
            return amount(batch.tensors) if self._counts_rows else Amount()
        return amount(batch) if self.rank == 0 else Amount()

    def owned_weights(self) -> dict[str, Tensor]:
        """Returns whole parameters and buffers, by name. All ranks together return every weight of the model exactly once."""
        engine, found = self.engine, weights(self.engine)
        if isinstance(self.model, nn.Module):
            mine = {
                id(b)
                for stage, at in engine.stages.items()
                if self._first_of(stage)
                for layer in at.layers
                for b in layer.buffers()
            }
            found.update({name: b for name, b in self.model.named_buffers() if id(b) in mine})
        return found

    def broadcast_weights(self) -> None:
        """Copies all parameters and buffers of the model to every rank, as after training in one process.

        Parameters become whole again under a tensor mode, so this session cannot train any more.
        """
        engine, split = self.engine, self.layers.tensor
        engine.make_whole()
        if split is not None:
            split.restore_wholes(p for unit in engine.units for p in self.layers.unit(unit))
        for unit in range(engine.schedule.units):
            for parameter in self.layers.unit(unit):
                broadcast_tensor(parameter.data, src=engine.mesh.writers(engine.schedule, unit)[0])
        for stage in range(engine.schedule.stages):
            for layer in self.layers.of_stage(stage):
                for buffer in layer.buffers():
                    broadcast_tensor(buffer, src=engine.mesh.writers(engine.schedule, stage)[0])

    def check_ids(self, batch: Given | Own) -> None:
        """Raises if an id is outside its vocabulary, before this rank sends or receives anything."""
        if self.vocabularies and not isinstance(batch, Own):
            refuse_ids(self.vocabularies, batch, self.layers.columns or ())

    def _first_of(self, stage: int) -> bool:
        return self.engine.mesh.writers(self.engine.schedule, stage)[0] == self.rank

    def _tensors(self, batch: Given | Own) -> Given | Own:
        """Converts lists and arrays of a batch to tensors. Raises with the name of the column if that is not possible."""
        if not isinstance(batch, Own):
            return tensors(batch)
        return replace(own_of_rank(batch, self.parallel.mode, self.engine.mesh), tensors=tensors(batch.tensors))
