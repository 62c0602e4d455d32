"""Which operations may run as two halves of the rows, and why others may not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.capture.cut.cut_points import LayerChain
from meshwright.costs.scheme import Save
from meshwright.errors import MeshwrightError
from tests.support.sharded import Request, box, grid, line, on_threads, plan_of, reference
from tests.support.woven import woven_pass

Work = Callable[[Tensor, Tensor], Tensor]


class Rows(nn.Module):
    """Some work between two products."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.table, self.up, self.down, self.head = nn.Embedding(48, 16), nn.Linear(16, 64), nn.Linear(32, 16), nn.Linear(16, 48)
        self.work = work

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x + self.down(self.work(self.up(x), tokens))
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


BY_ROW: dict[str, Work] = {
    "glu": lambda x, ids: functional.glu(x, -1),
    "gather": lambda x, ids: x.gather(1, (ids % 6)[..., None].expand(-1, -1, 64))[..., :32],
    "topk": lambda x, ids: x.topk(32, -1)[0],
    "sort": lambda x, ids: x.sort(1)[0][..., 32:],
    "flip": lambda x, ids: x.flip([1, 2])[..., :32],
    "amax": lambda x, ids: x.unflatten(-1, (32, 2)).amax(-1),
    "repeat": lambda x, ids: x[..., :16].repeat_interleave(2, -1),
}
MIXED: dict[str, tuple[Work, str]] = {
    "flip": (
        lambda x, ids: x.flip([0])[..., :32],
        r"aten.flip.default in the model may give another result then: rows are mixed",
    ),
    "sort": (lambda x, ids: x.sort(0)[0][..., 32:], r"aten.sort.* in the model may give another result then: rows are mixed"),
    "gather": (
        lambda x, ids: x.gather(0, (ids % 8)[..., None].expand(-1, -1, 64))[..., :32],
        r"aten.gather.default in the model may give another result then: rows are mixed",
    ),
    "convolution": (
        lambda x, ids: functional.conv1d(x.permute(1, 2, 0), torch.ones(32, 64, 3).double(), padding=1).permute(2, 0, 1),
        r"aten.conv1d.default in the model may give another result then: rows are mixed",
    ),
    "lookup": (
        lambda x, ids: functional.embedding(ids[:, 0] % 4, x.flatten(1)).view(x.shape)[..., :32],
        r"aten.embedding.default in the model may give another result then: rows are mixed",
    ),
    "pairs": (
        lambda x, ids: ((ids[:, :1] == ids[:, 0]).double() @ x.flatten(1)).view(x.shape)[..., :32],
        r"aten.matmul.default in the model .*: it reads a value with a place for every two rows",
    ),
    "repeat": (
        lambda x, ids: x.repeat_interleave(2, 0)[::2, :, :32],
        r"aten.repeat_interleave.self_int in the model may give another result then: rows are mixed",
    ),
    "fft": (
        lambda x, ids: torch.fft.fft(x).real[..., :32],
        r"aten.fft_fft.default in the model .*: nothing says that it works on each row by itself",
    ),
}


def batch() -> dict[str, Tensor]:
    found = torch.randint(0, 48, (8, 6), generator=torch.Generator().manual_seed(0))
    return {"tokens": found, "labels": found.roll(-1, 1)}


@pytest.mark.parametrize("name", BY_ROW)
@pytest.mark.parametrize("asked", [line(2), *(pytest.param(m, marks=pytest.mark.slow) for m in (box(2, 2, 1), grid(2)))], ids=str)
def test_operations_along_other_dimensions_run_as_halves(asked: Request, name: str) -> None:
    torch.manual_seed(0)
    ref = reference(Rows(BY_ROW[name]), batch())
    plan = plan_of(ref, asked, save=Save.SHARDS, overlap=True, places=LayerChain(ref.line).starts)
    assert len(plan.halves) == 2
    outcome = on_threads(ref, plan.settled, woven_pass(ref, plan))
    assert outcome.loss <= 1e-12 and outcome.gradient <= 1e-12, outcome


@pytest.mark.parametrize("name", MIXED)
def test_what_may_mix_rows_is_refused_with_its_reason(name: str) -> None:
    work, words = MIXED[name]
    ref = reference(Rows(work), batch())
    with pytest.raises(MeshwrightError, match=words) as caught:
        plan_of(ref, line(2), overlap=True)
    assert caught.value.fix == "overlap=False"
    plan_of(ref, line(2))
