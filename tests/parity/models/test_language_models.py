"""Language models of Hugging Face transformers as the library makes them: heads tied to embeddings, a cache beside the
logits. They are cut by themselves, have the loss and the gradients of the unedited model, and go through both engines.

Rates of dropout are 0: that masks are inputs is tested elsewhere, and torch draws its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.tensors import TensorSpec
from edgefl.models.losses import ModelLoss, SequenceCrossEntropy
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.models.tied import borrowed_names
from edgefl.objective.derivatives import gradient
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.width.submodel import Width
from tests.pairs import by_default, slow
from tests.parity.forms import checked
from tests.parity.rounds import exported, in_torch, local_data, on_device

VOCABULARY, WIDTH, BATCH = 50, 16, 3
WORDS = TensorSpec((8,), torch.int64, VOCABULARY)
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Architecture:
    """A class of transformers, the configuration, the units, and the name of the first tensor that has several uses."""

    kind: str
    config: dict[str, Any]
    units: tuple[str, ...]
    tied: str = ""

    def model(self) -> nn.Module:
        import transformers

        kind = getattr(transformers, self.kind)
        return kind(kind.config_class(**self.config))


def _decoder(kind: str, units: tuple[str, ...] = (), tied: str = "", **config: object) -> Architecture:
    found = units or ("model_embed_tokens", "model_layers_0", "model_layers_1", "lm_head")
    return Architecture(kind, {**SHAPE, **TOKENS, **config}, found, tied)


MODELS = {
    "GPT-2": Architecture(
        "GPT2LMHeadModel",
        {
            **{"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 16},
            **{"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
            **{"bos_token_id": 0, "eos_token_id": 0},
        },
        ("transformer_wte", "transformer_h_0", "transformer_h_1", "lm_head"),
        "transformer.wte.weight",
    ),
    "BERT": Architecture(
        "BertForMaskedLM",
        {**SHAPE, **NO_DROPOUT, "max_position_embeddings": 16},
        (
            "bert_embeddings",
            "bert_encoder_layer_0",
            "bert_encoder_layer_1",
            "cls_predictions_transform",
            "cls_predictions_decoder",
        ),
        "bert.embeddings.word_embeddings.weight",
    ),
    "T5 encoder": Architecture(
        "T5EncoderModel",
        {
            **{
                "vocab_size": VOCABULARY,
                "d_model": WIDTH,
                "d_kv": 8,
                "d_ff": 32,
                "num_layers": 2,
                "num_heads": 2,
            },
            "dropout_rate": 0.0,
        },
        (),
        "shared.weight",
    ),
    "OPT": _decoder(
        "OPTForCausalLM",
        ("model_decoder_embed_tokens", "model_decoder_layers_0", "model_decoder_layers_1", "lm_head"),
        "model.decoder.embed_tokens.weight",
        word_embed_proj_dim=WIDTH,
        ffn_dim=32,
        max_position_embeddings=16,
        dropout=0.0,
    ),
    "Gemma": _decoder(
        "GemmaForCausalLM", tied="model.embed_tokens.weight", num_key_value_heads=1, head_dim=8
    ),
    "Mamba": Architecture(
        "MambaForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "state_size": 4, "num_hidden_layers": 2, **TOKENS},
        ("backbone_embeddings", "backbone_layers_0", "backbone_layers_1", "lm_head"),
        "backbone.embeddings.weight",
    ),
    "Llama": _decoder("LlamaForCausalLM"),
    "Llama, tied": _decoder("LlamaForCausalLM", tied="model.embed_tokens.weight", tie_word_embeddings=True),
    "Qwen2": _decoder("Qwen2ForCausalLM", num_key_value_heads=1),
    "Qwen3": _decoder("Qwen3ForCausalLM", num_key_value_heads=1, head_dim=8),
    "Mistral": _decoder("MistralForCausalLM", num_key_value_heads=1),
    "Phi-3": _decoder("Phi3ForCausalLM"),
    "GPT-NeoX": _decoder(
        "GPTNeoXForCausalLM", ("gpt_neox_embed_in", "gpt_neox_layers_0", "gpt_neox_layers_1", "lm_head")
    ),
}
TIED = tuple(name for name, model in MODELS.items() if model.tied and name != "T5 encoder")


@cache
def _made(name: str) -> tuple[nn.Module, ModelSpec]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[name].model()
    classes = WIDTH if name == "T5 encoder" else VOCABULARY
    return model, split(model, sample=WORDS, classes=classes, loss=SequenceCrossEntropy())


def _batch(spec: ModelSpec) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(2, VOCABULARY, (BATCH, *WORDS.shape), generator=generator)
    return {
        "batch.0.x": x,
        "batch.0.y": torch.randint(0, spec.classes, (BATCH, *WORDS.shape), generator=generator),
    }


@pytest.mark.parametrize("name", by_default(MODELS, []))
def test_it_is_cut_as_it_comes_with_torchs_loss_and_gradients(name: str) -> None:
    model, spec = _made(name)
    batch = _batch(spec)
    assert spec.units == MODELS[name].units or name == "T5 encoder"
    assert bool(borrowed_names(spec.part(0, 1))) == (name in TIED)
    # Each tensor once, and by all names that the model has for it.
    assert len(spec.weights) == len(list(model.parameters()))
    assert spec.global_names.keys() == model.state_dict().keys()

    named = dict(model.train().named_parameters())
    out = model(batch["batch.0.x"])
    logits = out.last_hidden_state if name == "T5 encoder" else out.logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["batch.0.y"].flatten())
    expected = torch.autograd.grad(loss, list(named.values()))
    found = gradient(Objective.of(OutputSide(spec, 0)), spec.weights, batch)
    torch.testing.assert_close(found[0], loss, rtol=1e-5, atol=1e-6)
    for own, grad in zip(named, expected, strict=True):
        torch.testing.assert_close(found[2][spec.global_names[own]], grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(slow(name, "onnx") for name in MODELS),
        slow("GPT-2", "executorch"),
        slow("Llama, tied", "executorch"),
    ],
)
def test_its_exported_training_step_equals_torch(name: str, form: str) -> None:
    objective = Objective.of(OutputSide(_made(name)[1], 0))
    assert checked(form, sgd(objective, batch=BATCH).phases[0].function, 3).worst <= 1e-4


@pytest.mark.parametrize(("name", "form"), [slow("BERT", "executorch"), slow("Llama, tied", "onnx")])
def test_a_weak_tier_trains_the_tied_head(tmp_path: Path, name: str, form: str) -> None:
    spec = _made(name)[1]
    tier = exported(OutputSide(spec, len(spec.units) - 2, 2), batch=BATCH, steps=2, lr=0.1, form=form)
    assert spec.units[-1] in tier.submodel.prefix[0].units
    data = local_data(spec, 7, seed=5)

    result, _ = on_device(tier, data, 11, tmp_path, form)

    expected = in_torch(tier, data, 11)
    assert result.update.keys() == expected.keys() == set(tier.submodel.holds)
    for key, value in expected.items():
        torch.testing.assert_close(torch.from_numpy(result.update[key]), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [slow("GPT-2"), slow("BERT"), slow("Llama"), slow("Mamba")])
def test_it_is_trained_by_the_loss_that_it_returns_itself(name: str) -> None:
    model = _made(name)[0].eval()
    labels = TensorSpec(WORDS.shape, torch.int64, VOCABULARY)
    spec = split(model, sample=WORDS, classes=VOCABULARY, loss=ModelLoss(), labels=labels)
    batch = _batch(spec)
    loss = model(batch["batch.0.x"], labels=batch["batch.0.y"]).loss
    named = dict(model.named_parameters())

    found = gradient(Objective.of(OutputSide(spec, 0)), spec.weights, batch)

    torch.testing.assert_close(found[0], loss, rtol=1e-5, atol=1e-6)
    for own, grad in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True):
        torch.testing.assert_close(found[2][spec.global_names[own]], grad, rtol=1e-5, atol=1e-5)
    step = sgd(Objective.of(OutputSide(spec, 1)), batch=BATCH).phases[0].function
    assert checked("onnx", step, 3).worst <= 1e-4


@pytest.mark.parametrize("name", [slow("GPT-2"), slow("Llama, tied"), slow("BERT")])
def test_a_slice_of_its_width_is_one_slice_of_both_uses(name: str) -> None:
    spec = _made(name)[1]
    half = Width(spec, 0.5)
    (holder,) = {full for full in borrowed_names(spec.part(0, 1)).values()}
    assert half.suffix.state_dict()[holder].shape == (VOCABULARY, WIDTH // 2)
    step = sgd(Objective.of(half), batch=BATCH).phases[0].function
    assert checked("onnx", step, 3).worst <= 1e-4
