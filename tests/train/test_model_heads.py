"""Configurations without `architectures` or without a start token are built as what they are, or refused with what to add."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.train.models.model_heads import default_head, give_start_token
from meshwright.train.models.model_names import resolve_model
from meshwright.train.models.named_layers import named_model

pytest.importorskip("transformers")

T5 = {"model_type": "t5", "vocab_size": 31, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
BART = {"model_type": "bart", "vocab_size": 31, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1,
        "max_position_embeddings": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}  # fmt: skip
MIXTRAL = {"model_type": "mixtral", "vocab_size": 31, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
           "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2, "max_position_embeddings": 16}  # fmt: skip
GPU = mw.Cluster(devices=(mw.Device("a100", 80e9, {"fp32": 17e12}, 1.7e12),))


def built(folder: Path, config: dict[str, Any]) -> torch.nn.Module:
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = resolve_model(str(folder / "config.json")).build()
    assert isinstance(model, torch.nn.Module)
    return model


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (T5, "T5ForConditionalGeneration"),
        (BART, "BartForConditionalGeneration"),
        ({**BART, "is_encoder_decoder": False, "is_decoder": True}, "BartForCausalLM"),
        (MIXTRAL, "MixtralForCausalLM"),
        ({**T5, "architectures": ["T5EncoderModel"]}, "T5EncoderModel"),
    ],
)
def test_the_class_of_a_configuration(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    assert type(built(tmp_path, config)).__name__ == name


def test_a_class_that_is_not_known_is_named() -> None:
    with pytest.raises(
        mw.MeshwrightError, match="no architectures, and a model of type 'vit' is no causal language model"
    ) as caught:
        default_head(SimpleNamespace(model_type="vit", is_encoder_decoder=False))
    assert caught.value.fix == '"architectures": ["ViTForImageClassification"] in the configuration'
    with pytest.raises(mw.MeshwrightError, match="'own' has an encoder and a decoder") as caught:
        default_head(SimpleNamespace(model_type="own", is_encoder_decoder=True))
    assert caught.value.fix is not None and "the name of a model class of transformers" in caught.value.fix


def test_a_decoder_begins_with_the_padding(tmp_path: Path) -> None:
    """A configuration of T5 from transformers 5 has no start token, and its loss cannot be computed without one."""
    model: Any = built(tmp_path, {**T5, "architectures": ["T5ForConditionalGeneration"]})
    assert model.config.decoder_start_token_id == model.config.pad_token_id == 0
    assert built(tmp_path, {**T5, "decoder_start_token_id": 3}).config.decoder_start_token_id == 3
    model, example = named_model(str(tmp_path / "config.json"), length=8)
    assert len(mw.profile_model(model, example, rows=(1, 2), cluster=GPU).layers) > 2
    with pytest.raises(mw.MeshwrightError, match="with which token the decoder begins") as caught:
        give_start_token(SimpleNamespace(is_encoder_decoder=True, pad_token_id=None))
    assert caught.value.fix == '"decoder_start_token_id": 0 in the configuration'


def test_experts_that_values_choose_cannot_be_profiled(tmp_path: Path) -> None:
    built(tmp_path, MIXTRAL)
    model, example = named_model(str(tmp_path / "config.json"), length=8)
    with pytest.raises(mw.MeshwrightError, match=r"needs values .* whose values decide which experts run") as caught:
        mw.profile_model(model, example, rows=(1, 2), cluster=GPU)
    assert caught.value.fix is not None and caught.value.fix.endswith("meshwright measure MODEL --dataset stdlib --pp 2")
