"""Real runs of data parallelism in lockstep and cyclic: their pictures and their cost table. `python -m examples.cyclic_runs`

Four workers train a small model with real messages and gradients. Each stage also sleeps for a while in its forward and in its
backward, as a host does that waits for its GPU, so that four workers run at the same time on two cores.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright import Timeline
from meshwright.ir.plan.plan import Parallel
from meshwright.ir.timeline import Lane
from meshwright.report.pictures.run_curves import live_picture, message_picture
from meshwright.report.pictures.svg import to_svg
from meshwright.runtime.launch.workers import Workers
from meshwright.runtime.tracing.trace import assemble
from meshwright.train.verify.certificate import Certificate
from meshwright.train.verify.verify import momentum, rank_trace, verify
from meshwright.train.verify.verify_case import Case, prepare_case

N, ROUNDS, WIDTH, STAGE_S = 4, 3, 16, 0.02
PLANS: dict[str, dict[str, Any]] = {
    "data parallelism in lockstep": {"dp": N, "schedule": "interleaved", "microbatches": 1, "options": {"chunks": N}},
    "cyclic data parallelism": {"dp": N, "dp_mode": "cyclic"},
}


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Stage(nn.Module):
    """A linear layer that takes a while."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), seconds

    def forward(self, x: Tensor) -> Tensor:
        """Compute, then wait."""
        return torch.tanh(_Sleep.apply(self.linear(x), self.seconds))


def stages(count: int = N, seconds: float = STAGE_S) -> list[nn.Module]:
    """A model with equal stages."""
    return [Stage(WIDTH, seconds) for _ in range(count)]


def batch(step: int, rows: int = 4 * N) -> tuple[Tensor, Tensor]:
    """Noise, and targets computed from it."""
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, x.roll(1, dims=1).sin()


def measured(pool: Workers, plan: dict[str, Any]) -> Timeline:
    """The timeline of a real run on one clock."""
    case, _, run = prepare_case(Case(stages, batch, Parallel(**plan), ROUNDS, "float64", 0, None, momentum))
    ranks = pool.run(rank_trace, case, run, ranks=run.parallel.processes)
    start_s = min(span.start_s for trace in ranks for span in trace.spans if span.lane is Lane.COMPUTE)
    return assemble([trace.spans for trace in ranks], run.schedule, start_s=start_s)


def draw_runs(folder: Path) -> list[Path]:
    """Write both pictures as SVG and return their files."""
    with Workers(N) as pool:
        runs = {name: measured(pool, plan) for name, plan in PLANS.items()}
    how = f"{N} workers, {N} stages of {STAGE_S * 1e3:g} ms, {ROUNDS} steps, measured"
    live = live_picture(runs, title=f"activations of all workers together ({how})")
    sent = message_picture(runs, title=f"when gradients are sent ({how})")
    paths = [folder / "cyclic-live.svg", folder / "cyclic-messages.svg"]
    for path, made in zip(paths, (live, sent), strict=True):
        path.write_text(to_svg(made))
    return paths


FORMS: dict[str, dict[str, Any]] = {
    "replicated": {"schedule": "interleaved", "microbatches": 1},
    "zero-1": {"dp_mode": "zero-1", "schedule": "interleaved", "microbatches": 1},
    "zero-2": {"dp_mode": "zero-2", "schedule": "interleaved", "microbatches": 1},
    "zero-3": {"dp_mode": "zero-3", "microbatches": 1},
    "cyclic v1": {"dp_mode": "cyclic", "options": {"rule": "v1"}},
    "cyclic v2": {"dp_mode": "cyclic"},
    "cyclic-zero": {"dp_mode": "cyclic-zero"},
    "cyclic-mp": {"dp_mode": "cyclic-mp"},
    "cyclic-pp": {"dp_mode": "cyclic-pp"},
}


def counted(pool: Workers, n: int, form: str) -> Certificate:
    """The counts of a form with n copies and n stages."""
    plan = {"dp": n, **FORMS[form]}
    options = {"chunks": n, **plan.get("options", {})}
    made = partial(stages, n, 0.0)
    return verify(made, partial(batch, rows=4 * n), {**plan, "options": options}, steps=ROUNDS, workers=pool)


def main() -> None:
    """Print the cost table, counted on real runs."""
    model = sum(p.numel() for stage in stages() for p in stage.parameters()) * 8
    print(f"N = {N} workers and stages, {ROUNDS} steps; bytes are in units of the gradients of the whole model, per step")
    print("| form | devices | live activations | messages | per worker and time step | sent | collectives | handed to them |")
    print("|---|---|---|---|---|---|---|---|")
    with Workers(N * (N + 1) // 2) as pool:
        for form in FORMS:
            found = counted(pool, N, form)
            devices = Parallel.of(found.parallel).processes
            assert found.passed, found.problems
            each = [found.stage_messages / ROUNDS, found.stage_messages_per_step, found.bytes_per_round / model]
            more = [found.collectives / ROUNDS, found.collective_bytes_per_round / model]
            cells = [form, str(devices), str(found.live_activations_max), *(f"{value:.3g}" for value in (*each, *more))]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
