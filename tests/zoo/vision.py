"""Vision: transformers, convolutions, films, regions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from tests.zoo.batches import films, pictures, regions
from tests.zoo.configured import tiny
from tests.zoo.family import Family, rows

KIND = "vision"


def pixels(batch: Mapping[str, Tensor]) -> float:
    """A mean over pixels; 255 is ignored."""
    return float((batch["labels"] != 255).sum())


ANY = partial(pictures, size=None)


def classifier(
    name: str, config: str, *without: str, head: str = "ForImageClassification", batch: Any = pictures, **more: Any
) -> Family:
    return Family(name, KIND, partial(tiny, config, head, *without, **more), batch, rows)


def convolutions(name: str, config: str, *without: str, head: str = "ForImageClassification", **more: Any) -> Family:
    """They take pictures of any size."""
    return Family(name, KIND, partial(tiny, config, head, *without, **more), ANY, rows, sizes=((5, 32), (4, 40)))


FAMILIES = (
    classifier("vit", "ViT"),
    classifier("deit", "DeiT"),
    classifier("beit", "Beit"),
    classifier("dinov2 registers", "Dinov2WithRegisters"),
    classifier("swin", "Swin", "hidden_size", "num_layers", depths=[1, 1], num_heads=[2, 4], window_size=2, patch_size=2),
    classifier("swinv2", "Swinv2", "hidden_size", "num_layers", depths=[1, 1], num_heads=[2, 4], window_size=2, patch_size=2),
    classifier(
        "hiera",
        "Hiera",
        "hidden_size",
        "num_layers",
        image_size=[16, 16],
        patch_stride=[2, 2],
        patch_size=[3, 3],
        patch_padding=[1, 1],
        depths=[1, 1],
        num_heads=[1, 2],
        masked_unit_size=[4, 4],
        query_stride=[2, 2],
        embed_dim_multiplier=2.0,
        num_query_pool=1,
    ),
    convolutions(
        "convnext",
        "ConvNext",
        "patch_size",
        "hidden_sizes",
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
        drop_path_rate=0.1,
    ),
    convolutions("resnet", "ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    convolutions("mobilenet v2", "MobileNetV2", depth_multiplier=0.25, min_depth=4),
    convolutions("efficientnet", "EfficientNet", "hidden_dim", width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320),
    convolutions(
        "poolformer",
        "PoolFormer",
        "patch_size",
        hidden_sizes=[8, 16],
        depths=[1, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        padding=[2, 1],
        num_encoder_blocks=2,
    ),
    convolutions(
        "pvt v2",
        "PvtV2",
        "patch_size",
        "hidden_size",
        "num_attention_heads",
        num_encoder_blocks=2,
        depths=[1, 1],
        hidden_sizes=[8, 16],
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
    ),
    Family(
        "segformer",
        KIND,
        partial(
            tiny,
            "Segformer",
            "ForSemanticSegmentation",
            "patch_size",
            "hidden_size",
            "num_attention_heads",
            num_encoder_blocks=2,
            depths=[1, 1],
            hidden_sizes=[8, 16],
            sr_ratios=[2, 1],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=16,
        ),
        regions,
        pixels,
    ),
    Family("timesformer", KIND, partial(tiny, "Timesformer", "ForVideoClassification", num_frames=4), films, rows),
)
