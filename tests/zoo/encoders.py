"""Encoders: masked words, classes of tokens and of texts, answers."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.batches import answers, sentences
from tests.zoo.configured import tiny
from tests.zoo.family import Family, labels, rows, text

KIND = "encoder"


def masked(name: str, config: str, *without: str, head: str = "ForMaskedLM", **more: Any) -> Family:
    return Family(name, KIND, partial(tiny, config, head, *without, **more), text, labels)


FAMILIES = (
    masked("bert", "Bert"),
    masked("roberta", "Roberta"),
    masked("albert", "Albert"),
    masked("electra", "Electra"),
    masked("distilbert", "DistilBert"),
    masked("deberta", "Deberta"),
    masked("deberta v2", "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    masked("mpnet", "MPNet"),
    masked("modernbert", "ModernBert", global_attn_every_n_layers=2),
    masked("convbert", "ConvBert", head_ratio=2, num_groups=1),
    masked("mobilebert", "MobileBert", intra_bottleneck_size=32, true_hidden_size=32),
    masked("roformer", "RoFormer"),
    masked("nystromformer", "Nystromformer", num_landmarks=64, segment_means_seq_len=64),
    masked("fnet", "FNet"),
    masked("funnel", "Funnel", "num_hidden_layers", block_sizes=[1, 1]),
    masked("longformer", "Longformer", attention_window=4),
    masked("esm", "Esm", mask_token_id=3, vocab_size=64),
    Family("bert tokens", KIND, partial(tiny, "Bert", "ForTokenClassification", num_labels=64), text, labels),
    Family("roberta texts", KIND, partial(tiny, "Roberta", "ForSequenceClassification"), sentences, rows),
    Family("bert answers", KIND, partial(tiny, "Bert", "ForQuestionAnswering", "num_labels"), answers, rows),
)
