"""The training session of one rank: an opened run and its step counter.

with meshwright.parallelize(model, example, dict(pp=2)) as session:
    for batch in batches:
        print(session.step(batch).loss)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.ir.column_names import TARGETS
from meshwright.runtime.engine.engine import Engine, Settings
from meshwright.runtime.engine.evaluate import Evaluated, Forward, Outputs
from meshwright.runtime.json_exchange import all_gather_state
from meshwright.runtime.stage.batch import Given, Own
from meshwright.runtime.stage.layers import Layers
from meshwright.runtime.stage.objective import LossKind, Tally
from meshwright.runtime.tracing.trace import Trace
from meshwright.train.checkpoint.run_state import put_whole, snapshot
from meshwright.train.checkpoint.save_pretrained import SHARD_BYTES, export
from meshwright.train.data.batches import Source
from meshwright.train.data.collate import tensors
from meshwright.train.data.vocabulary import refuse_ids
from meshwright.train.optimizer.coupled_parameters import refuse_coupled
from meshwright.train.optimizer.optimizer_facts import facts, merged
from meshwright.train.optimizer.shared_rates import Rates
from meshwright.train.prepared import PreparedRun
from meshwright.train.session.generate import generate, refuse_options, special_tokens
from meshwright.train.session.model_changes import ModelChanges
from meshwright.train.session.speed import Amount, amount

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """The result of a training step, equal on every rank. `loss` is the mean over the whole batch of all ranks.

    `grad_norm` is the norm of the mean gradient.
    """

    step: int
    loss: float
    weight: float
    grad_norm: float
    learning_rate: float
    skipped: bool = False
    rows: int = 0
    tokens: int = 0


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
        refuse_coupled(rates.trial, [layers.unit(u) for u in range(schedule.units)], rates.group_of.get)
        if fill is not None:
            fill(layers, run.held(layers, mesh))
        run.cut(layers, mesh)
        if layers.moved and (copies := run.parallel.dp * schedule.placement.replicas) > 1 and dist.get_rank() == 0:
            log.warning(
                "forward changes the buffer %s, and each of the %d copies of the model updates its own buffer from its own rows: "
                "results that depend on the buffer differ from training in one process",
                layers.moved[0], copies,
            )  # fmt: skip
        self.run, self.parallel, self.vocabularies = run, run.parallel, run.vocabularies
        self.layers, self.rates, self.settings, self.model = layers, rates, settings, model
        self.engine = Engine(schedule, layers, settings, trace)
        self.rank, self.steps = self.engine.mesh.rank, 0
        self.closing = ExitStack()
        self._forward: Forward | None = None
        self.model_changes = ModelChanges(model if layers.columns is not None else None)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            self.closing.__exit__(kind, error, trace)

    def close(self) -> None:
        """Closes the channels and process groups."""
        self.engine.close()
        self.closing.close()

    def step(self, batch: Given | Own) -> StepResult:
        """Trains on one batch: the whole batch, or only the rows of this data-parallel rank (`Own`)."""
        batch = _as_tensors(batch)
        self._refuse_ids(batch)
        self.model_changes.check()
        number, rates = self.steps, self.rates
        rates.follow()
        learning_rate = rates.learning_rate
        self.set_mode(training=True)
        tally = self.engine.run(lambda _: batch, number).get(number, Tally())
        loss, weight, rows, tokens = self.sum_over_ranks(float(tally.loss), tally.weight, *self._counted(batch))
        weight = 1.0 if self.settings.loss_kind is LossKind.SUM else weight
        skipped = bool(self.engine.parameters.skipped) and self.engine.parameters.skipped[-1] == number
        if not skipped:
            rates.step()
        self.steps += 1
        norm = self.engine.parameters.norms.pop(number, float("nan"))
        mean = loss / weight if weight else float("nan")
        return StepResult(number, mean, weight, norm, learning_rate, skipped, int(rows), int(tokens))

    @property
    def forward(self) -> Forward:
        """The forward-only engine on the same stages, created on first use."""
        self.run.evaluation.refuse()
        if self._forward is None:
            self._forward = Forward(self.engine, schedule=self.run.forwards)
        return self._forward

    def evaluate(self, batch: Given | Own, *, outputs: bool = False) -> Evaluated:
        """Computes the mean loss of a batch without training. With `outputs` every rank also gets the model's outputs."""
        batch = _as_tensors(batch)
        self._refuse_ids(batch)
        return self.forward(batch, outputs=Outputs.EVERYBODY if outputs else Outputs.NOBODY)

    def generate(self, input_ids: Tensor, *, max_new_tokens: int, **more: Any) -> Tensor:
        """Continues every row with its most likely tokens, as the model in one process would; see `generate`.

        Special tokens default to those of the model's generation_config. `eos_token_id=()` means no end token.
        """
        self._refuse_ids({"input_ids": input_ids})
        more = {**special_tokens(self.model), **{name: value for name, value in more.items() if value is not None}}
        refuse_options(more)
        return generate(self.forward, input_ids, max_new_tokens=max_new_tokens, **more)

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
        mesh = self.engine.mesh
        return replace(source, copy=mesh.copy, copies=mesh.copies, needed=self.columns)

    @property
    def columns(self) -> frozenset[str] | None:
        """The columns of a batch that this rank's stages read, or None if they read all columns."""
        if self.layers.columns is None:
            return None
        names = {name for stage in self.engine.stages.values() for name in stage.columns}
        return frozenset(names | set(TARGETS) - set(self.layers.columns))

    def sum_over_ranks(self, *numbers: float) -> list[float]:
        """Sums each number over all ranks, in one all_reduce."""
        summed = torch.tensor(numbers, dtype=torch.float64, device=self.settings.device)
        dist.all_reduce(summed)
        return summed.tolist()

    def rows(self, batch: Given) -> int:
        """Returns the rows of a step over all data-parallel ranks, where `batch` has the rows of one of them."""
        first = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
        mine = first.shape[0] if self.engine.mesh.is_first_worker else 0
        return int(self.sum_over_ranks(mine)[0]) if self.engine.mesh.copies > 1 else int(first.shape[0])

    def _counted(self, batch: Given | Own) -> Amount:
        """Returns the rows and tokens that this rank adds to the sum over all ranks, so that each is counted once.

        The first worker of each data-parallel copy counts the copy's own rows. Rank 0 counts a whole batch.
        """
        if isinstance(batch, Own):
            return amount(batch.tensors) if self.engine.mesh.is_first_worker else Amount()
        return amount(batch) if self.rank == 0 else Amount()

    def set_mode(self, *, training: bool) -> None:
        """Sets all layers to train or eval mode, which dropout and batch normalization depend on."""
        for layer in self.layers.modules:
            layer.train(training)

    def owned_weights(self) -> dict[str, Tensor]:
        """Returns the parameters and buffers for which this rank is the first holder, by name.

        All ranks together return every weight of the model exactly once.
        """
        engine, found = self.engine, dict[str, Tensor]()
        for unit in engine.units:
            if engine.mesh.holders(engine.schedule, unit)[0] == self.rank:
                found.update({self.layers.names[p]: p.detach() for p in self.layers.unit(unit)})
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
        """Copies all parameters and buffers of the model to every rank, as after training in one process."""
        engine = self.engine
        for unit in range(engine.schedule.units):
            source = engine.mesh.holders(engine.schedule, unit)[0]
            for parameter in self.layers.unit(unit):
                dist.broadcast(parameter.data, src=source)
        for stage in range(engine.schedule.stages):
            for layer in self.layers.of_stage(stage):
                for buffer in layer.buffers():
                    dist.broadcast(buffer, src=engine.mesh.holders(engine.schedule, stage)[0])

    def _refuse_ids(self, batch: Given | Own) -> None:
        """Raises if an id is outside its vocabulary, before this rank sends or receives anything."""
        if self.vocabularies and not isinstance(batch, Own):
            refuse_ids(self.vocabularies, batch, self.layers.columns or ())

    def _first_of(self, stage: int) -> bool:
        return self.engine.mesh.holders(self.engine.schedule, stage)[0] == self.rank


def _as_tensors(batch: Given | Own) -> Given | Own:
    """Converts lists and arrays of a batch to tensors. Raises with the name of the column if that is not possible."""
    return Own(tensors(batch.tensors)) if isinstance(batch, Own) else tensors(batch)
