"""Models that draw random numbers in training, exported: each draw an input, on both engines, as torch computes it.

The architectures of transformers have the rates that their configurations give them. That library is imported where a model
is made: that takes seconds, and the default ring makes none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.tensors import TensorSpec
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.objective.objective import Objective
from tests.models.draws.nets import LARGE, MODELS, ROWS
from tests.models.draws.torch_numbers import Given
from tests.pairs import in_turn
from tests.parity.forms import checked

WORDS = TensorSpec((8,), torch.int64, 50)
WAVE = TensorSpec((400,))
IMAGE = TensorSpec((3, 32, 32))
_TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_VISION = {**_TEXT, "image_size": 32, "patch_size": 8}


class Logits(nn.Module):
    """What a library's model says, without what it wraps around it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def _text(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        sizes = {**_TEXT, "vocab_size": 50, "max_position_embeddings": 16, "num_labels": 4}
        config = getattr(transformers, f"{kind}Config")(**sizes)
        return getattr(transformers, f"{kind}ForSequenceClassification")(config)

    return make


def _vision(kind: str, **sizes: object) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**sizes, num_labels=4)
        return getattr(transformers, f"{kind}ForImageClassification")(config)

    return make


def _speech() -> nn.Module:
    import transformers

    config = transformers.Wav2Vec2Config(
        **_TEXT,
        **{"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2},
        **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8},
        apply_spec_augment=False,
        num_labels=4,
    )
    return transformers.Wav2Vec2ForSequenceClassification(config)


# Each with the number of its draws. Stochastic depth has rate 0 in the first block: nothing is drawn there. Wav2Vec2
# draws one number for each of its two layers, to leave it out in training, which a graph never does.
LIBRARY: dict[str, tuple[Callable[[], nn.Module], TensorSpec, int]] = {
    "RoBERTa": (_text("Roberta"), WORDS, 9),
    "Wav2Vec2": (_speech, WAVE, 11),
    "ELECTRA": (_text("Electra"), WORDS, 9),
    "BEiT": (_vision("Beit", **_VISION), IMAGE, 2),
    "Data2Vec": (_vision("Data2VecVision", **_VISION), IMAGE, 2),
    "Swin": (
        _vision(
            "Swin", image_size=32, patch_size=4, embed_dim=8, depths=[1, 2], num_heads=[1, 2], window_size=4
        ),
        IMAGE,
        2,
    ),
    "SegFormer": (
        _vision(
            "Segformer", depths=[1, 2], hidden_sizes=[8, 16], num_attention_heads=[1, 2], num_encoder_blocks=2
        ),
        IMAGE,
        4,
    ),
}


@cache
def _made(name: str) -> tuple[nn.Module, ModelSpec, Objective]:
    make, sample = (LIBRARY | {name: (each, ROWS, 0) for name, (each, *_) in MODELS.items()})[name][:2]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Logits(make()) if name in LIBRARY else make()
    spec = split(module, sample=sample, classes=4)
    return module, spec, Objective(spec.module, spec.sample)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "form"),
    in_turn([(name,) for name in MODELS if name not in LARGE], rare=[(name,) for name in LARGE]),
)
def test_the_exported_step_equals_torch(name: str, form: str) -> None:
    step = sgd(_made(name)[2], batch=3).phases[0].function

    assert sum(port.startswith("noise.") for port in step.inputs) == MODELS[name][1]
    assert checked(form, step, 3).worst <= 1e-4


@pytest.mark.parametrize(("name", "form"), in_turn([], rare=[(name,) for name in LIBRARY]))
def test_the_step_of_a_library_s_model_is_exported_as_it_comes(name: str, form: str) -> None:
    step = sgd(_made(name)[2], batch=3).phases[0].function

    assert sum(port.startswith("noise.") for port in step.inputs) == LIBRARY[name][2]
    assert checked(form, step, 3).worst <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARY)
def test_a_library_s_model_trains_as_torch_trains_it_unedited(name: str) -> None:
    module, spec, objective = _made(name)
    y, ports = torch.tensor([0, 3, 1]), objective.noise(3)
    # With 0.9 Wav2Vec2 leaves out no layer, which a graph never does.
    noise = {n: torch.rand(port.shape) if port.shape else torch.tensor(0.9) for n, port in ports.items()}
    x = torch.randint(0, 50, (3, 8)) if spec.sample.below else torch.randn(3, *spec.sample.shape)
    numbers = iter([numbers for numbers in noise.values() if numbers.shape])

    with Given(lambda shape: next(numbers) if shape else torch.tensor(0.9)):
        wanted = F.cross_entropy(module.train()(x), y)
    named = {name: parameter for name, parameter in module.named_parameters()}
    gradients = dict(
        zip(named, torch.autograd.grad(wanted, [*named.values()], allow_unused=True), strict=True)
    )
    weights = {name: tensor.clone().requires_grad_() for name, tensor in spec.weights.items()}
    loss = objective(
        {n: weights[n] for n in objective.trainable}, {n: weights[n] for n in objective.fixed}, x, y, noise
    )[0]
    loss.backward()

    assert next(numbers, None) is None
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    for own, unit_name in spec.global_names.items():
        if gradients[own] is None:
            assert weights[unit_name].grad is None
        else:
            torch.testing.assert_close(weights[unit_name].grad, gradients[own], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(spec.module.eval()(x), module.eval()(x), rtol=0, atol=0)
