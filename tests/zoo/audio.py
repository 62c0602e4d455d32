"""Audio: words from sound by CTC and by decoders, classes of sound; layers are never dropped at random (layerdrop=0)."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.batches import classes as kinds
from tests.zoo.batches import frames, noise, sound, voices
from tests.zoo.configured import tiny
from tests.zoo.family import Batch, Family, labels, rows, text

KIND = "audio"
CONV: dict[str, Any] = {
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 5],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "ctc_loss_reduction": "mean",
    "classifier_proj_size": 16,
}


def ctc(name: str, config: str, *without: str, head: str = "ForCTC", batch: Any = sound, **more: Any) -> Family:
    return Family(name, KIND, partial(tiny, config, head, *without, **{**CONV, **more}), batch, rows)


def whispered(rows: int, length: int, seed: int) -> Batch:
    """Spectra of one length, and texts of many."""
    return {"input_features": noise(seed, rows, 16, 32), "labels": text(rows, length, seed)["labels"]}


def spectra(rows: int, length: int, seed: int) -> Batch:
    return {"input_values": noise(seed, rows, 32, 16), "labels": kinds(seed, rows)}


def spoken(rows: int, length: int, seed: int) -> Batch:
    """Samples and texts."""
    given = sound(rows, length, seed)
    return {**given, "labels": text(rows, 6, seed)["labels"]}


WHISPER = {"num_mel_bins": 16, "max_source_positions": 16, "mask_time_prob": 0.0}

FAMILIES = (
    ctc("wav2vec2", "Wav2Vec2"),
    ctc("wav2vec2 masked in time", "Wav2Vec2", mask_time_prob=0.3, mask_time_length=2),
    ctc("hubert", "Hubert"),
    ctc("wav2vec2 voices", "Wav2Vec2", head="ForSequenceClassification", batch=voices),
    Family(
        "wav2vec2 bert",
        KIND,
        partial(
            tiny,
            "Wav2Vec2Bert",
            "ForCTC",
            vocab_size=64,
            feature_projection_input_dim=16,
            conv_depthwise_kernel_size=3,
            mask_time_prob=0.0,
            apply_spec_augment=False,
        ),
        partial(frames, name="input_features"),
        rows,
    ),
    Family(
        "whisper",
        KIND,
        partial(tiny, "Whisper", "ForConditionalGeneration", "max_source_positions", **WHISPER),
        whispered,
        labels,
    ),
    Family(
        "whisper masked in time",
        KIND,
        partial(
            tiny,
            "Whisper",
            "ForConditionalGeneration",
            "max_source_positions",
            num_mel_bins=16,
            max_source_positions=16,
            apply_spec_augment=True,
            mask_time_prob=0.5,
            mask_time_length=2,
        ),
        whispered,
        labels,
    ),
    Family(
        "speech to text",
        KIND,
        partial(
            tiny,
            "Speech2Text",
            "ForConditionalGeneration",
            input_feat_per_channel=16,
            conv_channels=16,
            num_conv_layers=2,
            conv_kernel_sizes=[5, 5],
        ),
        frames,
        labels,
    ),
    Family(
        "speecht5",
        KIND,
        partial(
            tiny,
            "SpeechT5",
            "ForSpeechToText",
            **CONV,
            speech_decoder_prenet_units=16,
            encoder_max_relative_position=8,
            max_speech_positions=200,
            max_text_positions=64,
        ),
        spoken,
        labels,
    ),
    Family(
        "moonshine",
        KIND,
        partial(
            tiny,
            "Moonshine",
            "ForConditionalGeneration",
            encoder_num_hidden_layers=2,
            decoder_num_hidden_layers=2,
            encoder_num_attention_heads=4,
            decoder_num_attention_heads=4,
            encoder_num_key_value_heads=4,
            decoder_num_key_value_heads=4,
        ),
        partial(sound, samples=200, spoken=6),
        labels,
    ),
    Family(
        "spectrogram transformer",
        KIND,
        partial(tiny, "AST", "ForAudioClassification", num_mel_bins=16, max_length=32, frequency_stride=4, time_stride=4),
        spectra,
        rows,
    ),
    Family(
        "seamless speech",
        KIND,
        partial(
            tiny,
            "SeamlessM4T",
            "ForSpeechToText",
            feature_projection_input_dim=16,
            speech_encoder_layers=2,
            speech_encoder_attention_heads=4,
            speech_encoder_intermediate_size=48,
            speech_encoder_layerdrop=0.0,
            t2u_vocab_size=64,
            position_embeddings_type="relative",
            max_source_positions=128,
        ),
        frames,
        labels,
    ),
)
