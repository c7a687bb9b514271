"""Models of transformers that the suite does not have, and other heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.models.architecture import (
    CLASSES,
    IMAGE,
    LARGE_IMAGE,
    LENGTH,
    VOCABULARY,
    WORDS,
    Architecture,
    transformer,
)
from benchmarks.models.encoders import BART, BOTH, DISTIL, GPT, SPEECH, T5, TAGS, TEXT, TOKENS, WAVE
from benchmarks.models.encoders import DECODER_SIZES as DECODER
from benchmarks.models.encoders import SIZES as ENCODER
from benchmarks.models.seeing import TRANSFORMER
from edgefl.contract.tensors import TensorSpec

Sample = TensorSpec | Mapping[str, TensorSpec]
FILM = TensorSpec((4, 3, 32, 32))
MARKS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PAIRS: dict[str, Any] = {**BART, "decoder_start_token_id": 2, "forced_eos_token_id": 2, **MARKS}
XLM: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "emb_dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "num_labels": CLASSES,
}


def _encoder(name: str, kind: str, sample: Sample = TEXT, *, loss: str = "", **sizes: Any) -> Architecture:
    return transformer(name, kind, {**ENCODER, **MARKS, **sizes}, sample, loss=loss)


def _decoder(name: str, kind: str, **sizes: Any) -> Architecture:
    return transformer(name, kind, {**TOKENS, **DECODER, **sizes}, WORDS, VOCABULARY, "causal_lm")


def _both(name: str, kind: str, config: Mapping[str, Any], **sizes: Any) -> Architecture:
    return transformer(name, kind, {**config, **sizes}, BOTH, VOCABULARY, TAGS)


def _vision(name: str, kind: str, sample: Sample = IMAGE, loss: str = "", **sizes: Any) -> Architecture:
    return transformer(name, kind, {**sizes, "num_labels": CLASSES}, sample, loss=loss)


TEXTS = (
    _encoder(
        "DeBERTa", "DebertaForSequenceClassification", relative_attention=True, pos_att_type=["c2p", "p2c"]
    ),
    transformer("BERT, answers", "BertForQuestionAnswering", {**ENCODER, "num_labels": 2}, TEXT, LENGTH),
    _encoder("RoBERTa, tags", "RobertaForTokenClassification", loss=TAGS),
    _encoder(
        "BERT, multiple choice",
        "BertForMultipleChoice",
        {"input_ids": TensorSpec((CLASSES, LENGTH), torch.int64, VOCABULARY)},
    ),
    transformer("DistilBERT", "DistilBertForSequenceClassification", DISTIL, TEXT),
    _encoder("Longformer", "LongformerForSequenceClassification", attention_window=4),
    _encoder("BigBird", "BigBirdForSequenceClassification", block_size=4, num_random_blocks=1),
    _encoder("Nystromformer", "NystromformerForSequenceClassification"),
    transformer("XLM", "XLMForSequenceClassification", XLM, TEXT),
    _encoder(
        "LayoutLM",
        "LayoutLMForTokenClassification",
        {"input_ids": WORDS, "bbox": TensorSpec((LENGTH, 4), torch.int64, 1)},
        loss=TAGS,
    ),
    transformer(
        "GPT-2, classes",
        "GPT2ForSequenceClassification",
        {**GPT, **MARKS, "num_labels": CLASSES},
        {"input_ids": WORDS},
    ),
    transformer(
        "Llama, classes",
        "LlamaForSequenceClassification",
        {**DECODER, **MARKS, "num_labels": CLASSES},
        {"input_ids": WORDS},
    ),
    _decoder("Granite", "GraniteForCausalLM"),
    _decoder("Gemma 3", "Gemma3ForCausalLM", num_key_value_heads=1, head_dim=16),
    _decoder("Mixtral", "MixtralForCausalLM", num_key_value_heads=1, num_local_experts=4),
    _decoder(
        "Qwen2 MoE",
        "Qwen2MoeForCausalLM",
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    _decoder("RecurrentGemma", "RecurrentGemmaForCausalLM", num_hidden_layers=3, attention_window_size=8),
    _decoder("RWKV", "RwkvForCausalLM", context_length=64, attention_hidden_size=32),
    _decoder(
        "Mamba 2", "Mamba2ForCausalLM", num_heads=4, head_dim=16, state_size=8, n_groups=2, chunk_size=8
    ),
    transformer(
        "CodeGen",
        "CodeGenForCausalLM",
        {**TOKENS, **GPT, "n_head": 4, "rotary_dim": 4},
        WORDS,
        VOCABULARY,
        "causal_lm",
    ),
    transformer("GPT BigCode", "GPTBigCodeForCausalLM", {**TOKENS, **GPT}, WORDS, VOCABULARY, "causal_lm"),
    _both("Marian", "MarianMTModel", PAIRS),
    _both("mBART", "MBartForConditionalGeneration", PAIRS),
    _both("M2M-100", "M2M100ForConditionalGeneration", PAIRS),
    _both("mT5", "MT5ForConditionalGeneration", T5),
    _both(
        "LED",
        "LEDForConditionalGeneration",
        PAIRS,
        attention_window=4,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
)

OTHERS = (
    _vision("CLIP", "CLIPForImageClassification", vision_config={**TRANSFORMER, "projection_dim": 32}),
    _vision("SigLIP", "SiglipForImageClassification", vision_config=TRANSFORMER),
    _vision(
        "MobileViT v2", "MobileViTV2ForImageClassification", LARGE_IMAGE, image_size=64, width_multiplier=0.5
    ),
    _vision(
        "DPT, pixels",
        "DPTForSemanticSegmentation",
        loss="cross_entropy",
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[16, 16, 32, 32],
        fusion_hidden_size=16,
        **{**TRANSFORMER, "num_hidden_layers": 4},
    ),
    transformer(
        "YOLOS, boxes as classes",
        "YolosForObjectDetection",
        {**TRANSFORMER, "image_size": [32, 32], "num_detection_tokens": 5, "num_labels": CLASSES - 1},
        IMAGE,
        loss=TAGS,
    ),
    _vision("VideoMAE", "VideoMAEForVideoClassification", FILM, num_frames=4, **TRANSFORMER),
    _vision("TimeSformer", "TimesformerForVideoClassification", FILM, num_frames=4, **TRANSFORMER),
    transformer(
        "SEW",
        "SEWForSequenceClassification",
        {**SPEECH, "conv_dim": (16,) * 13},
        WAVE,
    ),
    transformer(
        "Wav2Vec2, symbols", "Wav2Vec2ForCTC", {**SPEECH, "vocab_size": 12}, WAVE, 12, "ctc:length=4"
    ),
    transformer(
        "Perceiver",
        "PerceiverForSequenceClassification",
        {
            "num_latents": 8,
            "d_latents": 32,
            "d_model": 32,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 2,
            "num_cross_attention_heads": 2,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
            "num_labels": CLASSES,
        },
        {"inputs": WORDS},
    ),
)
