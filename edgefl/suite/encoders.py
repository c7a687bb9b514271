"""Text encoders of Hugging Face's transformers, with the heads that people train. Dropout has the library's rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from edgefl.contract.tensors import TensorSpec
from edgefl.suite.architecture import (
    CLASSES,
    LENGTH,
    MASK,
    VOCABULARY,
    WORDS,
    Architecture,
    transformer,
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "num_labels": CLASSES,
}
TAGS = "sequence_cross_entropy"
TEXT = {"input_ids": WORDS, "attention_mask": MASK}
SEGMENTS = TensorSpec((LENGTH,), torch.int64, 2)
PAIR = {**TEXT, "token_type_ids": SEGMENTS}


def _encoder(
    name: str,
    kind: str,
    sample: Mapping[str, TensorSpec] = TEXT,
    *,
    classes: int = CLASSES,
    loss: str = "",
    whole: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> Architecture:
    """``whole``: the sizes, where the configuration calls them otherwise; else the usual ones and ``sizes``."""
    config = dict(whole) if whole is not None else {**SIZES, **sizes}
    return transformer(name, kind, config, sample, classes, loss)


DISTIL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "dim": 32,
    "hidden_dim": 64,
    "n_layers": 2,
    "n_heads": 2,
    "num_labels": CLASSES,
}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
}
_FUNNEL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "block_sizes": [1, 1],
    "num_decoder_layers": 1,
    "d_model": 32,
    "n_head": 2,
    "d_head": 16,
    "d_inner": 64,
    "num_labels": CLASSES,
}
_XLNET: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "n_layer": 2,
    "n_head": 2,
    "d_inner": 64,
    "num_labels": CLASSES,
}
BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "max_position_embeddings": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
BOTH = {"input_ids": WORDS, "decoder_input_ids": WORDS}

ENCODERS = (
    _encoder("BERT", "BertForSequenceClassification", PAIR),
    _encoder("BERT, masked words", "BertForMaskedLM", classes=VOCABULARY, loss=TAGS),
    _encoder("RoBERTa", "RobertaForSequenceClassification"),
    _encoder("DistilBERT, tags", "DistilBertForTokenClassification", loss=TAGS, whole=DISTIL),
    _encoder("ALBERT", "AlbertForSequenceClassification", embedding_size=16),
    _encoder("ELECTRA", "ElectraForSequenceClassification", embedding_size=16),
    _encoder("DeBERTa-v2", "DebertaV2ForSequenceClassification"),
    _encoder("MPNet", "MPNetForSequenceClassification"),
    _encoder("XLM-RoBERTa", "XLMRobertaForSequenceClassification"),
    _encoder("ConvBERT", "ConvBertForSequenceClassification", embedding_size=16),
    _encoder(
        "MobileBERT", "MobileBertForSequenceClassification", embedding_size=16, intra_bottleneck_size=16
    ),
    _encoder("SqueezeBERT", "SqueezeBertForSequenceClassification", embedding_size=32),
    _encoder("RoFormer", "RoFormerForSequenceClassification"),
    _encoder("ERNIE", "ErnieForSequenceClassification"),
    _encoder("ModernBERT", "ModernBertForSequenceClassification", pad_token_id=0),
    _encoder("Data2Vec, text", "Data2VecTextForSequenceClassification"),
    _encoder("ESM", "EsmForSequenceClassification", pad_token_id=1, mask_token_id=2),
    _encoder("FNet", "FNetForSequenceClassification", {"input_ids": WORDS}),
    _encoder("Funnel", "FunnelForSequenceClassification", whole=_FUNNEL),
    _encoder("XLNet", "XLNetForSequenceClassification", whole=_XLNET),
    _encoder(
        "T5, encoder",
        "T5ForTokenClassification",
        loss=TAGS,
        whole={**T5, "num_labels": CLASSES},
    ),
    _encoder(
        "T5",
        "T5ForConditionalGeneration",
        BOTH,
        classes=VOCABULARY,
        loss=TAGS,
        whole=T5,
    ),
    _encoder(
        "BART",
        "BartForConditionalGeneration",
        BOTH,
        classes=VOCABULARY,
        loss=TAGS,
        whole=BART,
    ),
)
