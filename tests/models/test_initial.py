"""Initial values of the models by name: the option ``initial``."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from edgefl.config.names import name_problems
from edgefl.models.exits import early_exits
from edgefl.models.layers.initial import SelfInitializing, initialize
from edgefl.models.layers.recurrent import LstmDirection
from edgefl.models.zoo.catalog import MODELS, build_model
from tests.support.errors import ModelError, refuses

# Small sizes of every model that has the option.
SIZES: dict[str, dict[str, Any]] = {
    "bert": {"vocabulary": 50, "width": 32, "depth": 1},
    "bilstm": {"vocabulary": 50, "features": 16, "hidden": 24},
    "cnn": {"size": 8},
    "convnext": {"widths": (8, 16), "depths": (1, 1)},
    "fedbat_cnn": {},
    "gpt": {"width": 32, "depth": 1},
    "mlp": {},
    "mobilenet": {"width": 0.25},
    "resnet10": {},
    "resnet18": {"widths": (8, 16, 16, 24)},
    "resnet20": {},
    "resnet8": {"norm": "gn"},
    "vit": {"width": 48, "depth": 1, "pool": "token"},
}
OWN_VALUES = ("elu_mlp", "lstm_lm")


def test_all_models_but_those_with_values_of_their_own_have_the_option() -> None:
    assert sorted([*SIZES, *OWN_VALUES]) == sorted(MODELS)
    for name in OWN_VALUES:
        with refuses(ModelError, unknown=["initial"], accepted=...):
            build_model(name, initial="torch")


@torch.no_grad()
@pytest.mark.parametrize("name", SIZES)
def test_torch_values_equal_those_of_torch_s_own_layers(name: str) -> None:
    made = build_model(name, **SIZES[name], initial="torch", seed=3)
    torchs = deepcopy(made.module)
    for tensor in torchs.state_dict().values():
        tensor.fill_(torch.nan)
    torch.manual_seed(3)
    for part in torchs.modules():
        if isinstance(part, SelfInitializing):
            part.fill(torch.default_generator)
        elif isinstance(part, LstmDirection):
            own = nn.LSTM(part.features, part.hidden)
            part.kernel.copy_(own.weight_ih_l0)
            part.recurrent.copy_(own.weight_hh_l0)
            part.bias.copy_(own.bias_ih_l0 + own.bias_hh_l0)
        elif isinstance(part, nn.Conv2d | nn.Linear | nn.Embedding | nn.LayerNorm | nn.GroupNorm):
            part.reset_parameters()
    expected = torchs.state_dict()
    for key, tensor in made.weights.items():
        if torch.isnan(expected[key]).all():  # edgefl's own batch norm
            value = 1.0 if key.endswith(("weight", "running_var")) else 0.0
            assert torch.equal(tensor, torch.full_like(tensor, value)), key
        else:
            assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("name", SIZES)
def test_torch_values_fill_their_range_and_follow_the_seed(name: str) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = (build_model(name, **SIZES[name], initial="torch", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    for key, part in first.module.named_modules():
        if not isinstance(part, nn.Conv2d | nn.Linear) or isinstance(part, SelfInitializing):
            continue
        bound = part.weight[0].numel() ** -0.5
        for tensor in part.parameters():
            assert tensor.abs().max() <= bound * (1 + 1e-6), key
            assert tensor.all(), key
        if part.weight.numel() > 500:
            assert part.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1), key
        assert not torch.equal(part.weight, other.module.get_submodule(key).weight), key
    assert all(torch.equal(tensor, again.weights[key]) for key, tensor in first.weights.items())


@pytest.mark.parametrize("name", SIZES)
def test_keras_values_are_the_default(name: str) -> None:
    assert inspect.signature(MODELS[name]).parameters["initial"].default == "keras"
    default, keras = build_model(name, **SIZES[name]), build_model(name, **SIZES[name], initial="keras")
    assert all(torch.equal(tensor, keras.weights[key]) for key, tensor in default.weights.items())
    for key, part in default.module.named_modules():
        if isinstance(part, nn.Conv2d | nn.Linear) and part.bias is not None:
            assert not part.bias.any(), key


def test_a_value_that_is_neither_is_refused_by_the_model_and_in_a_file() -> None:
    with refuses(ModelError, initial="he"):
        build_model("mlp", initial="he")
    tables = {"model": {"name": "mlp", "options": {"initial": "he"}}}
    assert [text.partition(":")[0] for text in name_problems(tables)] == ["model.options.initial"]


@pytest.mark.parametrize("initial", ["keras", "torch"])
def test_a_layer_without_a_rule_is_refused_by_name(initial: str) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(OrderedDict(first=nn.Conv1d(2, 3, 3), second=nn.Bilinear(3, 3, 2)))

    with refuses(ModelError, layer="second", kind="Bilinear"):
        initialize(build, 0, initial)


def test_convolutions_over_time_have_values() -> None:
    for initial in ("keras", "torch"):
        layer = initialize(lambda: nn.Sequential(nn.Conv1d(2, 50, 8)), 0, initial)[0]
        deviation = (2 / 16) ** 0.5 if initial == "keras" else (1 / 48) ** 0.5
        assert layer.weight.std().item() == pytest.approx(deviation, rel=0.1)
        assert bool(layer.bias.any()) == (initial == "torch")


def test_exits_follow_the_option_of_their_base() -> None:
    for initial in ("keras", "torch"):
        spec = early_exits(base="resnet8", initial=initial)
        biases = [value for key, value in spec.weights.items() if "exit" in key and key.endswith("bias")]
        assert biases and all(bool(bias.any()) == (initial == "torch") for bias in biases)
