"""Language models of Hugging Face's transformers: heads tied as the library ties them, a cache beside the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgefl.suite.architecture import VOCABULARY, WORDS, Architecture, transformer

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
"""Numbers of the library's own vocabularies lie beyond a small one."""


def _decoder(
    name: str, kind: str, whole: Mapping[str, Any] | None = None, *, tail: str = "ForCausalLM", **sizes: Any
) -> Architecture:
    """``whole``: the sizes, where the configuration calls them otherwise; else the usual ones and ``sizes``."""
    config = {**TOKENS, **(SIZES if whole is None else whole), **sizes}
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
