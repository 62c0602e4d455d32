"""A model without weights: what is filled in has the bits that building it whole gives, and costs no more memory than itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from meshwright import MeshwrightError
from meshwright.capture.weights.sketch import Skeleton, sketch, tensors_of
from meshwright.capture.weights.skip_random import CHUNK, skip
from tests.support import tiny_models as tiny


def whole(build: Callable[[], Any], seed: int) -> dict[str, Tensor]:
    """Every tensor of a model that is built in one process."""
    torch.manual_seed(seed)
    return dict(tensors_of(build()))


def same(skeleton: Skeleton, expected: dict[str, Tensor], names: list[str]) -> bool:
    """Are these tensors the expected ones, to the bit and to the stride?"""
    found = dict(tensors_of(skeleton.model))
    return all(
        found[n].device.type == "cpu"
        and type(found[n]) is type(expected[n])
        and found[n].dtype == expected[n].dtype
        and found[n].stride() == expected[n].stride()
        and found[n].requires_grad == expected[n].requires_grad
        and torch.equal(found[n], expected[n])
        for n in names
    )


def check(build: Callable[[], Any], seed: int, share: int = 3) -> Skeleton:
    """Fill some, then all; those that are not filled take no memory."""
    before = torch.get_rng_state()
    skeleton = sketch(build, seed=seed)
    assert all(t.device.type == "meta" for _, t in tensors_of(skeleton.model))
    expected = whole(build, seed)
    torch.set_rng_state(before)
    assert list(skeleton.names) == list(expected)
    some = list(expected)[::share]
    skeleton.fill(some)
    assert same(skeleton, expected, some)
    tied = {id(t) for n, t in tensors_of(skeleton.model) if n in some}
    rest = [t for n, t in tensors_of(skeleton.model) if id(t) not in tied]
    assert all(t.device.type == "meta" for t in rest)
    skeleton.fill()
    assert same(skeleton, expected, list(expected))
    assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers are left alone"
    return skeleton


@pytest.mark.parametrize("build", [*tiny.FAMILIES, *tiny.UNNAMED], ids=lambda f: f.__name__)
def test_families_are_filled_as_if_built_whole(build: Callable[[], Any]) -> None:
    for seed in (0, 7):
        assert check(build, seed).note == ""


def test_ties_stay_tied() -> None:
    skeleton = sketch(tiny.gpt2, seed=1)
    skeleton.fill(["lm_head.weight"])
    model = skeleton.model
    assert model.lm_head.weight is model.transformer.wte.weight and model.lm_head.weight.device.type == "cpu"
    assert model.transformer.wpe.weight.device.type == "meta"


class Odd(nn.Module):
    """What people do when they write a model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8, padding_idx=2)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
        self.scaled = nn.Parameter(torch.randn(8, 8) * 0.02)
        self.old_style = nn.Parameter(torch.Tensor(8, 8))
        nn.init.xavier_uniform_(self.old_style)
        self.ones = nn.Parameter(torch.ones(7))
        self.ones.data.normal_().mul_(2)
        self.replaced = nn.Parameter(torch.ones(3))
        self.replaced.data = torch.randn(5, 2)
        nn.init.trunc_normal_(self.scaled, std=0.5, a=-0.1, b=0.1)
        self.orthogonal = nn.Linear(8, 8)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.register_buffer("positions", torch.zeros(10, 8))
        self.positions[:, 0::2] = torch.sin(torch.arange(10.0)[:, None] * torch.arange(4.0)[None])
        self.register_buffer("mask", torch.ones(400, 400).tril(), persistent=False)
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 3)]
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.width = self.features(torch.zeros(1, 3, 8, 8)).shape[1]
        self.head = nn.Linear(8, 30)
        self.head.weight = self.embedding.weight
        self.lstm = nn.LSTM(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.noise = torch.rand(3)
        torch.manual_seed(77)
        self.seeded = nn.Linear(8, 8)
        self.big = nn.Linear(700, 701)
        self.after_big = nn.Linear(8, 8)
        own = torch.Generator().manual_seed(3)
        nn.init.normal_(self.after_big.weight, generator=own)
        nn.init.normal_(self.after_big.bias, generator=own.manual_seed(3))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.wide, self.narrow = nn.Linear(5, 5).to(torch.float64), nn.Linear(5, 5).half()
        with torch.no_grad():
            self.big.weight[3:5].uniform_(-1, 1)
            self.big.bias += torch.randn(701)


def test_a_model_with_every_habit() -> None:
    for seed in range(3):
        for share in (2, 5, 7):
            skeleton = check(Odd, seed, share)
            assert skeleton.note == "" and skeleton.model.rates == Odd().rates
    with torch.no_grad():
        skeleton.model.lstm(torch.zeros(2, 1, 8))


MAKERS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda n: nn.Linear(n, n + 1),
    "embedding": lambda n: nn.Embedding(n + 3, 4, padding_idx=1),
    "norm": lambda n: nn.LayerNorm(n),
    "conv": lambda n: nn.Conv1d(n, 2, 3),
    "recurrent": lambda n: nn.GRU(n, 2),
    "big": lambda n: nn.Linear(512, 280 + n),
    "double": lambda n: nn.Linear(n, n).double(),
}
FILLERS: dict[str, Callable[[Tensor], object]] = {
    "nothing": lambda p: None,
    "normal": lambda p: p.normal_(0, 0.02),
    "uniform": lambda p: nn.init.uniform_(p, -1, 1),
    "truncated": lambda p: nn.init.trunc_normal_(p, std=0.02),
    "tight": lambda p: nn.init.trunc_normal_(p, mean=3.0, std=0.5, a=-1, b=1),
    "scaled": lambda p: p.mul_(0.5).add_(1),
    "noisy": lambda p: p.add_(torch.randn_like(p)),
    "copied": lambda p: p.copy_(torch.rand(p.shape)),
    "row": lambda p: p[0].zero_() if p.dim() else p.zero_(),
    "masked": lambda p: p.mul_(torch.bernoulli(torch.full_like(p, 0.5))),
    "exponential": lambda p: p.exponential_(),
    "flipped": lambda p: p.copy_(p.flip(0)),
}


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.tuples(st.sampled_from(sorted(MAKERS)), st.integers(1, 17)), min_size=1, max_size=5),
    fills=st.lists(st.tuples(st.integers(0, 30), st.sampled_from(sorted(FILLERS))), max_size=8),
    seed=st.integers(0, 2**40),
    share=st.integers(1, 4),
)
def test_any_plain_model(parts: list[tuple[str, int]], fills: list[tuple[int, str]], seed: int, share: int) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(*(MAKERS[kind](n) for kind, n in parts))
        params = list(model.parameters())
        with torch.no_grad():
            for which, kind in fills:
                FILLERS[kind](params[which % len(params)])
        return model

    assert check(build, seed, share).note == ""


def test_a_list_of_layers_has_numbered_names() -> None:
    def build() -> list[nn.Module]:
        first, last = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        last.weight = first.weight
        return [first, nn.Linear(4, 4), last]

    skeleton = check(build, 3)
    assert skeleton.model[0].weight is skeleton.model[2].weight and "1.bias" in skeleton.names


class Looks(nn.Module):
    """Its shape depends on what was drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 5 if self.first.weight.sum() > 0 else 6)


class Forks(nn.Module):
    """Draws aside and goes back."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            self.aside = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)


@pytest.mark.parametrize("build", [Looks, Forks])
def test_what_cannot_be_recorded_is_built_whole_and_says_so(
    build: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    for seed in range(4):
        assert "cannot be recorded" in check(build, seed).note
    assert "cannot be recorded" in caplog.text


def test_an_error_of_the_model_itself_is_the_users() -> None:
    def build() -> nn.Module:
        raise KeyError("hidden_size")

    with pytest.raises(KeyError):
        sketch(build)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(MeshwrightError, match="the model has no 'weigth'"):
        sketch(lambda: nn.Linear(2, 2)).fill(["weigth"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["uniform_", "normal_"])
def test_skipped_numbers_leave_the_generator_where_drawn_ones_do(kind: str, dtype: torch.dtype) -> None:
    for count in (1, 17, 2 * CHUNK, 2 * CHUNK + 1, 5 * CHUNK + 9):
        torch.manual_seed(count)
        getattr(torch.empty(count, dtype=dtype), kind)()
        drawn = torch.get_rng_state()
        torch.manual_seed(count)
        assert skip(kind, count, dtype)
        assert torch.equal(torch.get_rng_state(), drawn)


MEMORY = """
import sys, torch
from torch import nn
from meshwright.capture.weights.sketch import sketch

torch.set_num_threads(1)
def build():
    return nn.ModuleList([nn.Linear(1024, 1024, bias=False) for _ in range(100)] + [nn.Embedding(40000, 512)])

sketch(lambda: nn.ModuleList([nn.Linear(2, 2), nn.Embedding(2, 2)])).fill()  # loads what torch keeps for tensors without values
kept = int(sys.argv[1])
now = int(open("/proc/self/statm").read().split()[1]) * 4096
skeleton = sketch(build, seed=1)
skeleton.fill([f"{i}.weight" for i in range(kept)])
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) << 10
print(peak - now)
"""


def test_a_rank_takes_the_memory_of_its_own_stage() -> None:
    """The model has 500 MB, one table of it 80 MB."""
    peaks = {}
    for kept in (0, 30):
        done = subprocess.run([sys.executable, "-c", MEMORY, str(kept)], capture_output=True, text=True, check=True)
        peaks[kept] = int(done.stdout)
        assert peaks[kept] <= (kept * 4 + 24) << 20, f"{peaks[kept] >> 20} MB for {kept * 4} MB of its own"
    assert peaks[30] - peaks[0] >= 30 * 4 * 0.9 * (1 << 20), "what is kept is really there"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(11)
    tiny.gpt2().save_pretrained(tmp_path)
    return tmp_path


def test_weights_come_from_files_and_only_those_that_are_wanted(saved: Path) -> None:
    torch.manual_seed(11)
    expected = dict(tensors_of(tiny.gpt2()))
    skeleton = sketch(tiny.gpt2, seed=0)
    skeleton.load(saved, ["lm_head.weight", "transformer.h.1.mlp.c_fc.weight"])
    assert same(skeleton, expected, ["lm_head.weight", "transformer.wte.weight", "transformer.h.1.mlp.c_fc.weight"])
    assert skeleton.model.transformer.h[0].mlp.c_fc.weight.device.type == "meta"
    skeleton.load(saved)
    assert same(skeleton, expected, list(expected))


def test_weights_in_several_files_and_buffers_that_are_in_none(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = tiny.bert()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    skeleton = sketch(tiny.bert, seed=0)
    skeleton.load(tmp_path)
    assert same(skeleton, dict(tensors_of(model)), list(skeleton.names))


def test_weights_that_do_not_fit_are_refused(saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    stored = load_file(saved / "model.safetensors")
    skeleton = sketch(tiny.gpt2)

    def refused(tensors: dict[str, Tensor], text: str, **more: Any) -> None:
        save_file(tensors, tmp_path / "w.safetensors")
        with pytest.raises(MeshwrightError, match=text):
            skeleton.load(tmp_path / "w.safetensors", [], **more)

    refused({k: v for k, v in stored.items() if "ln_f.bias" not in k}, "lack 1 .* 'transformer.ln_f.bias'")
    refused({**stored, "extra.mask": torch.ones(2)}, "1 tensors that the model does not have, the first is 'extra.mask'")
    refused({**stored, "transformer.ln_f.bias": torch.ones(5)}, r"shape \(5,\) in the weights and \(32,\) in the model")
    refused({k.removeprefix("transformer."): v for k, v in stored.items()}, "stored without 'transformer.'")
    save_file({**stored, "extra.mask": torch.ones(2)}, tmp_path / "w.safetensors")
    skeleton.load(tmp_path / "w.safetensors", [], ignore=["*.mask"])
    for path, text in (("nowhere", "there is no"), ("empty", "no safetensors file"), ("bad.safetensors", "is not a safetensors")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        (tmp_path / "bad.safetensors").write_bytes(b"x" * 20)
        with pytest.raises(MeshwrightError, match=text):
            skeleton.load(tmp_path / path)
