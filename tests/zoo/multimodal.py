"""Pictures and text, sound and text: the tokens of a picture stand in the text."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.batches import noise
from tests.zoo.configured import config, library, tiny
from tests.zoo.family import IGNORED, Batch, Family, labels, next_labels, only, rows, text

KIND = "multimodal"
TEXT: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 32,
}
IMAGE = 3


def shown(rows: int, length: int, seed: int, *, tokens: int = 4, images: int = 1, size: int = 16, image: int = IMAGE) -> Batch:
    """A text that begins with the tokens of its pictures."""
    given = text(rows, length + tokens * images, seed)
    ids, wanted, mask = given["input_ids"], given["labels"], given["attention_mask"]
    ids[:, : tokens * images], wanted[:, : tokens * images], mask[:, : tokens * images] = image, IGNORED, 1
    return {**given, "pixel_values": noise(seed, rows * images, 3, size, size)}


def typed(rows: int, length: int, seed: int) -> Batch:
    """The same with the kind of each token: the picture and what is asked see each other."""
    given = shown(rows, length, seed)
    kinds = torch.zeros_like(given["input_ids"])
    kinds[:, 6:] = 1
    return {**given, "token_type_ids": kinds}


def nested(name: str, head: str, sides: dict[str, dict[str, Any]], *without: str, **more: Any) -> nn.Module:
    """A model whose configuration is made of others."""
    hf = library()
    given = getattr(hf, f"{name}Config")(**sides, **more)
    return getattr(hf, f"{name}{head}")._from_config(given)


def speaker(
    name: str,
    config: str,
    *,
    batch: Any = shown,
    head: str = "ForConditionalGeneration",
    vision: Any = None,
    words: Any = None,
    **more: Any,
) -> Family:
    sides = {"text_config": {**TEXT, **(words or {})}, "vision_config": {**VISION, **(vision or {})}}
    return Family(name, KIND, partial(nested, config, head, sides, **more), batch, next_labels)


TWO = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def contrast(rows: int, length: int, seed: int) -> Batch:
    """Rows that are compared with each other: the loss of CLIP and its kin."""
    given = text(rows, length, seed)
    given["input_ids"][:, -1] = 2
    return only(given, "input_ids", "attention_mask", pixel_values=noise(seed, rows, 3, 16, 16))


class Contrast(nn.Module):
    """Two towers and their loss, which compares the rows of a batch with each other."""

    def __init__(self, name: str, vision: dict[str, Any], words: dict[str, Any]) -> None:
        super().__init__()
        hf = library()
        self.towers = getattr(hf, f"{name}Model")(getattr(hf, f"{name}Config")(text_config=words, vision_config=vision))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> Any:
        return self.towers(input_ids=input_ids, attention_mask=attention_mask, pixel_values=pixel_values, return_loss=True)


def questions(rows: int, length: int, seed: int) -> Batch:
    """A picture, a question, and scores of its answers."""
    given = text(rows, length, seed)
    wanted = torch.rand(rows, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {
        "input_ids": given["input_ids"],
        "attention_mask": given["attention_mask"],
        "pixel_values": noise(seed, rows, 3, 16, 16),
        "labels": wanted,
    }


def pages(rows: int, length: int, seed: int) -> Batch:
    """Words and where they stand on a page."""
    given = text(rows, length, seed)
    random = torch.Generator().manual_seed(seed)
    corner = torch.randint(0, 30, (rows, length, 2), generator=random)
    return {**given, "bbox": torch.cat([corner, corner + 9], -1), "labels": given["labels"].clamp(max=4)}


def captions(rows: int, length: int, seed: int) -> Batch:
    given = text(rows, length, seed)
    return {"pixel_values": noise(seed, rows, 3, 16, 16), "labels": given["labels"]}


def captioner() -> nn.Module:
    """Any encoder of pictures with any decoder."""
    hf = library()
    decoder = config("GPT2", add_cross_attention=True, is_decoder=True)
    given = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(config("ViT"), decoder)
    given.decoder_start_token_id, given.pad_token_id = 1, 0
    return hf.VisionEncoderDecoderModel(config=given)


def framed(rows: int, length: int, seed: int) -> Batch:
    """Two pictures for each row, in a dimension of their own."""
    given = shown(rows, length, seed, tokens=1, images=2)
    return {**given, "pixel_values": given["pixel_values"].unflatten(0, (rows, 2))}


def qwen(rows: int, length: int, seed: int) -> Batch:
    """Patches of all pictures one after another: another number of rows than the text has."""
    given = text(rows, length + 4, seed)
    ids, wanted, mask = given["input_ids"], given["labels"], given["attention_mask"]
    ids[:, :4], wanted[:, :4], mask[:, :4] = IMAGE, IGNORED, 1
    grid = torch.tensor([[1, 4, 4]] * rows)
    given["mm_token_type_ids"] = (ids == IMAGE).long()
    return {**given, "pixel_values": noise(seed, rows * 16, 3 * 2 * 4 * 4), "image_grid_thw": grid}


def audio_text(rows: int, length: int, seed: int) -> Batch:
    given = text(rows, length + 4, seed)
    ids, wanted, mask = given["input_ids"], given["labels"], given["attention_mask"]
    ids[:, :4], wanted[:, :4], mask[:, :4] = IMAGE, IGNORED, 1
    heard = torch.ones(rows, 16, dtype=torch.long)
    return {**given, "input_features": noise(seed, rows, 16, 16), "feature_attention_mask": heard}


FAMILIES = (
    speaker("llava", "Llava", image_token_index=IMAGE, image_token_id=IMAGE),
    speaker("llava, two pictures a row", "Llava", batch=partial(shown, images=2), image_token_index=IMAGE, image_token_id=IMAGE),
    speaker("vip llava", "VipLlava", image_token_index=IMAGE, image_token_id=IMAGE, vision_feature_layers=[-1, -2]),
    speaker(
        "paligemma",
        "PaliGemma",
        batch=typed,
        image_token_index=IMAGE,
        image_token_id=IMAGE,
        projection_dim=32,
        words={"model_type": "gemma", "head_dim": 8},
        vision={"model_type": "siglip_vision_model", "vision_use_head": False},
    ),
    speaker(
        "aya vision",
        "AyaVision",
        image_token_index=IMAGE,
        image_token_id=IMAGE,
        downsample_factor=1,
        adapter_layer_norm_eps=1e-5,
        words={"model_type": "cohere2", "head_dim": 8, "sliding_window": 8},
        vision={"model_type": "siglip_vision_model"},
    ),
    speaker(
        "internvl",
        "InternVL",
        image_token_id=IMAGE,
        downsample_ratio=1.0,
        words={"model_type": "qwen2"},
        vision={"model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [8, 8]},
    ),
    speaker("idefics3", "Idefics3", image_token_id=IMAGE, scale_factor=2, batch=framed, vision={"model_type": "idefics3_vision"}),
    speaker(
        "qwen2 vl",
        "Qwen2VL",
        image_token_id=IMAGE,
        video_token_id=5,
        vision_start_token_id=6,
        batch=qwen,
        words={
            "model_type": "qwen2_vl_text",
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0},
        },
        vision={
            "model_type": "qwen2_vl",
            "embed_dim": 32,
            "hidden_size": 32,
            "depth": 2,
            "num_heads": 4,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
        },
    ),
    Family(
        "clip",
        KIND,
        partial(Contrast, "CLIP", {**VISION}, {**TWO, "vocab_size": 64, "eos_token_id": 2, "projection_dim": 32}),
        contrast,
        rows,
    ),
    Family(
        "siglip",
        KIND,
        partial(Contrast, "Siglip", {**TWO, "image_size": 16, "patch_size": 8}, {**TWO, "vocab_size": 64}),
        contrast,
        rows,
    ),
    Family(
        "blip captions",
        KIND,
        partial(
            nested,
            "Blip",
            "ForConditionalGeneration",
            {
                "text_config": {**TWO, "vocab_size": 64, "encoder_hidden_size": 32, "bos_token_id": 1, "sep_token_id": 2},
                "vision_config": {**TWO, "image_size": 16, "patch_size": 8},
            },
        ),
        partial(shown, tokens=0),
        next_labels,
    ),
    Family(
        "git",
        KIND,
        partial(tiny, "Git", "ForCausalLM", vision_config={**TWO, "image_size": 16, "patch_size": 8}),
        partial(shown, tokens=0),
        next_labels,
    ),
    Family("vilt questions", KIND, partial(tiny, "Vilt", "ForQuestionAnswering"), questions, rows),
    Family(
        "layoutlm pages", KIND, partial(tiny, "LayoutLM", "ForTokenClassification", max_2d_position_embeddings=64), pages, labels
    ),
    Family(
        "lilt pages",
        KIND,
        partial(tiny, "Lilt", "ForTokenClassification", max_2d_position_embeddings=64, hidden_size=48),
        pages,
        labels,
    ),
    Family("vision encoder, text decoder", KIND, captioner, captions, labels),
    Family(
        "qwen2 audio",
        KIND,
        partial(
            nested,
            "Qwen2Audio",
            "ForConditionalGeneration",
            {
                "text_config": {**TEXT, "model_type": "qwen2"},
                "audio_config": {
                    "model_type": "qwen2_audio_encoder",
                    "d_model": 32,
                    "encoder_layers": 2,
                    "encoder_attention_heads": 4,
                    "encoder_ffn_dim": 48,
                    "num_mel_bins": 16,
                    "max_source_positions": 8,
                },
            },
            audio_token_index=IMAGE,
        ),
        audio_text,
        next_labels,
    ),
)
