"""One rank while it trains: a prepared run, opened, and the step that it has reached.

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
from meshwright.train.session.generate import configured, generate, refuse_options
from meshwright.train.session.model_changes import Unchanged
from meshwright.train.session.speed import Amount, amount

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What a step gave, the same on every rank: the mean loss of its whole batch, and the norm of its mean gradient."""

    step: int
    loss: float
    weight: float
    grad_norm: float
    learning_rate: float
    skipped: bool = False
    rows: int = 0
    tokens: int = 0


class Session:
    """One rank of a training run with your own loop. `meshwright.parallelize` makes one.

    All ranks call the methods together, with the same batch.

    Attributes:
        model: The model that is trained.
        parallel: The plan.
        steps: How many steps were made.
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
        """Open a prepared run on this rank; `fill(layers, mine)` gives values to the layers of this rank, where it has none."""
        schedule, layers = run.schedule, run.open(model)
        refuse_coupled(rates.trial, [layers.unit(u) for u in range(schedule.units)], rates.group_of.get)
        if fill is not None:
            held = sorted({stage for _, stage in schedule.placement.held[dist.get_rank() % schedule.workers]})
            fill(layers, [layer for stage in held for layer in layers.of_stage(stage)])
        if layers.moved and (copies := run.parallel.dp * schedule.placement.replicas) > 1 and dist.get_rank() == 0:
            log.warning(
                "forward changes the buffer %s, and each of %d copies of the model changes its own by its own rows: "
                "what depends on it differs from one process",
                layers.moved[0], copies,
            )  # fmt: skip
        self.run, self.parallel, self.vocabularies = run, run.parallel, run.vocabularies
        self.layers, self.rates, self.settings, self.model = layers, rates, settings, model
        self.engine = Engine(schedule, layers, settings, trace)
        self.rank, self.steps = self.engine.mesh.rank, 0
        self.closing = ExitStack()
        self._forward: Forward | None = None
        self.unchanged = Unchanged(model if layers.columns is not None else None)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            self.closing.__exit__(kind, error, trace)

    def close(self) -> None:
        """Give back channels and groups."""
        self.engine.close()
        self.closing.close()

    def step(self, batch: Given | Own) -> StepResult:
        """Train on one batch: the whole one, of which each copy takes its rows, or the rows of this copy (`Own`)."""
        batch = _as_tensors(batch)
        self._refuse_ids(batch)
        self.unchanged.refuse()
        number, rates = self.steps, self.rates
        rates.follow()
        learning_rate = rates.learning_rate
        self.mode(training=True)
        tally = self.engine.run(lambda _: batch, number).get(number, Tally())
        loss, weight, rows, tokens = self.total(float(tally.loss), tally.weight, *self._counted(batch))
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
        """Walks without backward on the same stages, made when they are first asked for."""
        self.run.evaluation.refuse()
        if self._forward is None:
            self._forward = Forward(self.engine, schedule=self.run.forwards)
        return self._forward

    def evaluate(self, batch: Given | Own, *, outputs: bool = False) -> Evaluated:
        """The mean loss of a batch without training on it, and on request what the model returns, on every rank."""
        batch = _as_tensors(batch)
        self._refuse_ids(batch)
        return self.forward(batch, outputs=Outputs.EVERYBODY if outputs else Outputs.NOBODY)

    def generate(self, input_ids: Tensor, *, max_new_tokens: int, **more: Any) -> Tensor:
        """The most likely continuation of every row, as the model in one process would give it; see `generate`.

        Special tokens that are not given are those of the model's generation_config; `eos_token_id=()` is none.
        """
        self._refuse_ids({"input_ids": input_ids})
        more = {**configured(self.model), **{name: value for name, value in more.items() if value is not None}}
        refuse_options(more)
        return generate(self.forward, input_ids, max_new_tokens=max_new_tokens, **more)

    def export(self, folder: str | Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        """Write the folder that `from_pretrained` reads; no rank needs to hold the whole model."""
        export(self.engine, folder, model=self.model, shard_bytes=shard_bytes)

    def state_dict(self) -> dict[str, Any]:
        """Everything that training goes on from, whole on every rank and free of the plan; checkpoints write it in parts."""
        parts = all_gather_state((snapshot(self.engine), facts(self.engine)))
        known = merged([rest for _, rest in parts])
        found = {name: t for tensors, _ in parts for name, t in tensors.items()}
        return {"step": self.steps, "tensors": found, "facts": known, "rates": self.rates.state_dict(), "scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that a session of any plan has given."""
        put_whole(self.engine, state["tensors"], state["facts"])
        self.rates.load_state_dict(state["rates"])
        self.rescale(state.get("scale"))
        self.steps = state["step"]

    @property
    def scale(self) -> dict[str, float] | None:
        """The state of the loss scale, where fp16 has one."""
        return None if self.engine.scaler is None else self.engine.scaler.state_dict()

    def rescale(self, state: Mapping[str, float] | None) -> None:
        """Go on with a loss scale; a run in another format has none, and starts afresh."""
        if state is not None and self.engine.scaler is not None:
            self.engine.scaler.load_state_dict(state)

    def reads(self, source: Source) -> Source:
        """A data set as this rank reads it: the rows of its copy, the columns of its stages."""
        mesh = self.engine.mesh
        return replace(source, copy=mesh.copy, copies=mesh.copies, needed=self.columns)

    @property
    def columns(self) -> frozenset[str] | None:
        """The columns of a batch that the stages of this rank take; None where they take all."""
        if self.layers.columns is None:
            return None
        names = {name for stage in self.engine.stages.values() for name in stage.columns}
        return frozenset(names | set(TARGETS) - set(self.layers.columns))

    def total(self, *numbers: float) -> list[float]:
        """Numbers summed over all ranks: one small reduction."""
        summed = torch.tensor(numbers, dtype=torch.float64, device=self.settings.device)
        dist.all_reduce(summed)
        return summed.tolist()

    def rows(self, batch: Given) -> int:
        """Rows of all copies together, where each has its own."""
        first = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
        mine = first.shape[0] if self.engine.mesh.worker == 0 else 0
        return int(self.total(mine)[0]) if self.engine.mesh.copies > 1 else int(first.shape[0])

    def _counted(self, batch: Given | Own) -> Amount:
        """The rows and tokens that this rank counts: those of its copy on the first worker, a whole batch on the first rank."""
        if isinstance(batch, Own):
            return amount(batch.tensors) if self.engine.mesh.worker == 0 else Amount()
        return amount(batch) if self.rank == 0 else Amount()

    def mode(self, *, training: bool) -> None:
        """Train or evaluate: what dropout and norms with statistics go by."""
        for layer in self.layers.modules:
            layer.train(training)

    def held(self) -> dict[str, Tensor]:
        """Parameters and buffers that this rank is the first to hold, by name: together those of all ranks are the model."""
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

    def spread(self) -> None:
        """Give every rank all parameters and buffers of the model, as after training in one process."""
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
        """Ids outside a vocabulary are refused before this rank sends or receives anything."""
        if self.vocabularies and not isinstance(batch, Own):
            refuse_ids(self.vocabularies, batch, self.layers.columns or ())

    def _first_of(self, stage: int) -> bool:
        return self.engine.mesh.holders(self.engine.schedule, stage)[0] == self.rank


def _as_tensors(batch: Given | Own) -> Given | Own:
    """A batch with lists and arrays as tensors; what is none is refused by its column."""
    return Own(tensors(batch.tensors)) if isinstance(batch, Own) else tensors(batch)
