"""Models that a trace could take for something else: captured as they are, or refused with the true reason and its line."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright import MeshwrightError
from meshwright.capture.trace.export import flatten
from meshwright.runtime.stage.layers import Layers
from meshwright.train.setup.captured_layers import through
from tests.support.checked_asserts import answers, checked
from tests.support.layers_of_models import layers_for
from tests.support.tiny_models import SIZES, library

Inside = Callable[[Any, Tensor, Tensor], Tensor]


class Small(nn.Module):
    """Two layers and four experts, with something done between them."""

    def __init__(self, inside: Inside) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.layerdrop, self.rate, self.inside = 0.0, 0.0, inside

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        x = self.inside(self, torch.tanh(self.first(x)), labels)
        return (F.cross_entropy(self.last(x), labels),)


def batch(rows: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 8), "labels": torch.arange(rows) % 8}


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(model: nn.Module, given: dict[str, Tensor], stages: int = 2) -> None:
    """Loss and gradients of the captured layers are those of the model, in training; so is the loss in evaluation."""
    layers = layers_for(model, given, stages)
    for training in (True, False):
        for module in (model, *layers.modules):
            module.train(training)
        torch.manual_seed(1)
        output = model(**given)
        torch.manual_seed(1)
        wanted, found = output[0] if isinstance(output, tuple) else output.loss, through(layers, given)[0]
        assert torch.equal(wanted, found), f"training={training}"
        theirs, ours = _gradients(model, wanted), _gradients(model, found)
        assert theirs.keys() == ours.keys() and all(torch.equal(theirs[n], ours[n]) for n in theirs)


def _draws(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    for expert in model.experts:
        drawn = torch.rand([])
        skip = bool(model.training and drawn < model.rate)
        x = x if skip or torch.rand(1) >= 1.0 else torch.tanh(expert(x))
    return x


def _python_rates(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    for expert in model.experts:
        if random.uniform(0, 1) < model.layerdrop:
            continue
        if not model.training or np.random.random() > model.layerdrop:
            x = torch.tanh(expert(x))
    return x


def _seeded(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    np.random.seed(3)
    return x[:, torch.from_numpy(np.random.permutation(8))]


def _cast(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    model.experts[0] = model.experts[0].to(torch.float32)
    return model.experts[0].float()(x)


def _distribution(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    return x * -torch.distributions.Normal(x, F.softplus(model.experts[0](x))).log_prob(x.detach())


CAPTURED: dict[str, Inside] = {
    "checks that raise": checked,
    "draws at a rate of zero": _draws,
    "Python's draws at a rate of zero": _python_rates,
    "seeded in forward": _seeded,
    "cast to what it is": _cast,
    "distribution": _distribution,
}


def _world() -> tuple[Any, ...]:
    """What a trace has its hands on."""
    functions = torch.rand, torch.ctc_loss, Tensor.__bool__, Tensor.__lt__, nn.Module.to, random.seed, np.random.seed
    return random.getstate(), str(np.random.get_state()), functions


@pytest.mark.parametrize("name", CAPTURED)
def test_what_only_looks_undecidable_is_captured(name: str) -> None:
    torch.manual_seed(0)
    model, before = Small(CAPTURED[name]), _world()
    flatten(model, batch())
    assert _world() == before, "all is as it was"
    same(model, batch())


def _branch(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    if x.sum() > 0:
        x = -x
    return x


def _caught(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    try:
        if x.sum() > 0:
            raise ValueError
    except ValueError:
        x = -x
    return x


def _item(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    return x * 2 if labels.sum().item() > 3 else x


def _dropped(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    return x if torch.rand([]) < 0.1 else 2 * x


def _numpy(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    return x * float(x.detach().numpy().mean())


def _packed(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    lengths = 1 + labels % 3
    packed = nn.utils.rnn.pack_padded_sequence(x[:, None].expand(-1, 3, -1), lengths, batch_first=True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(model.rnn(packed)[0], batch_first=True)[0][:, 0]


def _experts(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    for expert in labels.unique():
        x = x + model.experts[expert % 4](x)
    return x


def _mapped(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    return torch.func.vmap(model.experts[0])(x)


def _formatted(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    return x + len(f"{x.mean().item():.1f}")


def _other_dtype(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    return model.experts[0].to(torch.float64)(x.double()).float()


def _python_random(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    return x * random.random()


def _numpy_random(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    np.random.seed()
    return x * np.random.rand()


def _fails(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    return x + torch.ones(3)


HERE = r"(.|\n)*at .*test_refusal_reasons.py:\d+, in {}: {}"
VALUE = "its forward reads the value of a tensor"
REFUSED: dict[str, tuple[Inside, str]] = {
    "branch": (_branch, VALUE + HERE.format("_branch", "if x.sum") + r"(.|\n)*torch says: GuardOnDataDependent"),
    "raise that is caught": (_caught, VALUE + HERE.format("_caught", "if x.sum")),
    "item": (_item, VALUE + HERE.format("_item", "return x")),
    "layer dropped": (_dropped, VALUE + HERE.format("_dropped", "return x")),
    "numpy": (_numpy, "its forward turns a tensor into a numpy array" + HERE.format("_numpy", "return x")),
    "packed": (_packed, r"packs sequences by their lengths \(pack_padded_sequence\)(.|\n)*in the module 'rnn', LSTM"),
    "experts": (_experts, "sends tokens to experts in a Python loop" + HERE.format("_experts", "for expert in")),
    "vmap": (_mapped, r"a transform of torch.func \(vmap, jvp\)(.|\n)*at .*test_refusal_reasons.py:\d+"),
    "formatted": (_formatted, "takes a number out of a tensor" + HERE.format("_formatted", "return x")),
    "other dtype": (_other_dtype, "changes 'experts.0.weight' from torch.float32 to torch.float64 at .*test_refusal_reasons.py"),
    "random": (_python_random, "draws from random in Small, which a captured graph freezes"),
    "numpy.random": (_numpy_random, "draws from numpy.random in Small, which a captured graph freezes"),
    "fails": (_fails, "the model itself fails on this batch, before any capture: RuntimeError: The size of tensor a"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_reasons_are_true_and_in_words(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    inside, why = REFUSED[name]
    with pytest.raises(MeshwrightError, match=why) as found:
        flatten(Small(inside), batch())
    assert "u0" not in str(found.value).splitlines()[0]
    assert capfd.readouterr() == ("", "")


class Optional(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.sum() > 0:
            x = x + 1
        return x.square()


class Argued(nn.Module):
    """Fails in a function of its own, not for want of a column."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        def inner(a: Tensor, b: Tensor) -> Tensor:
            return a + b

        return inner(x)  # type: ignore[call-arg]


def test_a_column_is_named_only_where_it_is_the_reason() -> None:
    with pytest.raises(MeshwrightError, match="reads the value of a tensor"):
        flatten(Optional(), {"x": torch.ones(4, 2)})
    with pytest.raises(MeshwrightError, match=r"the model itself fails on this batch(.|\n)*inner"):
        flatten(Argued(), {"x": torch.ones(4, 2)})


def test_a_model_is_run_without_a_trace_of_it() -> None:
    """Buffers and random numbers are as they were, though the model ran by itself to find the reason."""
    model = Small(lambda model, x, labels: _branch(model, F.dropout(model.norm(x)), labels))
    model.norm = nn.BatchNorm1d(8)
    given, before = batch(), torch.get_rng_state()
    with pytest.raises(MeshwrightError, match=VALUE):
        flatten(model, given)
    assert not model.norm.running_mean.any() and not model.norm.num_batches_tracked  # type: ignore[union-attr,operator]
    assert torch.equal(before, torch.get_rng_state())


def test_which_side_of_a_branch_raises() -> None:
    found = answers()
    assert found[:7] == [False, False, True, True, False, False, True], "one side only raises"
    assert found[7:] == [None] * 4, "neither side, or somebody catches it"


CONVOLVED = {
    **{k: v for k, v in SIZES.items() if k != "max_position_embeddings"},
    "conv_dim": [8, 8],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 5],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    **{f"{part}_dropout": 0.0 for part in ("hidden", "attention", "activation", "feat_proj", "final")},
}
"""No dropout: the numbers that ask whether a layer is dropped are not drawn by captured layers."""


def test_ctc_families_are_captured() -> None:
    hf = library()
    torch.manual_seed(0)
    model = hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**CONVOLVED, mask_time_prob=0.0, ctc_loss_reduction="mean"))
    labels = torch.randint(1, 8, (4, 3))
    labels[1, 2] = -100
    same(model, {"input_values": torch.randn(4, 200), "labels": labels})


def test_masks_of_numpy_are_refused() -> None:
    hf = library()
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1), ("attention_heads", 2))}
    positions = {"max_source_positions": 8, "max_target_positions": 8, "num_mel_bins": 4}
    masks = {"apply_spec_augment": True, "mask_time_prob": 0.5, "mask_time_length": 2}
    tokens = {"vocab_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = hf.WhisperConfig(d_model=8, **sizes, **positions, **masks, **tokens)
    given = {"input_features": torch.randn(4, 4, 16), "labels": torch.randint(3, 16, (4, 5))}
    with pytest.raises(MeshwrightError, match=r"draws from numpy.random in model(.|\n)*apply_spec_augment = False"):
        flatten(hf.WhisperForConditionalGeneration(config), given)


def test_experts_of_transformers_are_told_what_to_do() -> None:
    hf = library()
    config = hf.MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1, num_key_value_heads=2)
    model = hf.MixtralForCausalLM._from_config(config, experts_implementation="eager")
    ids = torch.randint(4, 16, (2, 5))
    with pytest.raises(MeshwrightError, match=r'experts in a Python loop(.|\n)*set_experts_implementation\("grouped_mm"\)'):
        flatten(model, {"input_ids": ids, "labels": ids})


def equal_in_both_modes(model: nn.Module, layers: Layers, given: dict[str, Tensor]) -> None:
    for training in (True, False):
        for module in (model, *layers.modules):
            module.train(training)
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(through(layers, given)[0], model(**given), rtol=1e-6, atol=0)


class Padded(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8) if norm else None)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        found: Tensor = self.last(self.encoder(x, src_key_padding_mask=padded)).square().mean()
        return found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("at_the_end", [True, False])
def test_padded_places_of_an_encoder_are_those_of_evaluation(norm: bool, at_the_end: bool) -> None:
    """In evaluation torch packs rows, and what it padded is 0."""
    torch.manual_seed(0)
    model = Padded(norm)
    padded = torch.arange(5)[None] >= torch.tensor([5, 3, 2, 4])[:, None]
    given = {"x": torch.randn(4, 5, 8), "padded": padded if at_the_end else padded.flip(1)}
    layers = layers_for(model, given, 2)
    equal_in_both_modes(model, layers, given)
    assert "forward" not in vars(model.encoder) and (model.encoder.norm is not None) == norm


class Masked(nn.Module):
    """Masks that torch looks at, to see whether they are causal."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.alone = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor, window: Tensor) -> Tensor:
        causal = self.body.generate_square_subsequent_mask(y.shape[1])
        found = self.alone(self.body(x, y, tgt_mask=causal), mask=window[0])
        loss: Tensor = self.last(found).square().mean()
        return loss


def test_masks_of_torch_transformers_are_used_as_they_are() -> None:
    torch.manual_seed(0)
    model = Masked()
    window = (torch.arange(5)[:, None] - torch.arange(5)[None]).abs() > 1
    given = {"x": torch.randn(4, 6, 8), "y": torch.randn(4, 5, 8), "window": window.expand(4, 5, 5)}
    layers = layers_for(model, given, 3)
    equal_in_both_modes(model, layers, given)
    assert not any("forward" in vars(m) for m in model.modules())
