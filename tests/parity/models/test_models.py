"""Every model of the zoo, every tier: the exported step beside torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest
import torch
from torch import nn

from edgefl import algorithms
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.tensors import TensorSpec
from edgefl.models.copies import trainable_copy
from edgefl.models.losses import CrossEntropy, Loss, SequenceCrossEntropy
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide, tiers
from reproduce.fafed.models import FASHION_CNN
from tests.pairs import by_default, in_both, in_turn, pairs, slow
from tests.parity.forms import checked

TIERS = ("strong", "moderate", "weak")

# As many units as by default, so that the preset tiers fit, but few and narrow channels.
SMALL: Mapping[str, Mapping[str, object]] = {
    "bert": {"length": 6, "vocabulary": 20, "width": 12},
    "convnext": {"size": 16, "widths": (4, 6, 8, 10)},
    "lstm_lm": {"length": 5, "vocabulary": 20, "features": 6, "hidden": 5},
    "mobilenet": {"size": 16, "width": 0.1},
    "resnet18": {"size": 16, "widths": (4, 6, 8, 10)},
    "vit": {"size": 8, "width": 12},
}


@pytest.mark.parametrize(
    ("model", "tier", "form"),
    in_turn(
        [],
        rare=[
            ("cnn", "strong"),
            ("cnn", "moderate"),
            ("cnn", "weak"),
            ("resnet20", "strong"),
            ("resnet8", "weak"),
        ],
    ),
)
def test_the_exported_step_of_each_tier_equals_torch(model: str, tier: str, form: str) -> None:
    submodel = tiers(model)[tier].of(build_model(model))

    assert _worst_error(form, submodel) <= 1e-4


@pytest.mark.parametrize(
    ("model", "tier", "form"),
    [
        *[
            slow(*row)
            for row in pairs(
                ["bert", "convnext", "lstm_lm", "resnet18", "vit"], TIERS, ("onnx", "executorch")
            )
        ],
        slow("mobilenet", "strong", "onnx"),
    ],
)
def test_the_exported_step_of_a_small_sibling_equals_torch(model: str, tier: str, form: str) -> None:
    submodel = tiers(model)[tier].of(build_model(model, **SMALL[model]))

    assert _worst_error(form, submodel) <= 1e-4


@pytest.mark.parametrize("form", in_turn([()]))
def test_the_exported_step_of_a_transformer_s_last_block_equals_torch(form: str) -> None:
    spec = build_model("vit", size=8, width=12, depth=2)

    assert _worst_error(form, OutputSide(spec, len(spec.units) - 2)) <= 1e-4


@pytest.mark.parametrize(("cut", "form"), [row for cut in (0, 1, 2) for row in in_both(cut)])
def test_the_exported_step_of_the_mlp_equals_torch(cut: int, form: str) -> None:
    assert _worst_error(form, OutputSide(build_model("mlp"), cut)) <= 1e-4


@pytest.mark.parametrize(
    ("model", "cut", "form"),
    in_turn(
        [("elu_mlp", 0)],
        rare=[
            ("elu_mlp", 2),
            ("reproduce.fafed.models:fafed_mnist", 0),
            (FASHION_CNN, 2),
            ("reproduce.fafed.models:fafed_cifar", 0),
            ("reproduce.fafed.models:fafed_mnist", 2),
        ],
    ),
)
def test_the_exported_step_of_federated_papers_models(model: str, cut: int, form: str) -> None:
    assert _worst_error(form, OutputSide(build_model(model), cut)) <= 1e-4


def _worst_error(form: str, submodel: OutputSide, batch: int = 8) -> float:
    """Largest error over loss, weights, momentum (the gradients) and statistics after one step, relative."""
    algorithm = algorithms.build("sgd", Objective.of(submodel), batch=batch)
    step = algorithm.phases[0].function
    return checked(form, step, 7).worst


# -- architectures of Hugging Face transformers as they are ------------------------------------------------


BATCH = 3
WORDS = TensorSpec((8,), torch.int64, 50)
IMAGE = TensorSpec((3, 16, 16))
# Attention draws inside a kernel; every other dropout keeps the rate that its configuration gives it.
TEXT = {"vocab_size": 50, "attention_probs_dropout_prob": 0.0, "num_labels": 5}


def _bert() -> nn.Module:
    import transformers

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(**shape, **TEXT, max_position_embeddings=16)
    return transformers.BertForSequenceClassification(config)


def _gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        **{"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 50},
        **{"attn_pdrop": 0.0, "use_cache": False, "tie_word_embeddings": False},
        **{"bos_token_id": 0, "eos_token_id": 0},
    )
    return transformers.GPT2LMHeadModel(config)


def _vit() -> nn.Module:
    import transformers

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.ViTConfig(
        **shape, image_size=16, patch_size=8, num_labels=5, attention_probs_dropout_prob=0.0
    )
    return transformers.ViTForImageClassification(config)


def _resnet() -> nn.Module:
    import transformers

    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 2], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


def _distilbert() -> nn.Module:
    import transformers

    config = transformers.DistilBertConfig(
        **{"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 50},
        **{"max_position_embeddings": 16, "attention_dropout": 0.0, "num_labels": 5},
    )
    return transformers.DistilBertForSequenceClassification(config)


def _convnext() -> nn.Module:
    import transformers

    config = transformers.ConvNextConfig(
        hidden_sizes=[4, 8], depths=[2, 2], num_stages=2, image_size=16, patch_size=2, num_labels=5
    )
    return transformers.ConvNextForImageClassification(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], TensorSpec, Loss, tuple[str, ...]]] = {
    "BERT": (
        _bert,
        WORDS,
        CrossEntropy(),
        ("bert_embeddings", "bert_encoder_layer_0", "bert_encoder_layer_1", "bert_pooler", "classifier"),
    ),
    "GPT-2": (
        _gpt2,
        WORDS,
        SequenceCrossEntropy(),
        ("transformer_wte", "transformer_h_0", "transformer_h_1", "lm_head"),
    ),
    "ViT": (_vit, IMAGE, CrossEntropy(), ("vit_embeddings", "vit_layers_0", "vit_layers_1", "classifier")),
    "ResNet": (
        _resnet,
        IMAGE,
        CrossEntropy(),
        (
            "resnet_embedder",
            "resnet_encoder_stages_0",
            "resnet_encoder_stages_1_layers_0",
            "resnet_encoder_stages_1_layers_1",
            "classifier_1",
        ),
    ),
    "DistilBERT": (
        _distilbert,
        WORDS,
        CrossEntropy(),
        (
            "distilbert_embeddings",
            "distilbert_transformer_layer_0",
            "distilbert_transformer_layer_1",
            "pre_classifier",
            "classifier",
        ),
    ),
    "ConvNeXt": (
        _convnext,
        IMAGE,
        CrossEntropy(),
        (
            "convnext_embeddings",
            "convnext_encoder_stages_0_layers_0",
            "convnext_encoder_stages_0_layers_1",
            "convnext_encoder_stages_1_downsampling_layer_1",
            "convnext_encoder_stages_1_layers_0",
            "convnext_encoder_stages_1_layers_1",
            "classifier",
        ),
    ),
}
EXPORTED = ("BERT", "GPT-2", "ViT", "ResNet", "ConvNeXt")


@cache
def _made(name: str) -> tuple[nn.Module, ModelSpec]:
    make, sample, loss, _ = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
    classes = 50 if isinstance(loss, SequenceCrossEntropy) else 5
    return model, split(model, sample=sample, classes=classes, loss=loss)


@pytest.mark.parametrize("name", by_default(MODELS, []))
def test_it_becomes_units_between_its_blocks_that_compute_the_same(name: str) -> None:
    model, spec = _made(name)
    assert spec.units == MODELS[name][3]
    assert len(spec.weights) == len(trainable_copy(model).state_dict())
    for rows in (1, 2, 3):
        x = spec.sample.rows(rows)
        batch = torch.randint(0, 50, x.shape) if x.below else torch.randn(x.shape)
        expected = model.eval()(batch).logits
        torch.testing.assert_close(spec.module.eval()(batch), expected)


@pytest.mark.parametrize(
    ("name", "part", "form"), in_turn([], rare=pairs(EXPORTED, ["full", "from a middle cut"]))
)
def test_its_exported_training_step_equals_torch(name: str, part: str, form: str) -> None:
    spec = _made(name)[1]
    cut = 0 if part == "full" else len(spec.units) // 2
    objective = Objective(spec.part(cut, len(spec.units)), spec.boundary(cut), spec.loss)
    step = sgd(objective, batch=BATCH).phases[0].function
    assert checked(form, step, 3).worst <= 1e-4
    assert bool(objective.noise(BATCH)) == (name in ("BERT", "GPT-2"))
