"""Tensor parallelism on real processes: plans with boxes under pipelines equal the user's model in one process."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import meshwright as mw
from meshwright import MeshwrightError, Parallel, plan_from_json, plan_to_json
from meshwright.costs.declared import Phase
from meshwright.costs.planned_grid import planned_grid
from meshwright.runtime.launch.workers import Workers
from meshwright.tensor.wires.wires import TransferLog
from meshwright.train.models import small_models
from meshwright.train.prepared import PreparedRun
from meshwright.train.verify.rank_differences import RankTrace
from meshwright.train.verify.verify import rank_trace
from meshwright.train.verify.verify_case import Case
from tests.conftest import Pool
from tests.support import captured_models as small

GPT2 = partial(small.gpt2, n_embd=32, n_head=8, n_layer=2)
LLAMA = partial(small.llama, hidden_size=32, intermediate_size=64, num_attention_heads=8, num_key_value_heads=4)
DROPPING = partial(GPT2, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)
BATCH = partial(small.text, rows=8, length=12)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def verified(pool: Pool, build: Any, steps: int = 3, **plan: Any) -> mw.Certificate:
    """Passes only if all errors are small, copies are equal, and every rank sent the words that are declared for its stages."""
    found = pool.verify(build, BATCH, steps=steps, optimizer=sgd, **plan)
    assert found.passed, (found.max_relative_error, found.worst, found.problems)
    assert found.weight_error <= 1e-11 and found.replicas_equal
    return found


@pytest.mark.parametrize(
    ("build", "plan"),
    [
        (GPT2, {"tp": 2, "pp": 2, "schedule": "chimera", "microbatches": 2, "overlap": True}),
        (GPT2, {"tp": 2, "sequence": True, "pp": 2, "schedule": "zero_bubble", "microbatches": 2, "overlap": True}),
        (GPT2, {"box": (2, 2, 1), "microbatches": 2, "clip": 0.01}),
        (GPT2, {"tp": 4, "tensor": "grid", "microbatches": 2, "save": "gathered"}),
        (LLAMA, {"tp": 4, "tensor": "tesseract", "depth": 1, "microbatches": 2}),
        (DROPPING, {"tp": 2, "dp": 2, "microbatches": 2, "recompute": "inline", "overlap": True}),
    ],
    ids=["line-chimera", "sequence-zero_bubble", "box-clip", "grid", "tesseract", "line-dp-dropout"],
)
def test_a_box_trains_as_one_process(pool: Pool, build: Any, plan: dict[str, Any]) -> None:
    """With clipping active every gradient depends on the norm: a part that is counted twice or not at all changes all weights."""
    verified(pool, build, **plan)


def test_a_tied_head_that_is_replicated_in_another_stage(pool: Pool) -> None:
    """The table is cut by its rows; the stage of the head gathers it in every microbatch."""
    verified(pool, GPT2, tp=2, pp=2, microbatches=2, replicate=["lm_head"])


class Heads(nn.Module):
    """Three heads: one for the loss, one that the loss multiplies by zero, one that it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.third, self.head, self.zeroed, self.unread = nn.Linear(8, 16), *(nn.Linear(16, 4) for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.third(self.second(self.first(x).relu()).relu()).relu()
        scores = self.head(hidden) + 0 * self.zeroed(hidden)
        return functional.cross_entropy(scores, labels), self.unread(hidden)


def numbers(step: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 8, generator=random), "labels": torch.randint(0, 4, (8,), generator=random)}


def decaying(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, weight_decay=0.1)


def test_parameters_that_no_backward_reaches_stay(pool: Pool) -> None:
    """As in torch, weight decay shrinks a weight whose gradient is zero, and leaves one that has no gradient as it is."""
    plan = {"box": (2, 1, 1), "pp": 2, "schedule": "zero_bubble", "microbatches": 2}
    found = pool.verify(Heads, numbers, steps=3, optimizer=decaying, **plan)
    assert found.passed and found.weight_error <= 1e-12, (found.max_relative_error, found.worst, found.problems)


def test_half_precision(pool: Pool) -> None:
    more = {"precision": "bf16", "dtype": "float32", "optimizer": sgd, "steps": 2}
    found = pool.verify(LLAMA, BATCH, box=(2, 1, 1), microbatches=2, **more)
    assert found.passed, (found.max_relative_error, found.worst, found.problems)


@pytest.mark.slow
@pytest.mark.parametrize("save", ["shards", "gathered"])
@pytest.mark.parametrize(
    "plan", [{"tp": 2}, {"tp": 2, "sequence": True}, {"box": (1, 2, 2)}, {"tp": 4, "tensor": "grid"}], ids=str
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_everywhere(pool: Pool, precision: str, plan: dict[str, Any], save: str) -> None:
    """Also under a split backward and as halves."""
    more = {"precision": precision, "dtype": "float32", "optimizer": sgd, "steps": 2, "save": save, "overlap": save == "shards"}
    found = pool.verify(LLAMA, BATCH, pp=2, schedule="zero_bubble", microbatches=2, **plan, **more)
    assert found.passed, (found.max_relative_error, found.worst, found.problems)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"recompute": "inline"}, {"recompute": "early"}], ids=str)
@pytest.mark.parametrize("schedule", ["onef1b", "zbv", "zero_bubble", "dualpipev"])
@pytest.mark.parametrize("plan", [{"tp": 2}, {"box": (2, 2, 1)}, {"box": (1, 1, 2), "save": "gathered"}], ids=str)
def test_halves_under_pipelines(pool: Pool, plan: dict[str, Any], schedule: str, more: dict[str, Any]) -> None:
    verified(pool, DROPPING, overlap=True, pp=2, schedule=schedule, microbatches=4, **plan, **more)


MODES: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 4},
    {"tp": 2, "sequence": True},
    {"box": (2, 2, 1)},
    {"box": (1, 2, 2)},
    {"tp": 4, "tensor": "grid"},
    {"tp": 4, "tensor": "tesseract", "depth": 1},
]


@pytest.mark.slow
@pytest.mark.parametrize("build", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("schedule", [None, "onef1b", "chimera", "zero_bubble"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_mode_alone_and_under_every_kind_of_pipeline(
    pool: Pool, mode: dict[str, Any], schedule: str | None, build: Any
) -> None:
    pipeline = {} if schedule is None else {"pp": 2, "schedule": schedule}
    verified(pool, build, **mode, **pipeline, microbatches=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        {"tp": 8},
        {"tp": 8, "sequence": True},
        {"tp": 4, "tensor": "grid", "dp": 2},
        {"tp": 8, "tensor": "tesseract", "depth": 2},
        {"box": (2, 2, 2)},
        {"box": (2, 4, 1)},
    ],
    ids=str,
)
def test_eight_ranks(pool: Pool, mode: dict[str, Any]) -> None:
    """8 is no square: the grid runs with two data-parallel copies."""
    verified(pool, GPT2, **mode, microbatches=1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_transports_that_block_in_order(pool: Pool, mode: dict[str, Any]) -> None:
    verified(pool, GPT2, steps=2, **mode, pp=2, microbatches=2, transport="strict")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"tp": 0}, "tp must be a whole number of at least 1"),
        ({"box": (2, 2)}, "box must be three whole numbers"),
        ({"box": (2, 2, 1), "tp": 3}, "box .2, 2, 1. has 4 ranks, tp is 3"),
        ({"box": (2, 1, 1), "tensor": "grid"}, 'box .2, 1, 1. is the shape of tensor="box"'),
        ({"tp": 2, "pp": 2, "width": (2, 1)}, "width .2, 1. and tp 2 cannot be combined"),
        ({"tp": 2, "save": "all"}, "save must be one of shards, gathered"),
        ({"tp": 2, "overlap": 1}, "overlap must be True or False"),
        ({"tp": 2, "replicate": "lm_head"}, "replicate must list modules by name"),
        ({"tensor": "grid"}, "tensor='grid' shares the tensors of a worker between ranks, but tp is 1"),
        ({"tp": 1, "tensor": "tesseract"}, "tensor='tesseract' shares the tensors of a worker between ranks, but tp is 1"),
        ({"tp": 1, "depth": 2}, "depth=2 is that of a tesseract, but tp is 1"),
        ({"sequence": True}, "sequence=True belongs to ranks that share tensors, but the plan has no tp"),
        ({"overlap": True, "save": "gathered"}, "overlap=True, save='gathered' belongs to ranks"),
        ({"pp": 2, "replicate": ["lm_head"]}, "replicate=.'lm_head'. belongs to ranks that share tensors"),
    ],
)
def test_plans_that_contradict_themselves(plan: dict[str, Any], words: str) -> None:
    with pytest.raises(MeshwrightError, match=words):
        Parallel(**plan)


def test_a_box_sets_its_ranks_and_travels_in_files() -> None:
    plan = Parallel(pp=2, box=(2, 2, 1), dp=3, replicate=["lm_head"])
    assert (plan.tp, plan.tensor, plan.processes) == (4, "box", 24)
    assert plan_from_json(plan_to_json(plan)) == plan
    assert "tp" not in plan_to_json(Parallel(pp=2)), "a plan without a box is written as before"


def test_one_rank_that_is_asked_for_shares_nothing() -> None:
    """Scripts may vary tp down to 1: these keys then change nothing, and neither does a box of one rank."""
    plan = Parallel(tp=1, tensor="line", sequence=True, overlap=True, save="gathered", replicate=["lm_head"])
    assert plan.processes == 1 and planned_grid(plan) is None
    assert planned_grid(Parallel(box=(1, 1, 1))) is None


def undeclared(case: Case, run: PreparedRun) -> RankTrace:
    """A rank whose layers forget to declare what the backward pass sends."""
    declare = TransferLog.declare

    def forgetful(log: TransferLog, words: Mapping[Phase, Fraction]) -> None:
        declare(log, {phase: count for phase, count in words.items() if phase is not Phase.BACKWARD})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransferLog, "declare", forgetful)
        return rank_trace(case, run)


class Forgetful:
    """Workers that run `undeclared` in place of `rank_trace`."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers

    def run(self, function: Any, *args: Any, ranks: int) -> list[Any]:
        return self.workers.run(undeclared if function is rank_trace else function, *args, ranks=ranks)


def test_words_that_are_not_declared_fail_the_certificate(workers: Workers) -> None:
    found = mw.verify(GPT2, BATCH, {"tp": 2}, steps=1, optimizer=sgd, workers=Forgetful(workers))  # type: ignore[arg-type]
    assert not found.passed and found.gradient_error < 1e-12
    assert sorted(problem.split(" words")[0].rsplit(" ", 1)[0] for problem in found.problems) == [
        f"rank {rank}, step 0, backward:" for rank in range(2)
    ]


def no_flush() -> dict[str, Any]:
    return {"tp": 2, "pp": 2, "schedule": "pipedream", "microbatches": 2}


@pytest.mark.parametrize(
    ("plan", "more", "words"),
    [
        ({"tp": 3}, {}, r"c_proj.weight: size 32 does not divide by 3 \(p=3\)(.|\n)*size 33"),
        ({"tp": 5, "tensor": "grid"}, {}, "grid needs a square number of ranks, got 5"),
        ({"tp": 2, "tensor": "ring"}, {}, "no tensor mode 'ring'"),
        ({"tp": 2, "recompute": "2GB"}, {}, "a recompute budget with tp=2 does not run yet"),
        (no_flush(), {}, "pipedream has no flush and keeps versions of parameters"),
        ({"tp": 2, "dp": 2, "dp_mode": "cyclic"}, {}, 'dp_mode="cyclic" has no flush(.|\n)*dp_mode="zero-1"'),
        ({"box": (4, 1, 1), "microbatches": 4}, {}, r"the rows of a microbatch: size 2 does not divide by 4 \(w=4\)"),
    ],
)
def test_what_a_box_cannot_do_is_refused_before_workers_start(plan: Any, more: Any, words: str) -> None:
    with pytest.raises(MeshwrightError, match=words):
        mw.verify(GPT2, BATCH, plan, steps=1, **more)


class Counts(Heads):
    """A buffer that the forward writes and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        return super().forward(x * (1 + self.count), labels)


def test_buffers_that_a_forward_writes_are_refused() -> None:
    with pytest.raises(MeshwrightError, match="writes into count: tensor modes do not support that yet"):
        mw.verify(Counts, numbers, {"tp": 2}, steps=1)


class Normed(Heads):
    """A norm over the batch: its statistics and its counter are buffers that the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(self.norm(x), labels)


def counted(plan: dict[str, Any], steps: int, state: Any = None) -> tuple[list[float], Any]:
    """On a rank: losses of an own loop, and the state at the end."""
    torch.manual_seed(0)
    with mw.parallelize(Normed().double(), wide(0), plan, optimizer=sgd) as session:
        if state is not None:
            session.load_state_dict(state)
        losses = [session.step(wide(step)).loss for step in range(steps)]
        return losses, session.state_dict()


def wide(step: int) -> dict[str, Tensor]:
    found = numbers(step)
    return {**found, "x": found["x"].double()}


def test_counters_of_norms_are_saved_and_loaded_as_in_one_process(pool: Pool) -> None:
    [(_, wanted)] = pool.run(counted, {"microbatches": 2}, 3, ranks=1)
    for plan, ranks in (({"tp": 2, "microbatches": 2}, 2), ({"box": (2, 2, 1), "microbatches": 2}, 4)):
        found = pool.run(counted, plan, 3, ranks=ranks)
        tensors = found[0][1]["tensors"]
        assert set(tensors) == set(wanted["tensors"])
        assert int(tensors["buffer/norm.num_batches_tracked"]) == 6
        for name, tensor in wanted["tensors"].items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-9, atol=1e-12)
        [(_, again)] = pool.run(counted, {"microbatches": 2}, 1, found[0][1], ranks=1)
        assert int(again["tensors"]["buffer/norm.num_batches_tracked"]) == 8


class ByFrequency(nn.Module):
    """Its gradient is divided by how often an id occurs in all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8, scale_grad_by_freq=True), nn.Linear(8, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.table(ids)).flatten(0, 1), labels.flatten())


def ids(step: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(step)
    return {name: torch.randint(0, 16, (8, 6), generator=random) for name in ("ids", "labels")}


def test_halves_of_a_table_that_counts_ids_are_refused() -> None:
    with pytest.raises(MeshwrightError, match=r"aten.embedding.default in table may give another result"):
        mw.verify(ByFrequency, ids, {"tp": 2, "overlap": True}, steps=1)


def test_lists_of_layers_are_refused() -> None:
    with pytest.raises(MeshwrightError, match="tp=2 shards the graph of a captured model, but this model is a list of layers"):
        mw.verify(small_models.mlp, small_models.mlp_batch, {"tp": 2}, steps=1)
