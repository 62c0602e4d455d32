"""Generation honours a mask and forced tokens as `model.generate` does, or says that it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import meshwright as mw
from meshwright import MeshwrightError
from tests.support.trainers import gpt2, ours, text

PROMPT = torch.tensor([[5, 6, 7, 8], [9, 3, 2, 4]])
LEFT = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
RIGHT = LEFT.flip(1)


def session(model: Any, **columns: Tensor) -> mw.Session:
    model.eval()
    return mw.parallelize(model, {name: t.long().contiguous() for name, t in columns.items()}, {"pp": 1})


def bart(**more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, vocab_size=40, max_position_embeddings=32, dropout=0.0, **more,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def test_a_causal_model_without_the_column_does_not_see_padding() -> None:
    model = gpt2()
    with session(model, input_ids=PROMPT, labels=PROMPT) as run:
        found = run.generate(PROMPT, max_new_tokens=4, attention_mask=LEFT)
    wanted = model.eval().generate(PROMPT, attention_mask=LEFT, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(found, wanted)


def test_a_model_that_looks_ahead_needs_the_column() -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=40, is_decoder=False
    )
    model = transformers.BertForMaskedLM(config)
    with session(model, input_ids=PROMPT, labels=PROMPT) as run:
        run.generate(PROMPT, max_new_tokens=2)
        with pytest.raises(MeshwrightError, match="captured without 'attention_mask', reads the padding after the last token"):
            run.generate(PROMPT, max_new_tokens=2, attention_mask=RIGHT)


def test_an_encoder_without_the_column_refuses_padding() -> None:
    with session(bart(), input_ids=PROMPT, labels=PROMPT[:, 1:]) as run:
        run.generate(PROMPT, max_new_tokens=2, decoder_start_token_id=2)
        with pytest.raises(MeshwrightError, match="captured without 'attention_mask': it would read the padding"):
            run.generate(PROMPT, max_new_tokens=2, decoder_start_token_id=2, attention_mask=RIGHT)


@pytest.mark.parametrize(
    "tokens", [{}, {"forced_eos_token_id": 2}, {"forced_bos_token_id": 7, "forced_eos_token_id": 2}], ids=str
)
def test_forced_tokens_are_those_of_generate(tokens: dict[str, int]) -> None:
    model = bart(forced_eos_token_id=None)
    for name, value in {"forced_eos_token_id": None, **tokens}.items():
        setattr(model.generation_config, name, value)
    with session(model, input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), labels=PROMPT[:, 1:]) as run:
        found = run.generate(
            PROMPT, max_new_tokens=4, decoder_start_token_id=2, eos_token_id=2, pad_token_id=1, attention_mask=RIGHT
        )
        again = run.generate(PROMPT, max_new_tokens=4, eos_token_id=(), forced_eos_token_id=11, attention_mask=RIGHT)
    wanted = model.eval().generate(
        PROMPT, attention_mask=RIGHT, max_new_tokens=4, do_sample=False, num_beams=1, decoder_start_token_id=2, eos_token_id=2
    )
    assert torch.equal(found, wanted)
    assert (again[:, -1] == 11).all(), "what is given wins"


def test_tokens_that_end_rows_are_those_of_the_model() -> None:
    """What stands in generation_config is what `model.generate` takes: an end, padding, a start of the decoder."""
    model = gpt2().eval()
    free = model.generate(PROMPT, max_new_tokens=6, do_sample=False, eos_token_id=39, pad_token_id=0)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = [int(free[0, PROMPT.shape[1] + 2]), 38], 37
    wanted = model.generate(PROMPT, max_new_tokens=6, do_sample=False)
    with session(model, input_ids=PROMPT, labels=PROMPT) as run:
        assert torch.equal(run.generate(PROMPT, max_new_tokens=6), wanted)
        assert run.generate(PROMPT, max_new_tokens=6, eos_token_id=()).shape == (len(PROMPT), PROMPT.shape[1] + 6)
    assert (wanted[0, PROMPT.shape[1] + 3 :] == 37).all() or wanted.shape[1] < free.shape[1], "the first row ends early"
    pair = bart(forced_eos_token_id=None).eval()
    pair.generation_config.forced_eos_token_id = None
    with session(pair, input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), labels=PROMPT[:, 1:]) as run:
        found = run.generate(PROMPT, max_new_tokens=4)
    assert torch.equal(found, pair.generate(PROMPT, max_new_tokens=4, do_sample=False, num_beams=1))


def test_what_is_not_greedy_is_refused_by_name() -> None:
    model = bart()
    model.generation_config.num_beams = 4
    words = "generation_config has num_beams=4, but only plain greedy generation"
    with session(model, input_ids=PROMPT, labels=PROMPT) as run, pytest.raises(MeshwrightError, match=words):
        run.generate(PROMPT, max_new_tokens=2, decoder_start_token_id=2)


def test_checkpointing_of_the_model_itself_points_to_the_argument(tmp_path: Path) -> None:
    model = gpt2()
    model.gradient_checkpointing_enable()
    with pytest.raises(MeshwrightError, match=r"(?s)cannot be sent to local workers.*gradient_checkpointing=True"):
        ours(model, tmp_path, text(), parallel={"pp": 2}).train()


@pytest.mark.parametrize("option", ["do_sample", "num_beams", "repetition_penalty"])
def test_other_ways_of_continuing_are_refused(option: str) -> None:
    with (
        session(gpt2(), input_ids=PROMPT, labels=PROMPT) as run,
        pytest.raises(MeshwrightError, match=f"has no option '{option}'"),
    ):
        run.generate(PROMPT, max_new_tokens=2, **{option: 2})


class _Prompted(torch.nn.Module):
    """Puts two learned positions before every row, as prompt tuning does."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = torch.nn.Parameter(torch.randn(2, 16))
        self.table, self.head = torch.nn.Embedding(40, 16), torch.nn.Linear(16, 40)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([self.prompt.expand(input_ids.shape[0], -1, -1), self.table(input_ids)], dim=1)
        scores = self.head(torch.tanh(x).cumsum(1))
        return torch.nn.functional.cross_entropy(scores[:, 2:].flatten(0, 1), labels.flatten()), scores


def test_positions_that_a_model_adds_are_refused() -> None:
    with (
        session(_Prompted(), input_ids=PROMPT, labels=PROMPT) as run,
        pytest.raises(MeshwrightError, match="scores for 6 positions, but a row has 4 tokens"),
    ):
        run.generate(PROMPT, max_new_tokens=2)
