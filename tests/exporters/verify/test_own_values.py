"""Graphs are compared on weights and buffers that the model can have."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgefl
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import TensorSpec, prefixed
from edgefl.objective.objective import Objective


class Scaled(nn.Module):
    """Buffers and parameters of which roots and logarithms are taken."""

    spread: Tensor
    prior: Tensor
    centre: Tensor
    width: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head, self.norm = nn.Linear(6, 5), nn.Linear(5, 3), nn.BatchNorm1d(5)
        self.register_buffer("spread", torch.full((6,), 4.0))
        self.register_buffer("prior", torch.tensor([0.2, 0.3, 0.5]))
        self.register_buffer("centre", torch.zeros(5))
        self.register_buffer("width", torch.full((5,), 2.0))
        self.temperature = nn.Parameter(torch.full((3,), 0.5))
        self.gain = nn.Parameter(torch.full((5,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.hidden(x / self.spread.sqrt()))
        h = F.batch_norm(h, self.centre.clone(), self.width.clone(), None, None, False)
        scores: Tensor = self.head(F.relu(h * self.gain))
        return scores * self.temperature.log() + self.prior.log()


def drawn(seed: int) -> tuple[Scaled, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Scaled()
    objective = Objective(nn.Sequential(module), TensorSpec((6,)))
    ports = prefixed("weights", objective.weights)
    example = Function("evaluate", lambda t: t, ports).example(seed)
    return module, {name.removeprefix("weights.0."): value for name, value in example.items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", ("onnx", "executorch"))
def test_roots_and_logarithms_of_buffers_are_no_fault(target: Literal["onnx", "executorch"]) -> None:
    bundle = edgefl.compile(
        edgefl.Model(Scaled(), sample=(6,), classes=3), options=edgefl.CompileOptions(target=target)
    )

    assert bundle.manifest.graphs


def test_buffers_are_as_they_are() -> None:
    module, example = drawn(1)

    for name in ("spread", "prior", "centre", "width"):
        assert torch.equal(example[name], module.get_buffer(name))


def test_statistics_of_batch_norm_move_and_stay_positive() -> None:
    module, example = drawn(1)

    state = module.state_dict()
    for name in ("norm.running_mean", "norm.running_var"):
        assert not torch.equal(example[name], state[name])
    assert example["norm.running_var"].min() > 0


def test_parameters_are_near_their_values_and_none_is_zero_or_tiny() -> None:
    module, example = drawn(1)

    weight = module.hidden.weight.detach()
    assert 0 < (example["hidden.weight"] - weight).abs().max() < weight.abs().max()
    assert example["temperature"].min() > 0
    assert example["gain"].abs().mean() > 0.01 and example["gain"].min() > 0


def test_a_parameter_of_zeros_gets_values() -> None:
    layer = nn.Linear(4, 3)
    nn.init.zeros_(layer.weight)
    ports = prefixed("weights", Objective(nn.Sequential(layer), TensorSpec((4,))).weights)

    assert Function("evaluate", lambda t: t, ports).example(0)["weights.0.weight"].abs().min() > 0


def test_ports_share_the_models_memory() -> None:
    layer = nn.Linear(4, 3)
    values = Objective(nn.Sequential(layer), TensorSpec((4,))).weights["0.weight"].values

    assert values is not None and values.data_ptr() == layer.weight.data_ptr()
    assert TensorSpec.holding(layer.weight) == TensorSpec.of(layer.weight)
    assert hash(TensorSpec.holding(layer.weight)) == hash(TensorSpec.of(layer.weight))
