"""Checkpoints move between all data-parallel modes, tensor modes and pipelines: every ordered pair, against plain torch.

The reference trains the user's model in one process with torch's own optimizer: by the plain rule, by the delayed rule of cyclic
data parallelism, and from one to the other in the middle. A run that starts the delayed rule in the middle has no parameters of
one step ago, so it starts with the current ones, and says so.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.train.checkpoint.write import Checkpoints
from tests.conftest import Pool
from tests.support.delayed_rule import Delayed, labelled

CUT = ["blocks.1"]
FIRST, ALL = 2, 5
PLAIN: dict[str, dict[str, Any]] = {
    "one": {"dp": 1},
    "replicated": {"dp": 2},
    "zero-1": {"dp": 2, "dp_mode": "zero-1", "microbatches": 2},
    "zero-2": {"dp": 2, "dp_mode": "zero-2", "microbatches": 2},
    "zero-3": {"dp": 2, "dp_mode": "zero-3", "options": {"chunks": 3}},
    "zero-1 of three": {"dp": 3, "dp_mode": "zero-1"},
    "box": {"tp": 2, "tensor": "box", "box": (2, 1, 1)},
    "zero-1 of lines": {"dp": 2, "tp": 2, "dp_mode": "zero-1"},
    "pipeline": {"pp": 2, "microbatches": 2},
    "chimera": {"pp": 2, "schedule": "chimera", "dp_mode": "zero-2", "microbatches": 2},
}
DELAYED: dict[str, dict[str, Any]] = {
    mode: {"dp": 2, "dp_mode": mode, "stages": CUT} for mode in ("cyclic", "cyclic-zero", "cyclic-pp", "cyclic-mp")
}
PLANS = PLAIN | DELAYED


class Block(nn.Module):
    """Two products and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    """Classes of tokens. The embedding is the head too, and some weights are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks[0].norm.weight.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.tokens.weight)


def built(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return Tied().double()


def batches(first: int, last: int) -> list[Any]:
    random = [torch.Generator().manual_seed(step) for step in range(first, last)]
    return [(torch.randint(12, (6,), generator=r), torch.randint(12, (6,), generator=r)) for r in random]


def tools(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Two groups of AdamW. The rate of every step is another."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-2},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def stage_of(stages: int, name: str) -> int:
    return int(stages > 1 and name.startswith(CUT[0]))


def expected(before: str, after: str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the weights of a run in one process."""
    model = built()
    optimizer, scheduler = tools(model)
    losses: list[float] = []
    is_late = [name in DELAYED for name in (before, after)]
    parts = [(0, ALL)] if is_late[0] == is_late[1] else [(0, FIRST), (FIRST, ALL)]
    for (first, last), late in zip(parts, is_late, strict=False):
        stages = 2 if late else 1
        rule = Delayed(model, stages, stages, partial(stage_of, stages), labelled)
        losses += rule.train(batches(first, last), optimizer, scheduler)
    return losses, {name: p.detach() for name, p in model.named_parameters()}


class Warnings(logging.Handler):
    """The warnings of this rank."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps one."""
        self.texts.append(record.getMessage())


def trained(plan: dict[str, Any], folder: str, resumes: bool) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """On a rank: train and save, or resume and train to the end."""
    model = built(seed=4 if resumes else 3)
    optimizer, scheduler = tools(model)
    seen = Warnings()
    logging.getLogger("meshwright").addHandler(seen)
    example = batches(0, 1)[0]
    try:
        with mw.parallelize(
            model, example, plan, optimizer=optimizer, scheduler=scheduler, loss=nn.functional.cross_entropy, check_capture=False
        ) as session:
            checkpoints = Checkpoints(Path(folder), session.engine)
            if resumes:
                found = checkpoints.resume()
                assert found is not None and found.step == FIRST and found.extra is not None
                session.steps = found.step
                session.rates.load_state_dict(found.extra["rates"])
            losses = [r.loss for r in session.train(batches(*((FIRST, ALL) if resumes else (0, FIRST))))]
            if not resumes:
                checkpoints.save(FIRST, extra={"rates": session.rates.state_dict()})
            checkpoints.close()
            session.broadcast_weights()
    finally:
        logging.getLogger("meshwright").removeHandler(seen)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, seen.texts


def saves(pool: Pool, folder: Path, before: str) -> None:
    pool.run(trained, PLANS[before], str(folder), False, ranks=mw.Parallel(**PLANS[before]).members)


def resumes(pool: Pool, folder: Path, before: str, after: str) -> None:
    losses, weights = expected(before, after)
    ranks = pool.run(trained, PLANS[after], str(folder), True, ranks=mw.Parallel(**PLANS[after]).members)
    for found, whole, texts in ranks:
        assert found == pytest.approx(losses[FIRST:], rel=1e-12), after
        for name, wanted in weights.items():
            assert torch.allclose(whole[name], wanted, rtol=1e-12, atol=1e-14), (after, name)
        said = [text for text in texts if "start with the current values" in text]
        starts = after in DELAYED and before not in DELAYED
        assert len(said) == (starts and whole is ranks[0][1]), (after, texts)
        assert not said or "one step ago: 6 of them" in said[0], "what the first stage trains"


def test_a_delayed_run_resumes_divided_parameters(pool: Pool, tmp_path: Path) -> None:
    """The first rank owns nothing that is read late, and logs."""
    saves(pool, tmp_path, "zero-3")
    resumes(pool, tmp_path, "zero-3", "cyclic-zero")


@pytest.mark.slow
@pytest.mark.parametrize("before", PLANS)
def test_every_mode_resumes_every_other(before: str, pool: Pool, tmp_path: Path) -> None:
    saves(pool, tmp_path, before)
    for after in PLANS:
        resumes(pool, tmp_path, before, after)


class Counted(torch.optim.Optimizer):
    """Momentum over the root of the number of steps, which is in a list of one element."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state |= {"count": torch.zeros(1, dtype=torch.int64), "sum": torch.zeros_like(p)}
            state["count"] += 1
            state["sum"].mul_(0.9).add_(p.grad)
            p.sub_(0.1 * state["sum"] / state["count"].item() ** 0.5)


def counted(mode: str, folder: Path, parts: tuple[int, int], resumes: bool) -> dict[str, Tensor]:
    """Train on some batches in one process, after resuming, and save."""
    model = built()
    plan = {"dp": 1, "dp_mode": mode, "options": {"chunks": 2} if mode == "zero-3" else {}}
    optimizer = Counted([p for p in model.parameters() if p.requires_grad])
    how = {"optimizer": optimizer, "loss": nn.functional.cross_entropy, "check_capture": False}
    with mw.parallelize(model, batches(0, 1)[0], plan, **how) as session:
        checkpoints = Checkpoints(folder, session.engine)
        if resumes:
            checkpoints.resume()
        session.train(batches(*parts))
        checkpoints.save(parts[1])
        checkpoints.close()
        return session.state_dict()["tensors"]


@pytest.mark.parametrize(("before", "after"), [("replicated", "zero-1"), ("zero-3", "replicated"), ("zero-2", "zero-3")])
def test_a_counter_in_a_list_moves_too(before: str, after: str, tmp_path: Path) -> None:
    wanted = counted("replicated", tmp_path / "straight", (0, 4), False)
    counted(before, tmp_path / "moved", (0, 2), False)
    found = counted(after, tmp_path / "moved", (2, 4), True)
    assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in wanted.items()}
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=1e-12, atol=1e-14), name
    assert any(name.startswith("optimizer/count/") and t.tolist() == [4] for name, t in found.items())
