"""State-space models, recurrent models and their mixtures with attention; batches are padded."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.configured import tiny
from tests.zoo.family import Family, next_labels, only, text

STATE, RECURRENT = "state-space", "recurrent"


def unmasked(rows: int, length: int, seed: int) -> Any:
    return only(text(rows, length, seed), "input_ids", "labels")


def scan(name: str, config: str, *without: str, kind: str = STATE, batch: Any = text, **more: Any) -> Family:
    return Family(name, kind, partial(tiny, config, "ForCausalLM", *without, **more), batch, next_labels)


SMALL = {"state_size": 4, "mamba_d_state": 4, "mamba_expand": 1, "mamba_dt_rank": 2}

FAMILIES = (
    scan("mamba", "Mamba", state_size=4, time_step_rank=2, expand=1),
    scan("mamba2", "Mamba2", head_dim=8, num_heads=4, expand=1, n_groups=1, state_size=4, chunk_size=4),
    scan(
        "jamba",
        "Jamba",
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=4,
        mamba_dt_rank=2,
        mamba_expand=1,
        use_mamba_kernels=False,
    ),
    scan(
        "zamba2",
        "Zamba2",
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "mamba"],
        mamba_d_state=4,
        mamba_headdim=8,
        n_mamba_heads=4,
        mamba_expand=1,
        mamba_ngroups=1,
        chunk_size=4,
        num_mem_blocks=1,
        hybrid_layer_ids=[1],
        use_mem_eff_path=False,
    ),
    scan(
        "nemotron h",
        "NemotronH",
        "head_dim",
        hybrid_override_pattern="M*-",
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=4,
        chunk_size=4,
        n_groups=1,
    ),
    scan("lfm2", "Lfm2", layer_types=["conv", "full_attention"], block_multiple_of=8, kind=RECURRENT),
    scan("rwkv", "Rwkv", kind=RECURRENT, context_length=64, attention_hidden_size=32, batch=unmasked),
    scan("xlstm", "xLSTM", kind=RECURRENT, num_blocks=2, num_heads=2, chunk_size=4, embedding_dim=32),
    scan(
        "recurrent gemma",
        "RecurrentGemma",
        kind=RECURRENT,
        block_types=["recurrent", "attention"],
        lru_width=32,
        attention_window_size=4,
        conv1d_width=4,
    ),
    scan(
        "qwen3 next",
        "Qwen3Next",
        kind=RECURRENT,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    scan("minimax", "MiniMax", kind=RECURRENT, layer_types=["linear_attention", "full_attention"], block_size=4),
)
