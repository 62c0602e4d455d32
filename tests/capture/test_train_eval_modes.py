"""What a model does in training alone, it does not do in evaluation after it was captured, and the other way round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.capture.trace.patches.random_rates import Never
from meshwright.train.setup.captured_layers import through
from tests.support.layers_of_models import layers_for
from tests.support.tiny_models import SIZES, library


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) if self.training else x


class Path(nn.Module):
    """Drops whole rows of a branch at random."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x.div(0.5) * (0.5 + torch.rand(x.shape[0], 1, 1, dtype=x.dtype)).floor_()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.cell(x)[0]
        return found


class Odd(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(8, 8), part, nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        found: Tensor = self.last(x + self.part(x.clone())).square().mean()
        return found


PARTS: dict[str, Callable[[], nn.Module]] = {
    "noise": Noise,
    "path": Path,
    "in place": lambda: nn.Dropout(0.5, inplace=True),
    "channels": lambda: nn.Dropout1d(0.5, inplace=True),
    "leaky": nn.RReLU,
    "recurrent": Recurrent,
    "no statistics": lambda: nn.BatchNorm1d(5, track_running_stats=False),
    "statistics": lambda: nn.InstanceNorm1d(5, track_running_stats=True),
}


@pytest.mark.parametrize("name", PARTS)
def test_training_and_evaluation_are_those_of_the_model(name: str) -> None:
    torch.manual_seed(0)
    model, x = Odd(PARTS[name]()), torch.randn(6, 5, 8)
    layers = layers_for(model, {"x": x}, 2)
    for training in (True, False):
        found = []
        for modules in ([model], layers.modules):
            for module in modules:
                module.train(training)
            torch.manual_seed(1)
            found.append(model(x) if modules == [model] else through(layers, {"x": x})[0])
        assert torch.equal(*found), f"training={training}"
    assert "forward" not in vars(model.part)


def _bart() -> Any:
    hf = library()
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 16))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return hf.BartForConditionalGeneration(hf.BartConfig(vocab_size=50, d_model=8, max_position_embeddings=16, **sizes, **heads))


def _opt() -> Any:
    hf = library()
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "ffn_dim": 16, "num_attention_heads": 2, "word_embed_proj_dim": 8}
    return hf.OPTForCausalLM(hf.OPTConfig(vocab_size=50, max_position_embeddings=16, **sizes))


@pytest.mark.parametrize("build", [_bart, _opt])
def test_layers_that_are_never_dropped_do_not_cost_other_dropout(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that may drop layers have dropout of their own, which stays."""
    model, calls = build().train(), []
    ids = torch.randint(4, 50, (4, 6))
    layers = layers_for(model, {"input_ids": ids, "labels": ids}, 2)
    real = nn.functional.dropout

    def counted(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        calls.append(p if training else 0.0)
        return real(x, p, training, inplace)

    monkeypatch.setattr(nn.functional, "dropout", counted)
    model(input_ids=ids, labels=ids)
    pieces = [m.p for layer in layers.modules for m in layer.modules() if isinstance(m, nn.Dropout)]
    assert sorted(p for p in pieces if p) == sorted(p for p in calls if p)
    assert not any(isinstance(getattr(module, "layerdrop", None), Never) for module in model.modules())


def test_evaluation_of_a_model_that_drops_paths_is_certain() -> None:
    hf = library()
    sizes = {k: v for k, v in SIZES.items() if k not in ("vocab_size", "max_position_embeddings")}
    torch.manual_seed(0)
    model = hf.BeitForImageClassification(hf.BeitConfig(**sizes, image_size=32, patch_size=8, drop_path_rate=0.5))
    batch = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 1, 0, 1])}
    layers = layers_for(model, batch, 2)
    for module in (model, *layers.modules):
        module.eval()
    assert torch.equal(model(**batch).loss, through(layers, batch)[0])
