"""Encoder-decoders of text."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.batches import pairs
from tests.zoo.configured import tiny
from tests.zoo.family import Family, labels

KIND = "encoder-decoder"


def translator(name: str, config: str, *without: str, head: str = "ForConditionalGeneration", **more: Any) -> Family:
    return Family(name, KIND, partial(tiny, config, head, *without, **more), pairs, labels)


FAMILIES = (
    translator("t5", "T5"),
    translator("longt5", "LongT5", local_radius=3),
    translator("switch transformers", "SwitchTransformers", num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
    translator("bart", "Bart"),
    translator("mbart", "MBart"),
    translator("pegasus", "Pegasus"),
    translator("pegasus x", "PegasusX", block_size=4, num_global_tokens=2, stagger_local_blocks=False),
    translator("marian", "Marian", head="MTModel"),
    translator("blenderbot", "Blenderbot"),
    translator("m2m 100", "M2M100"),
    translator("led", "LED", attention_window=4, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64),
    translator(
        "prophetnet",
        "ProphetNet",
        "num_hidden_layers",
        num_decoder_layers=2,
        num_encoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
    ),
    translator("nllb moe", "NllbMoe", encoder_sparse_step=2, decoder_sparse_step=2),
)
