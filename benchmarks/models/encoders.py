"""Text encoders of Hugging Face's transformers, with the heads that people train. Dropout has the library's rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.models.architecture import CLASSES, LENGTH, MASK, VOCABULARY, WORDS, Architecture, transformer
from edgefl.contract.tensors import TensorSpec

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
DECODER_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, **SMALL, "max_position_embeddings": 64}
SIZES: dict[str, Any] = {**DECODER_SIZES, "num_labels": CLASSES}
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
TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
"""Numbers of the library's own vocabularies lie beyond a small one."""


def _decoder(
    name: str, kind: str, whole: Mapping[str, Any] | None = None, *, tail: str = "ForCausalLM", **sizes: Any
) -> Architecture:
    """``whole``: the sizes, where the configuration calls them otherwise; else the usual ones and ``sizes``."""
    config = {**TOKENS, **(DECODER_SIZES if whole is None else whole), **sizes}
    return transformer(name, kind + tail, config, WORDS, VOCABULARY, "causal_lm")


GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
_NEO = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "max_position_embeddings": 64,
    "attention_types": [[["global", "local"], 1]],
}
_BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 2}
_FALCON = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
_XGLM = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "ffn_dim": 64,
    "num_layers": 2,
    "attention_heads": 2,
    "max_position_embeddings": 64,
}
_MPT = {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 64}
DECODERS = (
    _decoder("GPT-2", "GPT2LMHeadModel", GPT, tail=""),
    _decoder("GPT", "OpenAIGPTLMHeadModel", GPT, tail=""),
    _decoder("GPT-Neo", "GPTNeo", _NEO),
    _decoder("GPT-NeoX", "GPTNeoX"),
    _decoder("GPT-J", "GPTJ", GPT, rotary_dim=8),
    _decoder("OPT", "OPT", word_embed_proj_dim=32, ffn_dim=64, pad_token_id=1),
    _decoder("BLOOM", "Bloom", _BLOOM),
    _decoder("Llama", "Llama"),
    _decoder("Mistral", "Mistral", num_key_value_heads=1),
    _decoder("Qwen2", "Qwen2", num_key_value_heads=1),
    _decoder("Qwen3", "Qwen3", num_key_value_heads=1, head_dim=16),
    _decoder("Gemma", "Gemma", num_key_value_heads=1, head_dim=16),
    _decoder("Gemma 2", "Gemma2", num_key_value_heads=1, head_dim=16),
    _decoder("Phi", "Phi"),
    _decoder("Phi-3", "Phi3"),
    _decoder("Falcon", "Falcon", _FALCON),
    _decoder("StableLM", "StableLm", num_key_value_heads=2),
    _decoder("StarCoder2", "Starcoder2", num_key_value_heads=1),
    _decoder("OLMo 2", "Olmo2"),
    _decoder("Cohere", "Cohere"),
    _decoder("SmolLM3", "SmolLM3", num_key_value_heads=1),
    _decoder("MPT", "Mpt", _MPT),
    _decoder("BioGPT", "BioGpt", pad_token_id=1),
    _decoder("XGLM", "XGLM", _XGLM, pad_token_id=1),
    _decoder("Mamba", "Mamba", _MAMBA),
)
WAVE = TensorSpec((4000,))
SERIES = TensorSpec((32, 3))
SPEECH: dict[str, Any] = {
    **SMALL,
    "conv_dim": (16,) * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "num_labels": CLASSES,
}
SPECTROGRAM: dict[str, Any] = {
    **SMALL,
    "max_length": 64,
    "num_mel_bins": 32,
    "num_labels": CLASSES,
}
WHISPER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_mel_bins": 20,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_source_positions": 32,
    "max_target_positions": 32,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
HEARD = {"input_features": TensorSpec((20, 64)), "decoder_input_ids": WORDS}


def _speech(name: str, kind: str, **sizes: Any) -> Architecture:
    return transformer(name, f"{kind}ForSequenceClassification", {**SPEECH, **sizes}, WAVE)


def _series(name: str, kind: str, **sizes: Any) -> Architecture:
    config = {"context_length": 32, "num_input_channels": 3, "num_targets": CLASSES, "d_model": 16}
    return transformer(name, kind, {**config, **sizes}, SERIES)


HEARING = (
    _speech("Wav2Vec2", "Wav2Vec2"),
    _speech("HuBERT", "Hubert"),
    _speech("WavLM", "WavLM"),
    _speech("UniSpeech", "UniSpeech"),
    transformer("AST", "ASTForAudioClassification", SPECTROGRAM, TensorSpec((64, 32))),
    transformer("Whisper", "WhisperForConditionalGeneration", WHISPER, HEARD, VOCABULARY, TAGS),
    _series("PatchTST", "PatchTSTForClassification", num_hidden_layers=2, ffn_dim=32, num_attention_heads=2),
    _series("PatchTSMixer", "PatchTSMixerForTimeSeriesClassification", num_layers=2),
)
