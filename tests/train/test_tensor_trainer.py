"""The Trainer under tensor modes: the same numbers, files and weights as in one process, whatever cuts the tensors."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional
from transformers import Adafactor, GPT2LMHeadModel

import meshwright as mw
from meshwright import MeshwrightError
from meshwright.capture.weights.sketch import sketch
from meshwright.runtime.launch.workers import Workers
from meshwright.train.loop.on_rank import session_for
from meshwright.train.loop.rank_job import RankJob
from tests.conftest import Pool
from tests.support.trainers import Notes, distance, gpt2, ours, series, text, trains_as_hugging_face

VOCABULARY, WIDTH, HEADS, LENGTH = 50, 16, 4, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (t.view(rows, length, HEADS, -1).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.behind(x))))


class PlainGPT(nn.Module):
    """A GPT with tied embeddings that computes in float64 throughout: Hugging Face's casts to float32 would hide 1e-9."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


def tokens(rows: int = 32) -> list[dict[str, list[int]]]:
    data = torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "labels": [-100] * (i % 5) + row[i % 5 :]} for i, row in enumerate(data)]


def run(folder: Path, workers: Any, plan: dict[str, Any], *, stop_at: int | None = None, resume: Any = None) -> list[float]:
    """The losses that the log has at the end."""
    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "callbacks": [Notes(stop_at)]}
    trainer = ours(PlainGPT(), folder, tokens(), workers=workers, parallel=plan, **given)
    trainer.train(resume_from_checkpoint=resume)
    return series(trainer.state.log_history, "loss")


def contents(folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    """The tensors in the files of a checkpoint, and their shapes."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found += [(key, tuple(file.get_slice(key).get_shape())) for key in file.keys()]  # noqa: SIM118
    return found


ONE: dict[str, Any] = {"microbatches": 2}
LINE: dict[str, Any] = {"tp": 2, "pp": 2, "microbatches": 2}
BOX: dict[str, Any] = {"box": (2, 2, 1), "microbatches": 2}
GRID: dict[str, Any] = {"tp": 4, "tensor": "grid", "microbatches": 2}


def test_a_run_moves_between_modes(tmp_path: Path, workers: Workers) -> None:
    """Saved by a line in a pipeline, resumed by a box, then by a grid, then by one process: an unbroken run in float64."""
    wanted = run(tmp_path / "straight", workers, ONE)
    folder = tmp_path / "moving"
    run(folder, workers, LINE, stop_at=1)
    run(folder, workers, BOX, stop_at=2, resume=True)
    run(folder, workers, GRID, stop_at=3, resume=True)
    assert run(folder, workers, ONE, resume=True) == pytest.approx(wanted, rel=1e-9) and len(wanted) == 4
    first, last = (sorted(contents(folder / f"checkpoint-{step}")) for step in (2, 4))
    assert first == last, "the same tensors in the files of every mode"


@pytest.mark.parametrize(
    "plan", [LINE, pytest.param(BOX, marks=pytest.mark.slow), pytest.param(GRID, marks=pytest.mark.slow)], ids=str
)
def test_the_trainer_logs_what_hugging_face_logs(tmp_path: Path, workers: Workers, plan: dict[str, Any]) -> None:
    trains_as_hugging_face(tmp_path, workers, plan)


def test_a_sketch_fills_only_its_parts(tmp_path: Path, pool: Pool) -> None:
    whole, sketched = (
        ours(built, tmp_path / name, text(16), workers=pool.started(), parallel={"tp": 2, "microbatches": 2}, max_steps=2)
        for name, built in (("whole", gpt2(n_head=4)), ("sketch", sketch(lambda: gpt2(n_head=4))))
    )
    for trainer in (whole, sketched):
        trainer.train()
    assert series(sketched.state.log_history, "loss") == series(whole.state.log_history, "loss")
    found = GPT2LMHeadModel.from_pretrained(tmp_path / "sketch" / "trained")
    assert distance(found, whole.module) == 0.0


def held(job: RankJob) -> tuple[int, int]:
    """On a rank: the elements of the parameters that it holds, and of the model."""
    session = session_for(job)
    mine = sum(p.numel() for p in job.model.parameters() if not p.is_meta)
    session.close()
    return mine, dist.get_rank()


def test_ranks_hold_parts(tmp_path: Path, pool: Pool) -> None:
    """Of a box of four, every rank holds a quarter of all matrices; vectors are cut or whole."""
    model = gpt2(n_head=4)
    trainer = ours(model, tmp_path, text(16), workers=pool.started(), parallel={"box": (2, 2, 1), "microbatches": 2})
    job, _ = trainer.job_and_example(trainer.train_dataset, trains=True)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    for mine, _ in trainer.run_on_ranks(held, job):
        assert matrices // 4 <= mine <= matrices // 4 + vectors


def test_values_of_a_sketch_are_cut_as_soon_as_they_are_final() -> None:
    """While later layers are filled, the whole values of earlier ones are gone."""
    skeleton = sketch(lambda: nn.Sequential(*(nn.Linear(300, 300) for _ in range(4))))
    seen: list[Any] = []

    def part(tensor: Tensor, value: Tensor) -> Tensor:
        alive = sum(each() is not None for each in seen)
        assert alive <= 2, f"{alive} whole values are kept"  # the weight before, and its bias
        seen.append(weakref.ref(value.untyped_storage()))
        return value[:100].clone()

    skeleton.fill(part=part)
    torch.manual_seed(0)
    for mine, whole in zip(skeleton.model, [nn.Linear(300, 300) for _ in range(4)], strict=True):
        assert torch.equal(mine.weight, whole.weight[:100]) and torch.equal(mine.bias, whole.bias[:100])


@pytest.mark.parametrize("plan", [{"tp": 2}, {"box": (2, 1, 1)}], ids=str)
def test_optimizers_that_are_not_elementwise_are_refused(tmp_path: Path, workers: Workers, plan: dict[str, Any]) -> None:
    model = gpt2(n_head=4)
    optimizer = Adafactor(model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False)
    trainer = ours(model, tmp_path, text(16), workers=workers, parallel=plan, optimizers=(optimizer, None), max_steps=1)
    with pytest.raises(MeshwrightError, match=r"Adafactor is not elementwise(.|\n)*tp=2 cuts tensors"):
        trainer.train()


def trained(plan: dict[str, Any], steps: int, state: Any = None) -> tuple[list[float], Any]:
    """On a rank: losses of an own loop from a model of this rank's own seed, and the state at the end."""
    batch = {"input_ids": torch.arange(8 * 16).reshape(8, 16) % 50, "labels": torch.arange(8 * 16).reshape(8, 16) % 50}
    with mw.parallelize(gpt2(seed=dist.get_rank(), n_head=4), batch, plan, optimizer=torch.optim.SGD, clip=0.5) as session:
        if state is not None:
            session.load_state_dict(state)
        losses = [session.step(batch).loss for _ in range(steps)]
        return losses, session.state_dict()


def test_an_own_loop_starts_equal_and_moves_between_modes(pool: Pool) -> None:
    """Ranks with models of different seeds train the model of rank 0; a state of a line goes on in a box and in one process."""
    [(wanted, _)] = pool.run(trained, {"microbatches": 2}, 4, ranks=1)
    found = pool.run(trained, {"tp": 2, "dp": 2, "microbatches": 2}, 2, ranks=4)
    for losses, _ in found:
        assert losses == pytest.approx(wanted[:2], rel=1e-5)
    state = found[0][1]
    for plan, ranks in (({"box": (1, 2, 2), "microbatches": 2}, 4), ({"microbatches": 2}, 1)):
        for losses, _ in pool.run(trained, plan, 2, state, ranks=ranks):
            assert losses == pytest.approx(wanted[2:], rel=1e-5), plan


def test_a_short_last_step_is_refused_before_workers_start(tmp_path: Path) -> None:
    """18 rows in steps of 8: the last one has 2, in two microbatches of one row."""
    trainer = ours(gpt2(n_head=4), tmp_path, text(18), workers=None, parallel={"box": (2, 1, 1), "microbatches": 2})
    words = r"the rows of a microbatch: size 1 does not divide by 2 \(w=2\) on the box .*; a short last step of an epoch"
    with pytest.raises(MeshwrightError, match=rf"{words}(.|\n)*dataloader_drop_last=True, or batches that divide \(size 2,"):
        trainer.train()


def stepped(plan: dict[str, Any]) -> tuple[str, float]:
    """On a rank: what a step of 6 rows is refused with, and the loss of a step of 8 rows after it."""
    ids = torch.arange(8 * 16).reshape(8, 16) % 50
    batch = {"input_ids": ids, "labels": ids}
    with mw.parallelize(gpt2(n_head=4), batch, plan, optimizer=torch.optim.SGD) as session:
        with pytest.raises(MeshwrightError) as caught:
            session.step({name: column[:6] for name, column in batch.items()})
        return str(caught.value), session.step(batch).loss


def test_rows_that_do_not_divide_are_refused_on_all_ranks_before_anything_is_sent(pool: Pool) -> None:
    """No rank waits for another one, and the next step is that of one process."""
    [([wanted, *_], _)] = pool.run(trained, {"microbatches": 2}, 1, ranks=1)
    found = pool.run(stepped, {"box": (2, 2, 1), "microbatches": 2}, ranks=4)
    assert len({said for said, _ in found}) == 1
    assert "size 3 does not divide by 2 (w=2) on the box w=2 x a=2 x b=1" in found[0][0] and "size 4" in found[0][0]
    assert [loss for _, loss in found] == pytest.approx([wanted] * 4, rel=1e-5)
