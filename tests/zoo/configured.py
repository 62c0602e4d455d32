"""Small models from the configurations of transformers: nothing is fetched.

`tiny("Llama", "ForCausalLM")` takes the family's own defaults and makes its sizes small: whatever of the table below its
configuration has. So dropout, ties, windows and routers are what a user of the family has.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embed_dim": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "d_ff": 48,
    "n_inner": 48,
    "hidden_dim": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "ffn_hidden_size": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "kv_channels": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "max_seq_len": 64,
    "max_seq_length": 64,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "sliding_window": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
"""Sizes that are small, where a configuration has them; layers are never dropped at random."""


@cache
def library() -> Any:
    """transformers, without its remarks."""
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def config(name: str, *without: str, **more: Any) -> Any:
    """The configuration of a family by its class name, small; `without` names what stays as it is."""
    kind = getattr(library(), f"{name}Config")
    default = kind()
    aliases = getattr(kind, "attribute_map", {})
    fixed = {k for k in SMALL if isinstance(found := getattr(kind, k, None), property) and found.fset is None}
    sizes = {k: v for k, v in SMALL.items() if k not in {*without, *aliases, *fixed} and _has(default, k)}
    if getattr(default, "is_encoder_decoder", False):
        sizes["decoder_start_token_id"] = 1
    return kind(**{**sizes, **more})


def _has(default: Any, name: str) -> bool:
    """Does a configuration have a size of its own by this name?"""
    value = getattr(default, name, None)
    return value is not None or (name.endswith("_token_id") and hasattr(default, name)) or name == "num_labels"


def tiny(name: str, head: str, *without: str, config_name: str | None = None, **more: Any) -> nn.Module:
    """A model of a family, with the attention that its users get unless it is named."""
    attention = {k: more.pop(k) for k in ("attn_implementation", "experts_implementation") if k in more}
    return getattr(library(), f"{name}{head}")._from_config(config(config_name or name, *without, **more), **attention)
