"""State divided among data-parallel copies: equal to whole copies, pieces that cover everything once, files of every mode."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import meshwright as mw
from meshwright import MeshwrightError, Parallel
from meshwright.ir.action import Op
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.parameters.zero_shares import flat_plans, spans
from meshwright.train.setup.build_schedule import lists_for
from tests.conftest import Pool
from tests.support import captured_models as small
from tests.support.thin import slow
from tests.support.trainers import Notes, distance, gpt2, ours, reference, series, text, trains_as_hugging_face

GPT2 = partial(small.gpt2, n_embd=32, n_head=8, n_layer=2)
BATCH = partial(small.text, rows=8, length=12)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.float64, torch.bfloat16])), min_size=1, max_size=8
    ),
    st.integers(1, 9),
)
def test_pieces_cover_every_element_once(sizes: list[tuple[int, torch.dtype]], shares: int) -> None:
    params = [torch.zeros(size, dtype=dtype) for size, dtype in sizes]
    plans = flat_plans(params, shares)
    for share in range(shares):
        for span in spans(plans, share):
            params[span.param][span.start : span.stop] += 1
            assert span.at >= 0 and span.at + span.stop - span.start <= plans[span.flat].width
    assert all(bool((p == 1).all()) for p in params)


PLANS: list[dict[str, Any]] = [
    {"dp": 2},
    {"pp": 2, "schedule": "chimera"},
    {"dp": 2, "pp": 2, "schedule": "zero_bubble", "clip": 0.01},
    {"dp": 2, "tp": 2},
    {"dp": 4, "microbatches": 1},
    {"pp": 2, "width": (3, 1), "clip": 0.01},
    {"pp": 2, "dp": 2, "width": (2, 1)},
]
SHORT = ("zero-1", PLANS[0]), ("zero-2", PLANS[1])


@pytest.mark.parametrize(
    ("mode", "plan"),
    [case if case in SHORT else slow(case, several=True) for case in product(("zero-1", "zero-2"), PLANS)],
    ids=str,
)
def test_divided_state_trains_as_one_process(pool: Pool, plan: dict[str, Any], mode: str) -> None:
    """With clipping active every gradient depends on the norm. The user's model is the reference."""
    found = pool.verify(GPT2, BATCH, steps=3, optimizer=adamw, dp_mode=mode, **{"microbatches": 2, **plan})
    assert found.passed, (found.max_relative_error, found.worst, found.problems)
    assert found.replicas_equal


@pytest.mark.parametrize(
    "plan",
    [slow({"dp": 2}), slow({"dp": 4, "microbatches": 2, "options": {"chunks": 3}}), {"dp": 2, "recompute": "inline"}],
    ids=str,
)
def test_divided_parameters_train_as_one_process(pool: Pool, plan: dict[str, Any]) -> None:
    found = pool.verify(GPT2, BATCH, steps=3, optimizer=adamw, dp_mode="zero-3", clip=0.01, **plan)
    assert found.passed, (found.max_relative_error, found.worst, found.problems)
    assert found.replicas_equal


def test_gathers_are_in_the_schedule_and_proved() -> None:
    schedule = lists_for(Parallel(pp=2, dp=2, schedule="chimera", dp_mode="zero-1"), ties=((0, 1),))
    for entries in schedule.lists:
        ends = [str(entry) for entry in entries if getattr(entry, "op", None) in (Op.U, Op.G)]
        assert ends == ["2U", "2G", "1U", "1G", "0U", "0G"]
    lost = schedule.with_lists(tuple(tuple(e for e in entries if str(e) != "1G") for entries in schedule.lists))
    assert "1G is missing" in str(mw.check(lost))
    early = tuple(tuple(sorted(entries, key=lambda e: str(e) == "1U")) for entries in schedule.lists)
    assert "read" in str(mw.check(schedule.with_lists(early)))
    swapped = (schedule.lists[0], tuple(_swapped(schedule.lists[1], "1G", "0G")))
    assert not mw.check(schedule.with_lists(swapped)).ok


def _swapped(entries: tuple[Any, ...], one: str, other: str) -> list[Any]:
    found = list(entries)
    places = [i for i, e in enumerate(found) if str(e) in (one, other)]
    found[places[0]], found[places[1]] = found[places[1]], found[places[0]]
    return found


@pytest.mark.parametrize("plan", [slow({"dp": 2, "pp": 2, "dp_mode": "zero-1"}), {"dp": 2, "dp_mode": "zero-3"}], ids=str)
def test_trainer_logs_what_hugging_face_logs(tmp_path: Path, workers: Workers, plan: dict[str, Any]) -> None:
    trains_as_hugging_face(tmp_path, workers, plan)


ONE, TWO, THREE = ({"dp_mode": f"zero-{stage}"} for stage in (1, 2, 3))
MOVES = [{"dp": 2, **ONE}, {"dp": 4, **TWO}, {"dp": 2, **THREE}, {"pp": 2, "tp": 2}, {"dp": 2, "tp": 2, **ONE}]


@pytest.mark.slow
def test_checkpoints_move_between_modes(tmp_path: Path, workers: Workers) -> None:
    """Saved by one plan, resumed by the next: the losses of an unbroken run on whole copies."""

    def run(folder: Path, plan: dict[str, Any], stop_at: int | None = None, resume: bool | None = None) -> list[float]:
        rows = 8 // plan.get("dp", 1)
        more = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "callbacks": [Notes(stop_at)]}
        trainer = ours(gpt2(), folder, text(40), workers, parallel=plan, per_device_train_batch_size=rows, **more)
        trainer.train(resume_from_checkpoint=resume)
        return series(trainer.state.log_history, "loss")

    wanted = run(tmp_path / "straight", {"dp": 2})
    for step, plan in enumerate(MOVES, 1):
        run(tmp_path / "moving", plan, stop_at=step, resume=step > 1 or None)
    assert run(tmp_path / "moving", {"dp": 1}, resume=True) == pytest.approx(wanted, rel=1e-5)


class Held(NamedTuple):
    """What a rank holds after a step: bytes of parameters, of optimizer state, of whole gradients, of slices; and its weights."""

    parameters: int
    state: int
    gradients: int
    slices: int
    weights: list[Tensor]


def trained(plan: dict[str, Any], clip: float | None) -> Held:
    """Three steps of a rank in float32. No stages share a parameter: its gradients would be added in another order."""
    model = gpt2(tie_word_embeddings=False)
    example = {name: torch.tensor([row[name] for row in text(8)]) for name in ("input_ids", "labels")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    with mw.parallelize(model, example, plan, optimizer=optimizer, clip=clip) as session:
        for _ in range(3):
            session.step(example)
        units = session.engine.units.values()
        made = [t for u in units if u.optimizer for kept in u.optimizer.state.values() for t in kept.values()]
        state = sum(t.nbytes for t in made if isinstance(t, Tensor) and t.dim())
        buffers = [buffer for unit in units for buffer in unit.spare]
        gradients = sum(flat.nbytes for buffer in buffers for flat in buffer.flats)
        slices = sum(t.nbytes for buffer in buffers for t in getattr(buffer, "slices", ()))
        storages = {s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for u in units for p in (*u.params, *u.updated))}
        with session.engine.whole_parameters():
            return Held(sum(storages.values()), state, gradients, slices, [p.detach().clone() for p in model.parameters()])


BITS = [("zero-1", 2), ("zero-2", 1), ("zero-3", 1)]


@pytest.mark.parametrize(
    ("mode", "microbatches", "clip"),
    [("zero-1", 2, 0.1), ("zero-3", 1, None), *(slow((*case, clip), several=True) for case in BITS for clip in (None, 0.1))],
)
def test_two_ranks_give_the_bits_of_whole_copies(pool: Pool, mode: str, microbatches: int, clip: float | None) -> None:
    """zero-2 and zero-3 add microbatches in another order: bits are equal if there is one. Stages are those of zero-3."""
    plan = {"dp": 2, "microbatches": microbatches, "schedule": "interleaved", "options": {"chunks": 4}}
    whole, divided = (pool.run(trained, {**plan, "dp_mode": m}, clip, ranks=2) for m in ("replicated", mode))
    for one, other in zip(whole, divided, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.weights, other.weights, strict=True))


@pytest.mark.parametrize("ranks", [2, slow(4)])
def test_ranks_hold_slices(pool: Pool, ranks: int) -> None:
    """AdamW has two numbers for each weight. Slices are padded to equal sizes, by less than one element per rank and unit."""
    plan = {"dp": ranks, "microbatches": 2}
    params = sum(p.numel() for p in gpt2(tie_word_embeddings=False).parameters())
    modes = ("replicated", "zero-1", "zero-2", "zero-3")
    whole, one, two, three = (pool.run(trained, {**plan, "dp_mode": mode}, None, ranks=ranks) for mode in modes)
    assert {held.state for held in whole} == {8 * params}
    assert all(held.parameters >= 4 * params for held in (*whole, *one, *two))
    assert all(held.parameters <= 4 * (params / ranks + 40) + 300 for held in three), "slices and numbers in place of parameters"
    for found in (one, two, three):
        assert sum(held.state for held in found) == 8 * params
        assert all(abs(held.state - 8 * params / ranks) <= 8 * ranks for held in found)
        assert all(4 * params / ranks <= held.slices <= 4 * (params / ranks + 1) for held in found)
    assert all(held.gradients >= 4 * params for held in one), "whole gradients until the end of a round"
    assert all(held.gradients < 1000 for held in (*two, *three)), "only weights and bits of what was reached"


def frozen_bytes(plan: dict[str, Any]) -> tuple[int, int, list[Tensor]]:
    """On a rank after two steps: bytes of frozen parameters, bytes of their storages now, and all weights at the end."""
    model = adapted()
    example = {name: torch.tensor([row[name] for row in text(8)]) for name in ("input_ids", "labels")}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with mw.parallelize(model, example, plan, optimizer=optimizer, check_capture=False) as session:
        for _ in range(2):
            session.step(example)
        frozen = [p for p in model.parameters() if not p.requires_grad]
        units = session.engine.units.values()
        own = [t for u in units if u.frozen_shares for t in u.frozen_shares.own]
        kept = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in (*frozen, *own))}
        state = session.state_dict()
        session.load_state_dict(state)
        with session.engine.whole_parameters():
            return sum(p.nbytes for p in frozen), sum(kept.values()), [p.detach().clone() for p in model.parameters()]


@pytest.mark.slow
def test_frozen_parameters_are_divided_too(pool: Pool) -> None:
    """zero-3 keeps a slice of them on each rank, and trains to the same weights. A saved state fills them again."""
    one = pool.run(frozen_bytes, {"dp": 2, "microbatches": 1, "schedule": "interleaved", "options": {"chunks": 4}}, ranks=2)
    two = pool.run(frozen_bytes, {"dp": 2, "microbatches": 1, "dp_mode": "zero-3"}, ranks=2)
    for (size, kept, weights), (_, divided, same) in zip(one, two, strict=True):
        assert kept == size and divided <= size / 2 + 16 * len(weights)
        assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))


def adapted() -> Any:
    transformers.set_seed(0)
    config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, r=2, init_lora_weights=False)
    return peft.get_peft_model(gpt2(), config)


@pytest.mark.parametrize("mode", [slow("zero-1"), "zero-2", slow("zero-3")])
def test_adapters_of_peft(tmp_path: Path, workers: Workers, mode: str) -> None:
    """Most parameters are frozen. Only zero-3 divides them."""
    expected, model = adapted(), adapted()
    log = reference(expected, tmp_path / "hf", text(), max_steps=4)
    plan = {"dp": 2, "pp": 1 if mode == "zero-3" else 2, "dp_mode": mode}
    trainer = ours(model, tmp_path, text(), workers, parallel=plan, max_steps=4, per_device_train_batch_size=4)
    trainer.train()
    assert series(trainer.state.log_history, "loss") == pytest.approx(series(log, "loss"), rel=1e-5)
    assert distance(model, expected) < 1e-4


def test_optimizers_that_are_not_elementwise_are_refused(tmp_path: Path, workers: Workers) -> None:
    with pytest.raises(MeshwrightError, match=r'not elementwise(.|\n)*dp_mode="zero-1" divides tensors'):
        ours(gpt2(), tmp_path, text(24), workers, parallel={"dp": 2, "dp_mode": "zero-1"}, optim="adafactor").train()


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"dp": 2, "dp_mode": "zero"}, "dp_mode must be one of replicated, zero-1"),
        ({"dp": 2, "dp_mode": "cyclic", "schedule": "gpipe"}, "schedule='gpipe' and dp_mode=\"cyclic\" cannot be combined"),
        ({"dp": 2, "dp_mode": "cyclic", "pp": 2}, "pp=2 and dp_mode"),
        ({"dp": 2, "dp_mode": "cyclic", "microbatches": 4}, "one microbatch per copy and step: dp=2, got microbatches=4"),
    ],
)
def test_plans_that_contradict_themselves(plan: dict[str, Any], words: str) -> None:
    with pytest.raises(MeshwrightError, match=words):
        Parallel(**plan)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"dp": 2, "pp": 2, "microbatches": 4}, "with pp=2 and 4 microbatches there are 8 gathers of every stage"),
        ({"dp": 2, "tp": 2}, r'dp_mode="zero-3" and tp=2 cannot be combined(.|\n)*box=.2, 2, 1.'),
    ],
)
def test_where_parameters_are_not_divided(plan: dict[str, Any], words: str) -> None:
    with pytest.raises(MeshwrightError, match=words):
        lists_for(Parallel(**plan, dp_mode="zero-3"))


@pytest.mark.parametrize("more", [{"sync": "ring"}, {"schedule": "pipedream", "pp": 2}])
def test_what_cannot_be_divided_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(MeshwrightError, match='dp_mode="zero-1" divides sums among ranks, but'):
        lists_for(Parallel(**{"dp": 2, "dp_mode": "zero-1", **more}))
