"""Small models of known families, from their configurations: nothing is fetched."""

from __future__ import annotations

from functools import cache
from typing import Any

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}


@cache
def library() -> Any:
    """transformers, without its remarks on small vocabularies."""
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def gpt2() -> Any:
    hf = library()
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=101, n_positions=64))


def llama(**more: Any) -> Any:
    hf = library()
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2, **more))


def tied_llama() -> Any:
    return llama(tie_word_embeddings=True)


def bert() -> Any:
    hf = library()
    return hf.BertForMaskedLM(hf.BertConfig(**SIZES))


def t5() -> Any:
    hf = library()
    config = hf.T5Config(num_layers=2, d_model=32, d_ff=64, num_heads=4, d_kv=8, vocab_size=101, decoder_start_token_id=0)
    return hf.T5ForConditionalGeneration(config)


def vit() -> Any:
    hf = library()
    sizes = {k: v for k, v in SIZES.items() if k not in ("vocab_size", "max_position_embeddings")}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=32, patch_size=8))


def mixtral() -> Any:
    hf = library()
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4))


def neox() -> Any:
    hf = library()
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES))


def convnext() -> Any:
    hf = library()
    return hf.ConvNextForImageClassification(
        hf.ConvNextConfig(hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], drop_path_rate=0.1)
    )


def swin() -> Any:
    hf = library()
    config = hf.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
    return hf.SwinForImageClassification(config)


def whisper() -> Any:
    hf = library()
    one = {"layers": 2, "ffn_dim": 64, "attention_heads": 4}
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in one.items()}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(vocab_size=101, d_model=32, pad_token_id=0, **sides))


def mamba() -> Any:
    hf = library()
    return hf.MambaForCausalLM(hf.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=101))


def half_llama() -> Any:
    import torch

    hf = library()
    return hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**SIZES), dtype=torch.bfloat16)


FAMILIES = (gpt2, llama, tied_llama, bert, t5, vit, mixtral)
UNNAMED = (neox, convnext, swin, whisper, mamba, half_llama)
"""Families that no part of the package has been tried with in particular."""
