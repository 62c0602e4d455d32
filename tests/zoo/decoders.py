"""Decoders of text: each token predicts the next one."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.zoo.batches import packed, sentences
from tests.zoo.configured import tiny
from tests.zoo.family import Batch, Family, labels, next_labels, rows, text

KIND = "decoder"


def decoder(
    name: str, config: str, *without: str, head: str = "ForCausalLM", batch: Any = text, dtype: Any = None, **more: Any
) -> Family:
    return Family(name, KIND, partial(tiny, config, head, *without, **more), batch, next_labels, dtype=dtype)


def left(rows: int, length: int, seed: int) -> Batch:
    return text(rows, length, seed, left=True)


FAMILIES = (
    decoder("gpt2", "GPT2", head="LMHeadModel"),
    decoder(
        "gpt neo",
        "GPTNeo",
        "num_layers",
        dtype=torch.float32,
        attention_types=[[["global", "local"], 1]],
        num_layers=2,
        window_size=4,
    ),
    decoder("gpt-j", "GPTJ", dtype=torch.float32, rotary_dim=4),
    decoder("gpt neox", "GPTNeoX"),
    decoder("bloom", "Bloom"),
    decoder("opt", "OPT", word_embed_proj_dim=32),
    decoder("falcon", "Falcon", "head_dim"),
    decoder("mpt", "Mpt", "hidden_dim", expansion_ratio=2),
    decoder("llama", "Llama"),
    decoder("llama tied, padded left", "Llama", tie_word_embeddings=True, batch=left),
    decoder("llama scaled rotary", "Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
    decoder("llama packed", "Llama", batch=packed),
    decoder("mistral", "Mistral"),
    decoder("qwen2", "Qwen2"),
    decoder("qwen3", "Qwen3", tie_word_embeddings=True),
    decoder("gemma2", "Gemma2", query_pre_attn_scalar=8),
    decoder(
        "gemma3", "Gemma3", config_name="Gemma3Text", query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"]
    ),
    decoder("phi3", "Phi3"),
    decoder("olmo2", "Olmo2"),
    decoder("cohere2", "Cohere2"),
    decoder("glm4", "Glm4"),
    Family("gpt2 texts", KIND, partial(tiny, "GPT2", "ForSequenceClassification"), sentences, rows),
    Family("bart decoder", KIND, partial(tiny, "Bart", "ForCausalLM"), text, labels),
    Family("xlnet", KIND, partial(tiny, "XLNet", "LMHeadModel", "max_position_embeddings", d_inner=48), text, labels),
    Family(
        "reformer",
        KIND,
        partial(
            tiny,
            "Reformer",
            "ModelWithLMHead",
            "num_hidden_layers",
            is_decoder=True,
            attn_layers=["local", "local"],
            axial_pos_embds=False,
            local_attn_chunk_length=4,
            attention_head_size=8,
            feed_forward_size=48,
        ),
        text,
        next_labels,
        sizes=((5, 12), (3, 8)),
    ),
)
