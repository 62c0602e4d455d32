"""Mixtures of experts: routers with and without jitter, shared experts, losses of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.configured import tiny
from tests.zoo.family import Family, next_labels, text

KIND = "experts"


def mixture(name: str, config: str, *without: str, **more: Any) -> Family:
    return Family(name, KIND, partial(tiny, config, "ForCausalLM", *without, **more), text, next_labels)


FAMILIES = (
    mixture("mixtral", "Mixtral"),
    mixture("mixtral jitter", "Mixtral", router_jitter_noise=0.1),
    mixture("mixtral router loss", "Mixtral", output_router_logits=True, router_aux_loss_coef=0.02),
    mixture("mixtral eager experts", "Mixtral", experts_implementation="eager"),
    mixture("qwen3 moe", "Qwen3Moe", decoder_sparse_step=1),
    mixture("olmoe", "Olmoe"),
    mixture("deepseek v2", "DeepseekV2", num_experts_per_tok=2, first_k_dense_replace=1, head_dim=8, num_key_value_heads=4),
    mixture("deepseek v3", "DeepseekV3", first_k_dense_replace=1, head_dim=8, num_key_value_heads=4),
    mixture("glm4 moe", "Glm4Moe", first_k_dense_replace=1),
    mixture("gpt oss", "GptOss"),
    mixture("jetmoe", "JetMoe"),
    mixture("phimoe", "Phimoe"),
    mixture("llama4 text", "Llama4", config_name="Llama4Text", intermediate_size_mlp=48, attention_chunk_size=8),
    mixture(
        "dbrx",
        "Dbrx",
        attn_config={"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    ),
)
