"""The class of a model whose configuration has no `architectures`, and the first token of a decoder that it leaves out.

encoder and decoder     the class for conditional generation: T5ForConditionalGeneration
causal language model   AutoModelForCausalLM
others                  refused: a ViT may classify pictures or only encode them
"""

from __future__ import annotations

from typing import Any

from meshwright.errors import MeshwrightError

CAUSAL = "AutoModelForCausalLM"
CONDITIONAL = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
"""Tasks of models with an encoder and a decoder, as transformers calls them."""
LIKELY = ("IMAGE_CLASSIFICATION", "MASKED_LM", "SEQUENCE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT")
"""Tasks whose class is proposed for other models, the most likely first."""


def default_head(config: Any) -> str:
    """Returns the class to build for a configuration without architectures.

    Raises:
        MeshwrightError: The configuration does not tell what the model is for.
    """
    kind, pair = config.model_type, bool(getattr(config, "is_encoder_decoder", False))
    head = _first_class(kind, CONDITIONAL) if pair else CAUSAL if _first_class(kind, ("CAUSAL_LM",)) else None
    if head is None:
        what = "has an encoder and a decoder" if pair else "is no causal language model"
        likely = _first_class(kind, LIKELY) or "the name of a model class of transformers"
        raise MeshwrightError(
            f"the configuration has no architectures, and a model of type {kind!r} {what}: its class is not known",
            fix=f'"architectures": ["{likely}"] in the configuration',
        )
    return head


def give_start_token(config: Any) -> None:
    """Sets the first token of a decoder if a configuration has none: the padding, with which T5 begins.

    Raises:
        MeshwrightError: There is no padding either.
    """
    if not getattr(config, "is_encoder_decoder", False) or hasattr(config, "decoder_start_token_id"):
        return
    padding = getattr(config, "pad_token_id", None)
    if padding is None:
        raise MeshwrightError(
            "the configuration does not tell with which token the decoder begins",
            fix='"decoder_start_token_id": 0 in the configuration',
        )
    config.decoder_start_token_id = padding


def _first_class(kind: str, tasks: tuple[str, ...]) -> str | None:
    """Returns the class of a type of model for the first of some tasks that it has one for."""
    from transformers.models.auto import modeling_auto

    for task in tasks:
        found = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).get(kind)
        if found is not None:
            return str(found if isinstance(found, str) else found[0])
    return None
