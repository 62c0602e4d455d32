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
    mixture("qwen2 moe", "Qwen2Moe", decoder_sparse_step=1),
    mixture("qwen3 moe", "Qwen3Moe", decoder_sparse_step=1),
    mixture("olmoe", "Olmoe"),
    mixture("deepseek v2", "DeepseekV2", num_experts_per_tok=2, first_k_dense_replace=1, head_dim=8, num_key_value_heads=4),
    mixture("deepseek v3", "DeepseekV3", first_k_dense_replace=1, head_dim=8, num_key_value_heads=4),
    mixture("dots1", "Dots1", n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1),
    mixture("ernie4.5 moe", "Ernie4_5_Moe", moe_num_experts=4, moe_layer_start_index=0),
    mixture("glm4 moe", "Glm4Moe", first_k_dense_replace=1),
    mixture("gpt oss", "GptOss"),
    mixture("granite moe", "GraniteMoe"),
    mixture("jetmoe", "JetMoe"),
    mixture("hunyuan moe", "HunYuanMoEV1", head_dim=8, moe_topk=[2, 2]),
    mixture("phimoe", "Phimoe"),
    mixture("flex olmo", "FlexOlmo"),
    mixture("llama4 text", "Llama4", config_name="Llama4Text", intermediate_size_mlp=48, attention_chunk_size=8),
    mixture("lfm2 moe", "Lfm2Moe", layer_types=["conv", "full_attention"], num_dense_layers=1),
    mixture(
        "longcat flash",
        "LongcatFlash",
        expert_ffn_hidden_size=16,
        zero_expert_num=2,
        num_layers=2,
        head_dim=8,
        num_key_value_heads=4,
    ),
    mixture(
        "dbrx",
        "Dbrx",
        attn_config={"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    ),
)
