"""Models of sound and of series of Hugging Face's transformers: layer drop, SpecAugment, scaling as the library has them."""

from __future__ import annotations

from typing import Any

from edgefl.contract.tensors import TensorSpec
from edgefl.suite.architecture import CLASSES, VOCABULARY, WORDS, Architecture, transformer
from edgefl.suite.encoders import TAGS

WAVE = TensorSpec((4000,))
SERIES = TensorSpec((32, 3))
SPEECH: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "conv_dim": (16,) * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "num_labels": CLASSES,
}
SPECTROGRAM: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
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
